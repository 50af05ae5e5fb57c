"""Figure "augmented samples in the pixel space": images whose features are nearest to augmented features.

**Settings of the paper.** ResNet-50 with learnable augmentation as in the table of data sets, on its four data sets;
the five images nearest to an augmented feature. The paper does not say which images are searched; ours are those of the
test split.

**The paper's results.** Pictures, no numbers: neighbours differ from the image in angle, background and pose.

**Time at full scale.** The runs are those of the table of data sets (seed 0); the pictures take minutes.
"""

from semaug.studies.cells import DATASETS, Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-neighbours",
    order=120,
    title="Nearest neighbours of augmented features",
    line="the five images nearest to an augmented feature, for three kinds of Σ",
    shows="Neighbours of augmented features show the same class at another angle, background or pose.",
    caption="The paper shows the learned Σ; a constant and a class-wise one are shown beside it, as controls.",
    cells=tuple(
        Cell(method, dataset)
        for dataset in DATASETS
        if dataset != "imagenet"
        for method in ("constant", "isda", "learnable")
    ),
    small_seeds=(0,),
    kind="pictures",
    picture="neighbours",
)
