"""Table "structure of CovNet": accuracy for several depths and widths, ResNet-50 on CUB-200-2011.

**Settings of the paper.** As in the table of data sets; D = 2048. Operations are counted as two for each multiply-add.

**The paper's figures**: hidden layers × width → operations (10⁶), parameters (10⁶), top-1 in %:
1×256 → 2.10, 1.05, 86.7; 1×512 → 4.19, 2.10, 86.7; 1×1024 → 8.39, 4.20, 86.5; 1×2048 → 16.78, 8.39, 86.2;
2×512 → 4.72, 2.36, 86.2; 3×512 → 5.24, 2.63, 86.4; 4×512 → 5.77, 2.89, 86.0.

**Expected time at full scale.** 7 learnable runs of 4.5 h on four V100 by the paper: about a day and a half for one
seed.
"""

from semaug.isda.sources import CovNet
from semaug.studies.cells import PAPER_FEATURES, Cell, Experiment

# (depth, width) → operations and parameters in 10⁶, top-1
PAPER = {
    (1, 256): (2.10, 1.05, 86.7),
    (1, 512): (4.19, 2.10, 86.7),
    (1, 1024): (8.39, 4.20, 86.5),
    (1, 2048): (16.78, 8.39, 86.2),
    (2, 512): (4.72, 2.36, 86.2),
    (3, 512): (5.24, 2.63, 86.4),
    (4, 512): (5.77, 2.89, 86.0),
}


def shape(depth: int, width: int) -> tuple[int, int]:
    """Operations per sample and parameters of CovNet at D = 2048, counted on the network itself."""
    network = CovNet(PAPER_FEATURES, width, depth)
    return network.flops, network.num_parameters


EXPERIMENT = Experiment(
    name="table-covnet",
    title="Structure of CovNet",
    line="accuracy, operations and parameters for seven shapes of CovNet, ResNet-50 on CUB-200-2011",
    shows="The shape of CovNet matters little: 86.0 to 86.7 % for one to four layers and widths from 256 to 2048.",
    caption="Operations and parameters are counted at D = 2048. At small scale D = 64, and widths are in proportion.",
    cells=(
        Cell("basic", paper=84.5),
        *(
            Cell(
                "learnable",
                setting=f"{depth} × {width}",
                depth=depth,
                width=width if (depth, width) != (1, 512) else None,  # D/4, the default: the run of the other tables
                paper=top1,
            )
            for (depth, width), (_, _, top1) in PAPER.items()
        ),
    ),
    shapes=True,
)
