"""Figure "ResNets of various depths": basic, ISDA and learnable with ResNet-18 to ResNet-152 on CUB-200-2011.

**Settings of the paper.** As in the table of data sets; ten blocks frozen in ResNet-50, none in the others.

**The paper's figures.** Drawn, and given as numbers for ResNet-50 alone: basic 84.5, ISDA 85.3, learnable 86.7.

**Expected time at full scale.** The paper gives ResNet-50's only: 1.7 h for basic and 4.5 h for learnable on four V100.
ResNet-152 costs about three times as much and is not frozen; allow three days for the 15 runs of one seed.
"""

from semaug.studies.cells import Cell, Experiment

DEPTHS = (18, 34, 50, 101, 152)
PAPER = {50: (84.5, 85.3, 86.7)}
SMALL = {18: "resnet10t", 34: "resnet14t", 50: "resnet18", 101: "resnet26t", 152: "resnet34"}


def _cells() -> tuple[Cell, ...]:
    cells = []
    for depth in DEPTHS:
        network, small = f"ResNet-{depth}", SMALL[depth]
        basic, isda, learnable = PAPER.get(depth, (None, None, None))
        cells += [
            Cell("basic", network=network, paper=basic, small_model=small),
            Cell("isda", network=network, paper=isda, small_model=small),
            Cell("learnable", network=network, paper=learnable, small_model=small),
        ]
    return tuple(cells)


EXPERIMENT = Experiment(
    name="figure-depth",
    title="ResNets of various depths",
    line="basic, ISDA and learnable with ResNet-18, 34, 50, 101 and 152 on CUB-200-2011",
    shows="At every depth learnable augmentation is above ISDA, and ISDA above basic training.",
    caption="Accuracy against the network; the band is ± the standard deviation over seeds where there are several.",
    cells=_cells(),
    small_seeds=(0,),
    kind="lines",
    axis="network",
)
