"""The names of the paper's tables and figures, in the paper's order, and the module of each."""

from importlib import import_module

from semaug.studies.cells import Experiment
from semaug.util.errors import SemaugError

MODULES = {
    "table-datasets": "table_datasets",
    "table-networks": "table_networks",
    "table-sota-p2p": "table_sota_p2p",
    "table-image-level": "table_image_level",
    "figure-depth": "figure_depth",
    "figure-joint": "figure_joint",
    "figure-strength": "figure_strength",
    "figure-schedule": "figure_schedule",
    "figure-frozen-blocks": "figure_frozen_blocks",
    "table-covnet": "table_covnet",
    "table-imagenet": "table_imagenet",
    "figure-neighbours": "figure_neighbours",
    "figure-tsne": "figure_tsne",
    "figure-augmentations": "figure_augmentations",
    "theorem": "theorem_preset",
}


def experiment(name: str) -> Experiment:
    """The preset of a name."""
    if name not in MODULES:
        raise SemaugError(f"unknown experiment {name!r}; the names are {', '.join(MODULES)}, and all")
    found = import_module(f"semaug.studies.{MODULES[name]}").EXPERIMENT
    assert isinstance(found, Experiment)
    return found


def experiments(names: tuple[str, ...]) -> list[Experiment]:
    """The presets of names, each once, in the paper's order; "all" is every one."""
    for name in names:
        if name != "all":
            experiment(name)
    return [experiment(name) for name in MODULES if "all" in names or name in names]
