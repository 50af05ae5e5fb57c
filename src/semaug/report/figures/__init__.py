"""The figures of the paper, drawn from finished runs: each function returns a :class:`Figure`.

| module                                 | subject                                                            |
|----------------------------------------|--------------------------------------------------------------------|
| `table`                                | all figures by name; where a new figure is added                   |
| `neighbours`, `tsne`, `augmentations`  | features: nearest images, look-alike classes, augmented features   |
| `diagnostics`, `confusions`, `parts`   | Σ during training, confused classes, the parts of a P2P-Net         |
| `cam`                                  | class-activation maps                                              |
| `destruction`                          | how often image augmentation destroys the only cue                 |
| `figure`                               | a figure, its page and its files                                   |
| `features`, `runs`, `groups`           | images and their features, runs with Σ, groups of look-alike classes |

All are deterministic: the same runs, images and seed give the same figure on the same machine.
"""

from semaug.report.figures.augmentations import augmentations
from semaug.report.figures.cam import cam
from semaug.report.figures.confusions import confusions
from semaug.report.figures.destruction import destruction_chart
from semaug.report.figures.diagnostics import diagnostics
from semaug.report.figures.figure import Figure, page, write
from semaug.report.figures.neighbours import neighbours
from semaug.report.figures.parts import parts
from semaug.report.figures.table import FIGURES, FigureKind, draw
from semaug.report.figures.tsne import tsne

__all__ = [
    "FIGURES",
    "Figure",
    "FigureKind",
    "augmentations",
    "cam",
    "confusions",
    "destruction_chart",
    "diagnostics",
    "draw",
    "neighbours",
    "page",
    "parts",
    "tsne",
    "write",
]
