"""Discovery of the presets: every module of :mod:`semaug.studies.presets` defines an ``EXPERIMENT``."""

import pkgutil
from collections.abc import Sequence
from importlib import import_module

from semaug.studies import presets
from semaug.studies.cells import Experiment
from semaug.util.errors import SettingError


def all_experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of their field `order`."""
    modules = (import_module(f"{presets.__name__}.{module.name}") for module in pkgutil.iter_modules(presets.__path__))
    ordered: list[Experiment] = sorted((module.EXPERIMENT for module in modules), key=lambda preset: preset.order)
    return {preset.name: preset for preset in ordered}


def experiment(name: str) -> Experiment:
    """Find an experiment by its name.

    Raises:
        SettingError: There is no such experiment.
    """
    known = all_experiments()
    if name not in known:
        raise SettingError(f"unknown experiment {name!r}; the names are {', '.join(known)}, and all")
    return known[name]


def experiments(names: Sequence[str]) -> list[Experiment]:
    """Find several experiments.

    Args:
        names: Their names; ``"all"`` stands for every experiment.

    Returns:
        Each experiment once, in the order of the list.

    Raises:
        SettingError: A name is unknown.
    """
    wanted = {experiment(name).name for name in names if name != "all"}
    return [preset for name, preset in all_experiments().items() if "all" in names or name in wanted]
