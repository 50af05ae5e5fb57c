"""Figure "augmented features": t-SNE of the features of original and augmented images.

**Settings of the paper.** CUB-200-2011, ResNet-50 as in the table of data sets; Random Erasing, RandAugment and
learnable augmentation on images of one group of look-alikes (wrens).

**The paper's results.** Pictures, no numbers: under Random Erasing and RandAugment some images lose what distinguishes
them and form a cluster of their own; with learnable augmentation none do.

**Time at full scale.** The run is that of the table of data sets (seed 0); the pictures take minutes.
"""

from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-augmentations",
    order=140,
    title="Original and augmented features",
    line="t-SNE of original and augmented features for Random Erasing, RandAugment and learnable",
    shows="Images changed by Random Erasing and RandAugment form clusters of their own; learnable augmentation moves "
    "features to reasonable places.",
    caption="All augmentations are shown with the features of one network, that of the learnable run.",
    cells=(Cell("learnable"),),
    small_seeds=(0,),
    kind="pictures",
    picture="augmentations",
)
