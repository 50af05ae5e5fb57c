"""Figure "naive joint training": CovNet trained by the same loss as the network, at several learning rates.

**Settings of the paper.** CUB-200-2011, ResNet-50, as in the table of data sets; CovNet's learning rate is a share of
the network's, 0.03. The paper shows its shares in the drawing only; ours are 1, 0.1 and 1/30: rates of 0.03, 0.003 and
0.001, at small scale too. The paper does not say which optimiser trains CovNet here. If one SGD trained both networks,
CovNet would have its momentum, 0.9, as it has here (`meta_momentum`).

**The paper's results.** Drawn: the mean of CovNet's output falls to zero, quickly if the learning rate is large. The
accuracy is a little above basic (84.5), below ISDA (85.3) and far below learnable (86.7).

**Time at full scale.** Joint training has no meta loop and costs about as much as basic training, 1.7 h on four V100 by
the paper: about 5 h for one seed, plus the cost of the table of data sets on CUB.
"""

from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-joint",
    order=60,
    title="Joint training without a meta loop",
    line="CovNet trained by the same loss collapses: Σ over the epochs, and accuracy",
    shows="Without a meta loop the mean of CovNet's output falls to zero, the faster the larger its learning rate, and "
    "the accuracy stays below ISDA's.",
    caption="The curves: the mean of Σ's diagonal over the epochs, and the share of the training loss that "
    "the augmentation adds.",
    cells=(
        Cell("basic", paper=84.5),
        Cell("isda", paper=85.3),
        *(Cell("joint", setting=f"rate {rate:g}", meta_lr=rate, momentum=0.9) for rate in (0.03, 0.003, 0.001)),
        Cell("learnable", paper=86.7),
    ),
    curves=True,
)
