"""The command line in one of several processes, of which the last one fails in its third step."""

import os
import sys
from typing import Any

from semaug.cli.main import main
from semaug.meta.learner import LearnableAugmentation
from semaug.util.errors import SemaugError

steps = iter(range(1_000_000))
original = LearnableAugmentation.step


def step(self: LearnableAugmentation, *batch: Any) -> Any:
    if next(steps) == 2 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise SemaugError("the last process has had enough")
    return original(self, *batch)


LearnableAugmentation.step = step  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
