"""One module for each table or figure of the paper, and their discovery.

A module defines ``EXPERIMENT``. Its docstring states the settings and the results of the paper, and the time to expect.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module

from semaug.studies.cells import Experiment
from semaug.util.errors import SettingError


def all_experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of their field `order`."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    ordered: list[Experiment] = sorted((module.EXPERIMENT for module in modules), key=lambda preset: preset.order)
    return {preset.name: preset for preset in ordered}


def experiments(names: Sequence[str]) -> list[Experiment]:
    """Find several experiments, each once, in the order of the list; the name ``"all"`` stands for every one."""
    known = all_experiments()
    for name in names:
        if name not in known and name != "all":
            raise SettingError(f"unknown experiment {name!r}; the names are {', '.join(known)}, and all")
    return [preset for name, preset in known.items() if "all" in names or name in names]
