"""Figure "growth of the strength": accuracy against α in λ_t = (t/T)^α · λ0, ResNet-50 on CUB-200-2011.

**Settings of the paper.** As in the table of data sets. The paper shows its values of α in the drawing only; ours are
0.25, 0.5, 1, 2 and 4.

**The paper's results.** Drawn; linear growth (α = 1) is best, 86.7.

**Time at full scale.** 5 learnable runs, by the paper 4.5 h each on four V100, and a basic one: a day for one seed.
"""

from semaug.studies.cells import Cell, Experiment


def _cell(power: float) -> Cell:
    return Cell("learnable", setting=f"α = {power:g}", power=power, paper=86.7 if power == 1 else None)


EXPERIMENT = Experiment(
    name="figure-schedule",
    order=80,
    title="Growth of the strength",
    line="accuracy against the shape α of the growth of λ, ResNet-50 on CUB-200-2011",
    shows="Linear growth (α = 1) is better than slower or faster growth.",
    caption="With α below 1 the strength grows early, above 1 late. Basic training is shown beside.",
    cells=(Cell("basic", paper=84.5), *map(_cell, (0.25, 0.5, 1.0, 2.0, 4.0))),
    kind="lines",
    axis="α",
)
