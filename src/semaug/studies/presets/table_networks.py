"""Table "network structures": basic, ISDA and learnable with six networks on CUB-200-2011.

**Settings of the paper.** As in the table of data sets. Ten blocks are frozen in ResNet-50 and none in the others. The
weights are torchvision's; those of ViT-B/16 are from ImageNet-21k, as in TransFG.

**The paper's results**, top-1 in % for basic, ISDA and learnable, are the numbers below: learnable is above basic by
2.2 (ResNet-50), 1.7, 1.0, 1.7, 1.2 and 0.4 points (ViT-B/16).

**Time at full scale.** The paper reports it for ResNet-50 only: 1.7 h for basic, 4.5 h for learnable on four V100. The
other networks are not frozen, which took ResNet-50 from 4.5 h to 6.5 h. Allow 8 h for each of the 18 runs of one seed.
"""

from semaug.studies.cells import Experiment, method_cells

_PAPER = {
    "ResNet-50": (84.5, 85.3, 86.7),
    "DenseNet-161": (86.7, 87.2, 88.4),
    "EfficientNet-B0": (85.3, 85.5, 86.3),
    "MobileNetV2": (82.6, 83.1, 84.3),
    "RegNetX-400MF": (82.9, 83.2, 84.1),
    "ViT-B/16": (90.3, 90.3, 90.7),
}

EXPERIMENT = Experiment(
    name="table-networks",
    order=20,
    title="Six network structures",
    line="basic, ISDA and learnable with six networks on CUB-200-2011",
    shows="Learnable augmentation is above basic training with every network, by 0.4 (ViT-B/16) to 2.2 points.",
    caption="Rows of one network differ only in the method.",
    cells=method_cells("network", _PAPER),
)
