"""Figure "growth of the strength": accuracy against α in λ_t = (t/T)^α · λ0, ResNet-50 on CUB-200-2011.

**Settings of the paper.** As in the table of data sets. The paper's values of α are in its drawing only; ours are 0.25,
0.5, 1, 2 and 4.

**The paper's figures.** Drawn; linear growth (α = 1) is best, 86.7.

**Expected time at full scale.** 5 learnable runs of 4.5 h on four V100 by the paper, and a basic one: about a day for
one seed.
"""

from semaug.studies.cells import Cell, Experiment

POWERS = (0.25, 0.5, 1.0, 2.0, 4.0)

EXPERIMENT = Experiment(
    name="figure-schedule",
    title="Growth of the strength",
    line="accuracy against the shape α of the growth of λ, ResNet-50 on CUB-200-2011",
    shows="Linear growth (α = 1) is better than slower or faster growth.",
    caption="α below 1 makes the strength grow early, above 1 late; basic training stands beside.",
    cells=(
        Cell("basic", paper=84.5),
        *(
            Cell("learnable", setting=f"α = {power:g}", power=power, paper=86.7 if power == 1 else None)
            for power in POWERS
        ),
    ),
    kind="lines",
    axis="α",
)
