"""What an experiment is: cells, one training run each (for each seed), with the paper's figure beside them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from semaug.training.methods import METHODS

ScaleName = Literal["full", "small"]
Kind = Literal["table", "bars", "lines", "pictures", "theorem"]
Picture = Literal["neighbours", "tsne", "augmentations"]

PAPER_FEATURES = 2048  # dimensions of ResNet-50's feature
DATASETS = {
    "cub": "CUB-200-2011",
    "aircraft": "FGVC Aircraft",
    "cars": "Stanford Cars",
    "nabirds": "NABirds",
    "imagenet": "ImageNet",
}


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or one point of a figure; settings are those of the paper's scale."""

    method: str
    dataset: str = "cub"
    network: str = "ResNet-50"
    paper: float | None = None
    """The paper's top-1 accuracy in %, where its text or tables give it as a number."""
    setting: str = ""
    """What sets this cell apart from others of the same method, as a person writes it: "λ0 = 5"."""
    strength: float = 10.0
    power: float = 1.0
    width: int | None = None
    """Hidden width of CovNet where features have 2048 dimensions; a quarter of them if not given."""
    depth: int = 1
    frozen: int | None = None
    """Frozen blocks; the network's own number if not given."""
    rate: float | None = None
    """CovNet's learning rate as a share of the network's; the paper's fixed one if not given."""
    small_model: str = ""
    """The stand-in at small scale, where it is not the network's own."""
    blocked: str = ""
    """Why this cell cannot be run at all."""

    @property
    def title(self) -> str:
        return ", ".join(part for part in (METHODS[self.method].title, self.setting) if part)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    line: str
    """One line for the list."""
    shows: str
    """What the paper shows."""
    caption: str
    """How to read ours."""
    cells: tuple[Cell, ...] = ()
    small_cells: tuple[Cell, ...] | None = None
    """Where the cells at small scale are others."""
    small_seeds: tuple[int, ...] = (0, 1)
    kind: Kind = "table"
    axis: str = ""
    """What changes along the horizontal axis (kind "lines")."""
    picture: Picture | None = None
    curves: bool = False
    """Draw Σ's variance over the epochs too."""
    times: bool = False
    """Measure the time per step against frozen blocks too."""
    shapes: bool = False
    """Count CovNet's operations and parameters too."""
    published: bool = False
    """Show the published results of other methods too."""

    def at(self, scale: ScaleName) -> tuple[Cell, ...]:
        return self.small_cells if scale == "small" and self.small_cells is not None else self.cells

    def seeds(self, scale: ScaleName) -> tuple[int, ...]:
        """The seeds if none are asked for."""
        if scale == "small":
            return self.small_seeds
        return (0,) if self.picture else (0, 1, 2)


def baseline(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """The cell of plain training on the same data with the same network."""
    for other in cells:
        if other.method == "basic" and (other.dataset, other.network) == (cell.dataset, cell.network):
            return other if other is not cell else None
    return None
