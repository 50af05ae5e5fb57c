"""Figure "ResNets of various depths": basic, ISDA and learnable with ResNet-18 to ResNet-152 on CUB-200-2011.

**Settings of the paper.** As in the table of data sets; ten blocks frozen in ResNet-50, none in the others.

**The paper's results.** Drawn; stated as numbers for ResNet-50 only: basic 84.5, ISDA 85.3, learnable 86.7.

**Time at full scale.** The paper reports it for ResNet-50 only: 1.7 h for basic and 4.5 h for learnable on four V100.
ResNet-152 costs about three times as much and is not frozen. Allow three days for the 15 runs of one seed.
"""

from dataclasses import replace

from semaug.studies.cells import Experiment, method_cells

_SMALL = {18: "resnet10t", 34: "resnet14t", 50: "resnet18", 101: "resnet26t", 152: "resnet34"}
_PAPER = {depth: (84.5, 85.3, 86.7) if depth == 50 else (None, None, None) for depth in _SMALL}

EXPERIMENT = Experiment(
    name="figure-depth",
    order=50,
    title="ResNets of various depths",
    line="basic, ISDA and learnable with ResNet-18, 34, 50, 101 and 152 on CUB-200-2011",
    shows="At every depth learnable augmentation is above ISDA, and ISDA above basic training.",
    caption="Accuracy against the network; the band is ± the standard deviation over seeds where there are several.",
    cells=tuple(
        replace(cell, small_model=_SMALL[depth])
        for depth, figures in _PAPER.items()
        for cell in method_cells("network", {f"ResNet-{depth}": figures})
    ),
    small_seeds=(0,),
    kind="lines",
    axis="network",
)
