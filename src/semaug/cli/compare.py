"""`semaug compare`: compare methods on one data set."""

import io
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar, cast

import tyro
from rich.console import Console

from semaug.cli.common import Command, command_line, with_flags
from semaug.isda.precision import LARGEST_STRENGTH
from semaug.isda.strength import StrengthOption
from semaug.network.network import FrozenBlocks
from semaug.studies.grid import Candidate, CompareConfig
from semaug.training.settings import TrainConfig
from semaug.util.errors import SettingError, TrainingError
from semaug.util.files import expanded
from semaug.util.names import printable
from semaug.util.ranges import Jobs, Range, Seed, setting

Value = TypeVar("Value")

# Settings of a run that are options of `compare` itself, or belong to one run.
_NOT_SHARED = ("model", "weights", "method", "output", "seed", "resume", "strength", "frozen_blocks")


@dataclass(frozen=True)
class Compare(Command):
    """Find the best method for your images: train with each, over several seeds, and compare them in pairs.

    Runs have equal settings except for method, network, strength and seed. Finished runs are not repeated, interrupted
    ones are resumed, and a failed one does not stop the others. The table shows mean and spread over the seeds, and
    differences to the first method with their standard errors. comparison.json holds every run.
    """

    resumable: ClassVar[bool] = True

    method: tuple[str, ...] = setting(("basic", "constant", "isda", "learnable"), "main")
    """Methods to compare. The first is the baseline. In quotes, a method may have its own options of semaug train, as
    in "learnable --fixed-trace 0.5"."""
    model: tuple[str, ...] | None = setting(None, "main")
    """Networks, each of which is used with every method: timm names, or torchvision/NAME. Default: resnet50; on the
    embedded birds "small"."""
    strength: tuple[Annotated[StrengthOption, Range(0, LARGEST_STRENGTH)], ...] = setting(("auto",), "method")
    """Strengths to try, for methods that augment features: auto, or λ0 of the paper's schedule."""
    seeds: tuple[Seed, ...] = setting((0, 1, 2), "main")
    """Seeds. Each also draws the validation split if the data has none."""
    weights: tuple[str, ...] = setting((), "model")
    """MODEL=FILE: weights to start from, for each network its own file or finished run. FILE alone if there is one
    network."""
    frozen_blocks: tuple[str, ...] = setting((), "method")
    """Freeze the stem and the first N blocks in the pseudo update: N for every network, or MODEL=N for one of them.
    stem as N freezes the stem alone. Default: auto, five eighths of a network's blocks."""
    jobs: Jobs | None = setting(None, "hardware")
    """Number of runs at a time. Default: one for each GPU. Times are compared only if it was 1 for all runs."""
    output: Path = setting(Path("runs/compare"), "main")
    """Folder of the runs, the tables and the report."""
    training: TrainConfig = field(default_factory=TrainConfig, metadata={"hidden": _NOT_SHARED})

    def run(self) -> None:
        from semaug.data.readers import refuse_ambiguity
        from semaug.studies.compare import compare

        refuse_ambiguity(self.training.data, self.training.data_root)
        comparison = compare(self.config())
        console = Console(highlight=False)
        console.print(comparison.table())
        for line in comparison.lines:
            console.print(with_flags(printable(line), self), markup=False, soft_wrap=True)
        console.print(f"{self.output}: comparison.md, comparison.json", markup=False, soft_wrap=True)
        if comparison.failed:
            logs = self.output / "logs"
            raise TrainingError(f"{len(comparison.failed)} of the runs failed, see above; their logs are in {logs}")

    def config(self) -> CompareConfig:
        """Convert the options to settings of the library."""
        weights = _by_network("weights", self.weights, lambda text: expanded(Path(text)))
        frozen = _by_network("frozen_blocks", self.frozen_blocks, _frozen_blocks)
        augmentation = replace(self.training.augmentation, frozen_blocks=frozen.pop("", "auto"))
        shared = replace(self.training, weights=weights.pop("", None), augmentation=augmentation)
        return CompareConfig(
            method=tuple(map(_candidate, self.method)),
            model=self.model,
            strength=self.strength,
            seeds=self.seeds,
            weights=weights,
            frozen_blocks=frozen,
            jobs=self.jobs,
            output=self.output,
            training=replace(shared, method="learnable"),  # not used: each run has its own
            command=command_line("compare", self),
        )


def _candidate(text: str) -> Candidate:
    """Read a method and its own options: "learnable --fixed-trace 0.5"."""
    try:
        method, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise SettingError(f"`method` {text}: {str(error).lower()}") from error
    options = shlex.join(words)
    try:
        with redirect_stderr(io.StringIO()):  # tyro's own message is about a command that was not typed
            parsed = tyro.cli(TrainConfig, args=words, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as error:
        raise SettingError(f"{options!r} are not options of semaug train") from error
    values = vars(parsed.augmentation) | vars(parsed)
    names = [word.partition("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")]
    names = [name if name in values else name.removeprefix("no_") for name in names]
    return Candidate(method, {name: values[name] for name in names}, options)


def _by_network(option: str, texts: Sequence[str], read: Callable[[str], Value]) -> dict[str, Value]:
    """Read "VALUE", for every network (key ""), and "MODEL=VALUE", for one network."""
    values: dict[str, Value] = {}
    for text in texts:
        name, value = text.split("=", 1) if "=" in text else ("", text)
        if name in values:
            raise SettingError(f"`{option}` has two values for {name or 'every network'}")
        values[name] = read(value)
    return values


def _frozen_blocks(text: str) -> FrozenBlocks:
    if text in ("stem", "auto"):
        return cast(FrozenBlocks, text)
    if not text.isascii() or not text.isdecimal():
        raise SettingError(f"`frozen_blocks` takes N or MODEL=N with a whole number N, stem or auto, not {text!r}")
    return int(text)
