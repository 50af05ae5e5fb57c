"""What `semaug compare` trains: methods × networks × strengths × seeds, all else being equal."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro

from semaug.studies.scales import stem
from semaug.training.methods import METHODS, Augmentation
from semaug.training.settings import TrainConfig, given
from semaug.util.errors import SemaugError

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Augmentation(Augmentation):
    """The settings of the augmentation that all runs share."""

    strength: Annotated[float | None, tyro.conf.Suppress] = None
    frozen_blocks: Annotated[int, tyro.conf.Suppress] = 0


@dataclass(frozen=True)
class _Training(TrainConfig):
    """The settings that all runs share; the suppressed ones differ between them."""

    model: Annotated[str | None, tyro.conf.Suppress] = None
    weights: Annotated[Path | None, tyro.conf.Suppress] = None
    method: Annotated[str, tyro.conf.Suppress] = "learnable"
    output: Annotated[Path | None, tyro.conf.Suppress] = None
    seed: Annotated[int, tyro.conf.Suppress] = 0
    resume: Annotated[bool, tyro.conf.Suppress] = True
    augmentation: _Augmentation = field(default_factory=_Augmentation)


@dataclass(frozen=True)
class CompareConfig:
    """Compare methods on one data set, over several seeds."""

    method: tuple[str, ...] = ("basic", "constant", "isda", "learnable")
    """Methods to compare; the first is the baseline that the others are measured against. In quotes, one may have
    options of its own, as in "learnable --fixed-trace 0.5"."""
    model: tuple[str, ...] | None = None
    """Networks, on each of which the methods are compared: timm names, or torchvision/NAME; resnet50 if not given (a
    small network of our own on the embedded birds)."""
    strength: tuple[float, ...] | None = None
    """λ0: the strengths to try, by methods that augment features; if not given each has its own (semaug train)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each cell is trained once for each seed, which also draws the validation split where the data has none."""
    weights: tuple[str, ...] = ()
    """MODEL=FILE: weights to start from, for each network its own file; FILE alone if there is one network."""
    frozen_blocks: tuple[str, ...] = ()
    """The stem and so many blocks keep out of the pseudo update: N for every network, or MODEL=N for one of them."""
    jobs: int | None = None
    """Runs at once; one for each GPU if not given. Times are compared where runs were made one by one."""
    output: Path = Path("runs/compare")
    """Folder of the runs, the tables and the report."""
    training: _Training = field(default_factory=_Training)

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """The networks by name."""
        return self.model if self.model is not None else (given(self.training.filled().model),)

    def check(self) -> None:
        """See that the options make sense, before anything is trained."""
        for option in ("method", "model", "strength", "seeds"):
            values = getattr(self, option)
            if values is not None:
                _check_list(f"--{option}", values)
        named = [split_method(text)[0] for text in self.method]
        for method in named:
            if method not in METHODS:
                raise SemaugError(f"unknown method {method!r}; the methods are {', '.join(METHODS)}")
        if self.strength is not None and not any(map(augments, named)):
            raise SemaugError(f"--strength is for methods that augment features, and {', '.join(named)} do not")
        for strength in self.strength or ():
            if not 0 <= strength < float("inf"):
                raise SemaugError(f"--strength must be at least 0, not {strength:g}")
        if self.jobs is not None and self.jobs < 1:
            raise SemaugError(f"--jobs must be at least 1, not {self.jobs}")
        for cell in self.cells():
            self.settings(cell, self.seeds[0])

    def cells(self) -> Iterator["Cell"]:
        """Networks × methods × strengths; a method that does not augment has one cell on each network."""
        for network in self.networks:
            for method, options in map(split_method, self.method):
                default = TrainConfig(data=self.data, method=method).filled().augmentation.strength
                own = self._with(options, TrainConfig()).augmentation.strength
                tried = self.strength or (default,) if own is None else (own,)
                for strength in tried if augments(method) else (None,):
                    yield Cell(network, method, strength, shlex.join(options))

    def settings(self, cell: "Cell", seed: int) -> TrainConfig:
        """The settings of a run; the same settings give the same run directory."""
        method = cell.method
        shared = _as(TrainConfig, self.training)
        augmentation = replace(
            _as(Augmentation, self.training.augmentation),
            strength=cell.strength,
            frozen_blocks=self._frozen()[cell.network],
        )
        shared = replace(
            shared,
            data=self.data,
            model=cell.network,
            method=method,
            weights=self._weights()[cell.network],
            augmentation=self._relevant(method, augmentation),
            seed=seed,
        )
        config = self._with(shlex.split(cell.options), shared)
        if self._relevant(method, config.augmentation) != config.augmentation:
            raise SemaugError(f"--method {cell.method} {cell.options}: {method} does not look at all of these options")
        config = config.filled()
        strength = () if cell.strength is None else (f"{cell.strength:g}",)
        name = stem((Path(self.data).stem, cell.network, method, *strength), config, self.data)
        return replace(config, output=self.output / "runs" / f"{name}-s{seed}")

    def _relevant(self, method: str, augmentation: Augmentation) -> Augmentation:
        return METHODS[method].relevant(augmentation)

    def _with(self, options: Sequence[str], config: TrainConfig) -> TrainConfig:
        """A configuration with a method's own options, which are those of `semaug train`."""
        if not options:
            return config
        said = shlex.join(options)
        for word in options:
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            if word.startswith("--") and name in _NOT_ITS_OWN:
                raise SemaugError(f"{word} cannot be an option of one method ({said}): all runs share it")
        try:
            return tyro.cli(
                TrainConfig,
                args=list(options),
                default=config,
                config=(tyro.conf.OmitArgPrefixes,),
                console_outputs=False,
            )
        except SystemExit as error:
            raise SemaugError(f"{said!r} are not options that semaug train would take") from error

    @cached_property
    def data(self) -> str:
        """The name of the data set, or its path from the root, which is the same from every folder."""
        from semaug.data.readers import KNOWN

        named = self.training.data
        return named if named == "birds" or named in KNOWN else str(Path(os.path.expanduser(named)).resolve())

    def _weights(self) -> dict[str, Path | None]:
        if len(self.networks) > 1 and any("=" not in text for text in self.weights):
            raise SemaugError("with several networks each needs its own weights: --weights MODEL=FILE")
        return self._by_network("--weights", self.weights, _file, None)

    def _frozen(self) -> dict[str, int]:
        return self._by_network("--frozen-blocks", self.frozen_blocks, _whole_number, 0)

    def _by_network(
        self, option: str, texts: Sequence[str], read: Callable[[str, str], Value], default: Value
    ) -> dict[str, Value]:
        """The values of "VALUE", for every network, and "MODEL=VALUE", for one of them, which goes before."""
        found: dict[str, Value] = {}
        for text in texts:
            name, value = text.split("=", 1) if "=" in text else ("", text)
            if name in found:
                raise SemaugError(f"{option} names {name or 'a value for every network'} twice")
            if name and name not in self.networks:
                networks = ", ".join(self.networks)
                raise SemaugError(f"{option} is given for {name}, which is not among the networks: {networks}")
            found[name] = read(option, value)
        return {name: found.get(name, found.get("", default)) for name in self.networks}


