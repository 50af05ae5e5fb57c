"""The command line in one of several processes, of which the last one fails in its third step."""

import os
from typing import Any

from semaug.cli.main import main as command_line
from semaug.meta.learner import LearnableAugmentation
from semaug.util.errors import SemaugError


def main(arguments: list[str]) -> int:
    steps, original = iter(range(1_000_000)), LearnableAugmentation.step

    def step(self: LearnableAugmentation, *batch: Any) -> Any:
        if next(steps) == 2 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise SemaugError("the last process fails")
        return original(self, *batch)

    LearnableAugmentation.step = step  # type: ignore[method-assign]
    return command_line(arguments)
