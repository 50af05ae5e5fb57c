"""Table "four data sets": basic, ISDA and learnable with ResNet-50.

**Settings of the paper.** Images resized to 600×600, random crop 448 and flip; SGD 0.03 with momentum 0.9 and no weight
decay, 64 images per update, cosine decay, 100 epochs, from ImageNet weights; λ0 = 10, α = 1; CovNet D → D/4 → D by SGD
0.001; ten blocks frozen. The row "constant Σ" is our control and not in the paper.

**The paper's results**, top-1 in % for basic, ISDA and learnable: CUB-200-2011 84.5, 85.3, 86.7; FGVC Aircraft 91.5,
91.7, 92.7; Stanford Cars 92.9, 93.2, 94.3; NABirds 83.5, 83.9, 85.5.

**Time at full scale.** The paper reports 1.7 h for basic and 4.5 h for learnable on CUB, on four V100. In proportion to
the training images (5,994; 6,667; 8,144; 23,929) this gives 13 h for all basic runs of one seed, about as much for ISDA
and for the control, and 34 h for the learnable runs.
"""

from semaug.studies.cells import Experiment, method_cells

_PAPER = {
    "cub": (84.5, None, 85.3, 86.7),
    "aircraft": (91.5, None, 91.7, 92.7),
    "cars": (92.9, None, 93.2, 94.3),
    "nabirds": (83.5, None, 83.9, 85.5),
}

EXPERIMENT = Experiment(
    name="table-datasets",
    order=10,
    title="Four fine-grained data sets",
    line="basic, ISDA and learnable with ResNet-50 on four data sets",
    shows="With ResNet-50, learnable augmentation is above ISDA, and ISDA above basic training, on all four data sets.",
    caption="The constant Σ is our control: if it does as well as the learned one, learning Σ is not what helps.",
    cells=method_cells("dataset", _PAPER, ("basic", "constant", "isda", "learnable")),
)
