"""Table "image-level augmentation": Mixup, CutMix, Random Erasing and RandAugment beside learnable on CUB, ResNet-50.

**Settings of the paper.** As in the table of data sets; for the image-level methods it gives none, and torchvision's
defaults are used here (Mixup and CutMix on every batch with α = 1; Random Erasing with probability 0.5; RandAugment
with two operations of magnitude 9). ISDA is not in this table of the paper; its figure is that of the table of data
sets.

**The paper's figures**, top-1 in %: basic 84.5, Mixup 85.4, CutMix 85.9, Random Erasing 83.8, RandAugment 82.8,
learnable 86.7 (and ISDA 85.3).

**Expected time at full scale.** The paper's 1.7 h on four V100 for each method without a meta loop, 4.5 h for
learnable: about 15 h for one seed.
"""

from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="table-image-level",
    title="Image-level augmentation",
    line="Mixup, CutMix, Random Erasing and RandAugment beside ISDA and learnable, ResNet-50 on CUB-200-2011",
    shows="On CUB-200-2011 Random Erasing and RandAugment are below basic training, Mixup and CutMix above it, and "
    "learnable augmentation above all of them.",
    caption="ISDA stands in another table of the paper, with the same settings.",
    cells=(
        Cell("basic", paper=84.5),
        Cell("mixup", paper=85.4),
        Cell("cutmix", paper=85.9),
        Cell("random-erasing", paper=83.8),
        Cell("randaugment", paper=82.8),
        Cell("isda", paper=85.3),
        Cell("learnable", paper=86.7),
    ),
    kind="bars",
)
