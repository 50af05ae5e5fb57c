"""Figure "frozen blocks": accuracy and time per step against the number of blocks kept out of the pseudo update.

**Settings of the paper.** CUB-200-2011, ResNet-50, as in the table of data sets; the stem and the first n of 16 blocks
are frozen. The paper's values of n are in its drawing; ours are 0, 4, 8, 10, 12, 14 and 16.

**The paper's figures.** Drawn: much the same accuracy for n up to 12, less time the more is frozen; 86.7 at n = 10. As
numbers, 100 epochs on four V100: basic 1.7 h, meta loop 6.5 h, with ten blocks frozen 4.5 h, that is 3.8 and 2.6 times
plain training.

**Expected time at full scale.** From 6.5 h down to less than 4.5 h on four V100 for each of the 7 values of n, by the
paper: about a day and a half for one seed. The times per step are measured by themselves and need a GPU and some
minutes.
"""

from semaug.studies.cells import Cell, Experiment

BLOCKS, SMALL_BLOCKS = (0, 4, 8, 10, 12, 14, 16), (0, 1, 2, 3)
PAPER_HOURS = {"basic": 1.7, "0": 6.5, "10": 4.5}


def _cells(blocks: tuple[int, ...], own: int) -> tuple[Cell, ...]:
    points = (
        Cell("learnable", setting=f"n = {count}", frozen=count, paper=86.7 if count == own else None)
        for count in blocks
    )
    return (Cell("basic", paper=84.5), *points)


EXPERIMENT = Experiment(
    name="figure-frozen-blocks",
    title="Frozen blocks",
    line="accuracy and time per step against frozen blocks, with both meta-gradient engines",
    shows="Accuracy is much the same while at most 12 of 16 blocks are frozen; training takes 6.5 h with none frozen, "
    "4.5 h with ten, and 1.7 h without a meta loop.",
    caption="Both engines give the same gradient, so accuracy is measured with one (jvp) and time with both. At small "
    "scale the network has three blocks, and the paper's ten of sixteen stands beside two of three.",
    cells=_cells(BLOCKS, 10),
    small_cells=_cells(SMALL_BLOCKS, 2),
    kind="lines",
    axis="frozen blocks",
    times=True,
)
