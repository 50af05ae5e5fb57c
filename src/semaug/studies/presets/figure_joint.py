"""Figure "naive joint training": CovNet trained by the same loss as the network, at several learning rates.

**Settings of the paper.** CUB-200-2011, ResNet-50, as in the table of data sets; CovNet's learning rate is a share of
the network's. The paper's shares are in its drawing only; ours are 1, 0.1, 0.01 and 0.001.

**The paper's figures.** Drawn: the mean of CovNet's output goes to zero, quickly where the learning rate is large. The
accuracy is a little above basic (84.5), below ISDA (85.3) and far below learnable (86.7).

**Expected time at full scale.** Joint training has no meta loop and costs about as much as basic training, 1.7 h on
four V100 by the paper: about 7 h for one seed, and what the table of data sets costs on CUB.
"""

from semaug.studies.cells import Cell, Experiment

RATES = (1.0, 0.1, 0.01, 0.001)

EXPERIMENT = Experiment(
    name="figure-joint",
    title="Joint training without a meta loop",
    line="CovNet trained by the same loss collapses: Σ over the epochs, and accuracy",
    shows="Without a meta loop the mean of CovNet's output goes to zero, the faster the larger its learning rate, and "
    "the accuracy stays below ISDA's.",
    caption="The curves: the mean of Σ's diagonal over the epochs, and the share of the training loss that "
    "the augmentation adds.",
    cells=(
        Cell("basic", paper=84.5),
        Cell("isda", paper=85.3),
        *(Cell("joint", setting=f"lr × {rate:g}", rate=rate) for rate in RATES),
        Cell("learnable", paper=86.7),
    ),
    kind="bars",
    curves=True,
)
