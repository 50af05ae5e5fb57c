"""The pictures of the paper, from finished runs: each function returns a :class:`Figure`; `write` makes files of it.

| function            | shows                                                                                     |
|---------------------|-------------------------------------------------------------------------------------------|
| `neighbours`        | the images whose features are nearest to augmented features, for each source of Σ          |
| `tsne`              | the features of look-alike classes, one panel per run                                     |
| `augmentations`     | original and augmented features of Random Erasing, RandAugment and semantic augmentation  |
| `diagnostics`       | what Σ did during training                                                                |
| `confusions`        | the most confused pairs of classes, with the images that were mistaken                    |
| `parts`             | the parts that a P2P-Net picks in its images                                              |
| `destruction_chart` | how often an augmentation of images destroys the only cue, on the embedded birds          |

All of them are deterministic: the same runs, images and seed give the same figure on the same machine.
"""

from semaug.report.figures.augmented import augmentations
from semaug.report.figures.destroyed import destruction_chart
from semaug.report.figures.embedding import tsne
from semaug.report.figures.figure import Figure, page, write
from semaug.report.figures.mistakes import confusions
from semaug.report.figures.nearest import neighbours
from semaug.report.figures.parts import parts
from semaug.report.figures.training import diagnostics

__all__ = [
    "Figure",
    "augmentations",
    "confusions",
    "destruction_chart",
    "diagnostics",
    "neighbours",
    "page",
    "parts",
    "tsne",
    "write",
]
