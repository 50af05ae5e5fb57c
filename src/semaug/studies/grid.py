"""The grid of `compare`: methods × networks × strengths × seeds, all other settings being equal."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from semaug.data.readers import KNOWN
from semaug.isda.strength import StrengthOption
from semaug.network.network import FrozenBlocks
from semaug.studies.scales import stem
from semaug.training.methods import METHODS
from semaug.training.settings import TrainConfig, required
from semaug.util.errors import SettingError
from semaug.util.files import expanded

_SHARED = (
    "data", "data_root", "select", "val_fraction", "val_per_class", "model", "weights", "method", "output", "seed",
    "resume", "augmentation",
)  # fmt: skip
_NAMES = frozenset(setting.name for setting in fields(TrainConfig))


@dataclass(frozen=True)
class Candidate:
    """A method to compare, with settings of its own: fields of :class:`TrainConfig` or :class:`Augmentation`."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # in which it differs from the other methods
    options: str | None = None  # the same settings as text, for tables; None to write them as name=value

    @property
    def name(self) -> str:
        """Method and settings, for tables."""
        return f"{self.method} {self.text}".strip()

    @property
    def text(self) -> str:
        """The settings as text."""
        return " ".join(f"{k}={v}" for k, v in self.settings.items()) if self.options is None else self.options

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Change the configuration that all methods share to the settings of this one."""
        own = {name: value for name, value in self.settings.items() if name in _NAMES}
        inner = {name: value for name, value in self.settings.items() if name not in _NAMES}
        return replace(config, **own, augmentation=replace(config.augmentation, **inner))

    def check(self) -> None:
        """Check that the method is known and uses its settings, and that no setting must be shared with the others."""
        if self.method not in METHODS:
            raise SettingError(f"unknown method {self.method!r}; the methods are {', '.join(METHODS)}")
        for name in self.settings:
            if name in _SHARED:
                raise SettingError(f"`{name}` cannot differ between methods ({self.name}): all runs share it")
            if name not in _NAMES and name not in METHODS[self.method].options:
                raise SettingError(f"{self.method} does not use `{name}`")


@dataclass(frozen=True)
class Arm:
    """One run for each seed; `strength` is None for a method that does not augment features."""

    network: str
    candidate: Candidate
    strength: StrengthOption | None

    @property
    def strength_text(self) -> str:
        """The strength, for tables; empty if there is none."""
        if self.strength is None:
            return ""
        return self.strength if isinstance(self.strength, str) else f"{self.strength:g}"

    @property
    def title(self) -> str:
        """Method, settings and strength, for sentences."""
        return f"{self.candidate.name} (λ0 {self.strength_text})" if self.strength_text else self.candidate.name


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison."""

    method: tuple[Candidate, ...] = tuple(map(Candidate, ("basic", "constant", "isda", "learnable")))  # baseline first
    model: tuple[str, ...] | None = None  # the networks; None for the default network of the data
    strength: tuple[StrengthOption, ...] = ("auto",)  # to try, by methods that augment features: λ0, or "auto"
    seeds: tuple[int, ...] = (0, 1, 2)  # a seed also draws the validation split if the data has none
    weights: Mapping[str, Path] = field(default_factory=dict)  # files or runs to start from, by network
    frozen_blocks: Mapping[str, FrozenBlocks] = field(default_factory=dict)  # by network; others use the shared setting
    jobs: int | None = None  # runs at a time; None for one on each GPU. Times are compared if they were trained alone
    output: Path = Path("runs/compare")  # folder of the runs, tables and report
    training: TrainConfig = field(default_factory=TrainConfig)  # settings that all runs share
    command: str = ""  # that repeats the comparison, for the report

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """The networks by name."""
        return self.model if self.model is not None else (required(self.training.resolve().model),)

    @cached_property
    def data(self) -> str:
        """The name of the data set, or its absolute path, so that a run's name does not depend on the folder."""
        named = self.training.data
        return named if named == "birds" or named in KNOWN else str(Path(os.path.expanduser(named)).resolve())

    def check(self) -> None:
        """Check all settings before anything is trained; a :class:`SettingError` says what is wrong."""
        names = tuple(candidate.name for candidate in self.method)
        lists = {"method": names, "model": self.model, "strength": self.strength, "seeds": self.seeds}
        for setting, values in lists.items():
            if values == ():
                raise SettingError(f"`{setting}` needs at least one value")
            for value, count in Counter(values).items():
                if count > 1:
                    raise SettingError(f"`{setting}` lists {value} twice")
        for candidate in self.method:
            candidate.check()
        if self.strength != ("auto",) and not any(METHODS[candidate.method].augments for candidate in self.method):
            raise SettingError(f"`strength` is for methods that augment features; {', '.join(names)} do not")
        if self.jobs is not None and self.jobs < 1:
            raise SettingError(f"`jobs` must be at least 1, not {self.jobs}")
        for setting, networks in {"weights": self.weights, "frozen_blocks": self.frozen_blocks}.items():
            for unknown in set(networks) - set(self.networks):
                known = ", ".join(self.networks)
                raise SettingError(f"`{setting}` has a value for {unknown}, which is not among the networks: {known}")
        if self.training.weights is not None and len(self.networks) > 1:
            raise SettingError("with several networks, each needs its own `weights`")
        for file in (*self.weights.values(), self.training.weights):
            if file is not None and not file.exists():
                raise SettingError(f"`weights`: there is no file or run {file}")
        repeated = [run for run, count in Counter(run.output for run in self.runs()).items() if count > 1]
        if repeated:
            raise SettingError(f"two of the methods have the same settings: {required(repeated[0]).name}")

    def arms(self) -> Iterator[Arm]:
        """Iterate over networks × methods × strengths; a method without Σ has one arm for each network."""
        for network in self.networks:
            for candidate in self.method:
                own = candidate.settings.get("strength")
                strengths = self.strength if own is None else (own,)
                for strength in strengths if METHODS[candidate.method].augments else (None,):
                    yield Arm(network, candidate, strength)

    def settings(self, arm: Arm, seed: int) -> TrainConfig:
        """Make the settings of a run, with a run directory that depends on them alone."""
        method, shared = arm.candidate.method, self.training
        weights = self.weights.get(arm.network, shared.weights)
        augmentation = replace(
            shared.augmentation,
            strength=0.0 if arm.strength is None else arm.strength,
            frozen_blocks=self.frozen_blocks.get(arm.network, shared.augmentation.frozen_blocks),
        )
        config = replace(
            shared,
            data=self.data,
            model=arm.network,
            method=method,
            weights=None if weights is None else expanded(weights).resolve(),
            augmentation=METHODS[method].relevant(augmentation),
            seed=seed,
        )
        config = arm.candidate.apply(config).resolve()
        strength = (arm.strength_text,) if arm.strength_text else ()
        name = stem((Path(self.data).stem, arm.network, method, *strength), config, self.data)
        return replace(config, output=self.output / "runs" / f"{name}-s{seed}")

    def runs(self) -> list[TrainConfig]:
        """The settings of all runs."""
        return [self.settings(arm, seed) for arm in self.arms() for seed in self.seeds]

    def to_json(self) -> dict[str, Any]:
        """All settings in plain types."""
        return {**asdict(self), "method": [candidate.name for candidate in self.method]}
