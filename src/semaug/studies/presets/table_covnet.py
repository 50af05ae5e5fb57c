"""Table "structure of CovNet": accuracy for several depths and widths, ResNet-50 on CUB-200-2011.

**Settings of the paper.** As in the table of data sets; D = 2048. A multiply-add counts as two operations.

**The paper's results**: hidden layers × width → operations (10⁶), parameters (10⁶), top-1 in %:
1×256 → 2.10, 1.05, 86.7; 1×512 → 4.19, 2.10, 86.7; 1×1024 → 8.39, 4.20, 86.5; 1×2048 → 16.78, 8.39, 86.2;
2×512 → 4.72, 2.36, 86.2; 3×512 → 5.24, 2.63, 86.4; 4×512 → 5.77, 2.89, 86.0.

**Time at full scale.** 7 learnable runs, by the paper 4.5 h each on four V100: about a day and a half for one seed.
"""

import torch

from semaug.isda.sources import CovNet
from semaug.studies.cells import PAPER_FEATURES, Cell, Experiment, Extra
from semaug.studies.scales import Setup

_PAPER = {
    (1, 256): 86.7,
    (1, 512): 86.7,
    (1, 1024): 86.5,
    (1, 2048): 86.2,
    (2, 512): 86.2,
    (3, 512): 86.4,
    (4, 512): 86.0,
}  # top-1 by depth and width


def count_shapes(experiment: Experiment, setup: Setup) -> Extra:
    """Count the operations and parameters of CovNet at D = 2048, on the network itself: two more columns."""
    columns = {}
    for depth, width in _PAPER:
        with torch.device("meta"):
            network = CovNet(PAPER_FEATURES, width, depth)
        counts = {"10⁶ operations": network.flops, "10⁶ parameters": network.num_parameters}
        columns[f"{depth} × {width}"] = {name: f"{count / 1e6:.2f}" for name, count in counts.items()}
    return {"columns": columns}


def _cell(depth: int, width: int, paper: float) -> Cell:
    own = None if (depth, width) == (1, 512) else width  # D/4 is the default: the run of the other tables
    return Cell("learnable", setting=f"{depth} × {width}", depth=depth, width=own, paper=paper)


EXPERIMENT = Experiment(
    name="table-covnet",
    order=100,
    title="Structure of CovNet",
    line="accuracy, operations and parameters for seven shapes of CovNet, ResNet-50 on CUB-200-2011",
    shows="The shape of CovNet matters little: 86.0 to 86.7 % for one to four layers and widths from 256 to 2048.",
    caption="Operations and parameters are counted at D = 2048. At small scale D = 64, and widths are in proportion.",
    cells=(Cell("basic", paper=84.5), *(_cell(*shape, paper) for shape, paper in _PAPER.items())),
    measure=count_shapes,
)
