"""Experiments and their cells: what a table or figure of the paper trains and measures.

A cell is one training run for each seed, with the paper's figure beside it. The presets are plain data of these types.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from semaug.training.methods import METHODS

if TYPE_CHECKING:
    from semaug.studies.scales import Setup

ScaleName = Literal["full", "small"]
Extra = dict[str, Any]
"""What is measured besides training runs: `lines` of text, and what the charts of an experiment need."""

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
    """One cell of a table, or one point of a figure.

    Args:
        method: Name of the method without a composite model (``"learnable"``).
        dataset: A key of :data:`DATASETS`.
        network: A network of the paper, as the paper writes it.
        paper: The paper's top-1 accuracy in %, if its text or tables state it as a number.
        setting: What distinguishes the cell from others of the same method, for readers: ``"λ0 = 5"``.
        strength: λ0 at the paper's scale.
        power: α, the exponent with which λ grows.
        width: Hidden width of CovNet for features of 2048 dimensions; None for a quarter of them.
        depth: Number of hidden layers of CovNet.
        frozen: Number of frozen blocks; None for the network's own number.
        rate: CovNet's learning rate as a share of the network's; None for the paper's fixed rate.
        small_model: The stand-in at small scale, if it is not the network's usual one.
    """

    method: str
    dataset: str = "cub"
    network: str = "ResNet-50"
    paper: float | None = None
    setting: str = ""
    strength: float = 10.0
    power: float = 1.0
    width: int | None = None
    depth: int = 1
    frozen: int | None = None
    rate: float | None = None
    small_model: str = ""

    @property
    def title(self) -> str:
        """Method and setting, for tables."""
        return ", ".join(part for part in (METHODS[self.method].title, self.setting) if part)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Args:
        name: What the user types.
        order: Position in the list of experiments.
        title: Heading in reports.
        line: One line for the list of experiments.
        shows: What the paper shows.
        caption: How to read our result.
        cells: The cells at full scale.
        small_cells: The cells at small scale; None for the same ones.
        small_seeds: Default seeds at small scale.
        kind: What the report draws: dots beside a table, curves over `axis`, pictures, or the theorem's curves.
        axis: What changes along the horizontal axis of ``"lines"``.
        picture: The figure of :mod:`semaug.report.figures` to draw from the finished runs.
        curves: Whether to draw Σ over the epochs.
        published: Whether to show the published results of other methods.
        measure: Measures what is not a training run, from the experiment and the setup.
        needs_gpu: Whether `measure` needs a GPU at full scale.
    """

    name: str
    order: int
    title: str
    line: str
    shows: str
    caption: str
    cells: tuple[Cell, ...] = ()
    small_cells: tuple[Cell, ...] | None = None
    small_seeds: tuple[int, ...] = (0, 1)
    kind: Literal["table", "lines", "pictures", "theorem"] = "table"
    axis: str = ""
    picture: Literal["neighbours", "tsne", "augmentations"] | None = None
    curves: bool = False
    published: bool = False
    measure: Callable[["Experiment", "Setup"], Extra] | None = None
    needs_gpu: bool = False

    def at(self, scale: ScaleName) -> tuple[Cell, ...]:
        """The cells at a scale."""
        return self.small_cells if scale == "small" and self.small_cells is not None else self.cells

    def seeds(self, scale: ScaleName) -> tuple[int, ...]:
        """The default seeds at a scale."""
        if scale == "small":
            return self.small_seeds
        return (0,) if self.picture else (0, 1, 2)


def method_cells(
    vary: Literal["dataset", "network"],
    figures: Mapping[str, Sequence[float | None]],
    methods: Sequence[str] = ("basic", "isda", "learnable"),
    **common: Any,
) -> tuple[Cell, ...]:
    """Make the cells of several methods for each data set or network.

    Args:
        vary: The field of :class:`Cell` that the keys of `figures` are values of.
        figures: The paper's accuracies in the order of `methods`.
        methods: Names of the methods.
        common: Further fields of all cells.

    Returns:
        The cells, row by row.
    """
    return tuple(
        Cell(method, paper=paper, **{vary: value}, **common)
        for value, row in figures.items()
        for method, paper in zip(methods, row, strict=True)
    )


def baseline(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Find the cell of plain training on the same data with the same network.

    Args:
        cell: The cell to compare.
        cells: The cells of its experiment.

    Returns:
        The baseline; None if there is none, or if it is the cell itself.
    """
    for other in cells:
        if other.method == "basic" and (other.dataset, other.network) == (cell.dataset, cell.network):
            return other if other is not cell else None
    return None
