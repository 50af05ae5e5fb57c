"""Figure "augmented samples in the pixel space": images whose features are nearest to augmented features.

**Settings of the paper.** ResNet-50 as in the table of data sets, on its four data sets; the five nearest neighbours of
augmented features.

**The paper's figures.** Pictures, no numbers: neighbours differ from the image in angle, background and pose.

**Expected time at full scale.** The runs are those of the table of data sets (seed 0); the pictures take minutes.
"""

from semaug.studies.cells import Cell, Experiment

DATASETS = ("cub", "aircraft", "cars", "nabirds")

EXPERIMENT = Experiment(
    name="figure-neighbours",
    title="Nearest neighbours of augmented features",
    line="images whose features are nearest to augmented features, for three kinds of Σ",
    shows="Neighbours of augmented features show the same class at another angle, background or pose.",
    caption="A constant and a class-wise Σ stand beside the learned one.",
    cells=tuple(Cell(method, dataset) for dataset in DATASETS for method in ("constant", "isda", "learnable")),
    small_seeds=(0,),
    kind="pictures",
    picture="neighbours",
)
