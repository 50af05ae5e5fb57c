"""Figure "quality of the learned features": t-SNE of features of look-alike classes, basic beside learnable.

**Settings of the paper.** CUB-200-2011, ResNet-50 as in the table of data sets; every meta-class (such as flycatchers)
of more than five species. Ours are the species whose names end alike. The drawn birds of the small scale have no such
groups: there those of more than three species are shown.

**The paper's results.** Pictures, no numbers: classes are more compact and further apart with learnable augmentation.

**Time at full scale.** The runs are those of the table of data sets (seed 0); the pictures take minutes.
"""

from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-tsne",
    order=130,
    title="Features of look-alike classes",
    line="t-SNE of features, basic beside learnable, on CUB-200-2011",
    shows="With learnable augmentation the features of a class are closer together and further from other classes.",
    caption="t-SNE preserves neighbours, not distances; read it with the numbers beside it.",
    cells=(Cell("basic"), Cell("learnable")),
    small_seeds=(0,),
    kind="pictures",
    picture="tsne",
    picture_options={"small": {"more_than": 3}},
)
