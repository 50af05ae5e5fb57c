"""Figure "augmented features": t-SNE of the features of original and augmented images.

**Settings of the paper.** CUB-200-2011, ResNet-50 as in the table of data sets; images of wrens. All features are those
of the network that was trained with basic augmentation: of original images, of images under Random Erasing and
RandAugment, and original features augmented by the CovNet of the learnable run. At small scale, the largest group of
look-alikes stands in for the wrens.

**The paper's results.** Pictures, no numbers: under Random Erasing and RandAugment some images lose what distinguishes
them and form a cluster of their own; with learnable augmentation none do.

**Time at full scale.** The runs are those of the table of data sets (seed 0); the pictures take minutes.
"""

from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-augmentations",
    order=140,
    title="Original and augmented features",
    line="t-SNE of original and augmented features for Random Erasing, RandAugment and learnable",
    shows="Images changed by Random Erasing and RandAugment form clusters of their own; learnable augmentation moves "
    "features to reasonable places.",
    caption="All features are those of the basic run's network; Σ is that of the learnable run's CovNet.",
    cells=(Cell("basic"), Cell("learnable")),
    small_seeds=(0,),
    kind="pictures",
    picture="augmentations",
    picture_options={"full": {"group": "wren"}},
)
