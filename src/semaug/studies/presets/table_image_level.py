"""Table "image-level augmentation": Mixup, CutMix, Random Erasing and RandAugment beside learnable on CUB, ResNet-50.

**Settings of the paper.** As in the table of data sets. The paper gives none for the image-level methods; torchvision's
defaults are used here (Mixup and CutMix on every batch with α = 1; Random Erasing with probability 0.5; RandAugment
with two operations of magnitude 9). ISDA is not in this table of the paper; its result is from the table of data sets.

**The paper's results**, top-1 in %: basic 84.5, Mixup 85.4, CutMix 85.9, Random Erasing 83.8, RandAugment 82.8,
learnable 86.7 (and ISDA 85.3).

**Time at full scale.** By the paper 1.7 h on four V100 for each method without a meta loop, 4.5 h for learnable: about
15 h for one seed.
"""

from semaug.studies.cells import Cell, Experiment

_PAPER = {
    "basic": 84.5,
    "mixup": 85.4,
    "cutmix": 85.9,
    "random-erasing": 83.8,
    "randaugment": 82.8,
    "isda": 85.3,
    "learnable": 86.7,
}

EXPERIMENT = Experiment(
    name="table-image-level",
    order=40,
    title="Image-level augmentation",
    line="Mixup, CutMix, Random Erasing and RandAugment beside ISDA and learnable, ResNet-50 on CUB-200-2011",
    shows="On CUB-200-2011 Random Erasing and RandAugment are below basic training, Mixup and CutMix above it, and "
    "learnable augmentation above all of them.",
    caption="ISDA is from another table of the paper, with the same settings.",
    cells=tuple(Cell(method, paper=paper) for method, paper in _PAPER.items()),
)
