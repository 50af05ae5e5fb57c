"""Figure "augmented features": t-SNE of features of images as they are and as augmented.

**Settings of the paper.** CUB-200-2011, ResNet-50 as in the table of data sets; Random Erasing, RandAugment and
learnable augmentation on images of one group of look-alikes (wrens).

**The paper's figures.** Pictures, no numbers: some images lose what tells them apart under Random Erasing and
RandAugment and form a cluster of their own; with learnable augmentation none do.

**Expected time at full scale.** The run is that of the table of data sets (seed 0); the pictures take minutes.
"""

from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-augmentations",
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
