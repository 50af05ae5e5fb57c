"""Experiments and their cells: the trainings and measurements of a table or figure of the paper.

A cell is one training run for each seed, with the paper's result beside it. The presets are plain data of these types.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from semaug.network.network import FrozenBlocks
from semaug.training.methods import METHODS

if TYPE_CHECKING:
    from semaug.studies.scales import Setup

ScaleName = Literal["full", "small"]
Extra = dict[str, Any]
"""Measurements other than training runs: `lines` of text, and the values of an experiment's charts."""

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

    method: str  # without a composite model
    dataset: str = "cub"
    network: str = "ResNet-50"  # as the paper writes it
    paper: float | None = None  # the paper's top-1 accuracy in %, if its text or tables state it as a number
    setting: str = ""  # what distinguishes the cell from others of the same method, for readers: "λ0 = 5"
    strength: float = 10.0  # λ0
    power: float = 1.0  # α, the exponent with which λ grows
    width: int | None = None  # of CovNet, for features of 2048 dimensions; None for a quarter of them
    depth: int = 1  # of CovNet
    frozen: FrozenBlocks | None = None  # None for the network's own number of blocks
    meta_lr: float | None = None  # CovNet's learning rate; None for the data set's
    momentum: float = 0.0  # of CovNet's SGD
    small_model: str = ""  # the stand-in at small scale, if it is not the network's usual one

    @property
    def title(self) -> str:
        """Method and setting, for tables."""
        return ", ".join(part for part in (METHODS[self.method].title, self.setting) if part)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str  # what the user types
    order: int  # position in the list
    title: str
    line: str  # for the list
    shows: str  # what the paper shows
    caption: str  # how to read our result
    cells: tuple[Cell, ...] = ()
    small_cells: tuple[Cell, ...] | None = None  # at small scale, if they differ
    small_seeds: tuple[int, ...] = (0, 1)
    kind: Literal["table", "lines", "pictures", "theorem"] = "table"  # what the report draws
    axis: str = ""  # what changes along the horizontal axis of "lines"
    picture: Literal["neighbours", "tsne", "augmentations"] | None = None  # of semaug.report.figures
    picture_options: Mapping[ScaleName, Mapping[str, Any]] = field(default_factory=dict)  # of that figure
    curves: bool = False  # whether to draw Σ over the epochs
    published: bool = False  # whether to show the published results of other methods
    measure: Callable[["Experiment", "Setup"], Extra] | None = None  # what is not a training run
    needs_gpu: bool = False  # for `measure` at full scale

    @property
    def has_extra(self) -> bool:
        """Whether there is something to measure after the runs."""
        return bool(self.picture or self.measure)

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
    results: Mapping[str, Sequence[float | None]],
    methods: Sequence[str] = ("basic", "isda", "learnable"),
    **common: Any,
) -> tuple[Cell, ...]:
    """Make the cells of several methods for each data set or network.

    Args:
        vary: The field of :class:`Cell` that differs.
        results: The paper's accuracies by the value of that field, in the order of `methods`; None if it has none.
        methods: The methods.
        **common: Further fields, the same for all cells.
    """
    return tuple(
        Cell(method, paper=paper, **{**common, vary: value})
        for value, row in results.items()
        for method, paper in zip(methods, row, strict=True)
    )