@dataclass(frozen=True)
class Cell:
    """What is trained once for each seed; `strength` is None for a method that does not augment."""

    network: str
    method: str
    strength: float | None
    options: str = ""  # of its own, as on a command line

    @property
    def name(self) -> str:
        return f"{self.method} {self.options}".strip()

    @property
    def title(self) -> str:
        return self.name if self.strength is None else f"{self.name} (λ0 {self.strength:g})"


_NOT_ITS_OWN = ("data", "data_root", "model", "weights", "method", "output", "seed", "resume")


def _as(kind: type[Value], options: Any) -> Value:
    """The same options as another dataclass has them."""
    return kind(**{option.name: getattr(options, option.name) for option in fields(cast(Any, kind))})


def split_method(text: str) -> tuple[str, list[str]]:
    """A method and its own options."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SemaugError(f"--method {text}: {str(error).lower()}") from error
    return (words[0], words[1:]) if words else ("", [])


def augments(method: str) -> bool:
    """Whether a method augments features, so that a strength makes sense."""
    return METHODS[method].augments


def command(config: CompareConfig) -> str:
    """The command line that makes this comparison."""
    return shlex.join(["semaug", "compare", *_words(config)])


def _words(options: Any) -> Iterator[str]:
    """The options that are not at their defaults, as they are given on the command line."""
    for option in fields(options):
        value, default = getattr(options, option.name), getattr(type(options)(), option.name)
        if is_dataclass(value):
            yield from _words(value)
        elif value != default:
            name = option.name.replace("_", "-")
            if isinstance(value, bool) and isinstance(default, bool):
                yield f"--{name}" if value else f"--no-{name}"
            else:
                yield from (f"--{name}", *map(str, value if isinstance(value, tuple) else (value,)))


def _check_list(option: str, values: Sequence[object]) -> None:
    if not values:
        raise SemaugError(f"{option} needs at least one value")
    for i, value in enumerate(values):
        if value in values[:i]:
            raise SemaugError(f"{option} names {value} twice")


def _file(option: str, text: str) -> Path | None:
    path = Path(text).expanduser().resolve()
    if not path.is_file():
        raise SemaugError(f"{option}: there is no file {text}")
    return path


def _whole_number(option: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise SemaugError(f"{option} takes N or MODEL=N with a whole number N, not {text!r}")
    return int(text)
