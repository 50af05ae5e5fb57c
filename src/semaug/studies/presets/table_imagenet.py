"""Table "ImageNet": basic, ISDA and learnable with ResNet-50 and ResNeXt-50 (32x4d), from scratch.

**Settings of the paper.** Those of ISDA: 120 epochs, momentum 0.9, weight decay 1e-4, λ0 = 7.5; CovNet's learning rate
0.0005, a meta update every 100 half steps. The paper does not state the others; used here: learning rate 0.1 without
warm-up, 256 images per update, crops of random size (at least 0.08 of the area) resized to 224 px. They are cut from
the middle square at 256 px, not from the original image.

**The paper's results**, top-1 in %: ResNet-50 basic 76.4, ISDA 76.7, learnable 77.4; ResNeXt-50 77.5, 78.1, 78.7.

**How to start it.** ImageNet is read from shards, and its images are decoded when they are needed (`images_on`
``"stream"``): decoded, they would take 250 GB. `docs/how-to/streaming.md` has the commands, also
for a cell under torchrun.

**Time at full scale.** The paper states none. 120 epochs of 1.28 million images are 154 million images for each of the
6 runs of one seed; `semaug bench --model resnet50 --pixels 224` measures the time per image on a machine.
"""

from semaug.studies.cells import Experiment, method_cells

_PAPER = {"ResNet-50": (76.4, 76.7, 77.4), "ResNeXt-50": (77.5, 78.1, 78.7)}

EXPERIMENT = Experiment(
    name="table-imagenet",
    order=110,
    title="ImageNet",
    line="basic, ISDA and learnable with ResNet-50 and ResNeXt-50 on ImageNet, from scratch",
    shows="On ImageNet learnable augmentation is 1.0 and 1.2 points above basic training, ISDA 0.3 and 0.6.",
    caption="Not fine-grained: a check that the method does no harm on general images.",
    cells=method_cells("network", _PAPER, dataset="imagenet", strength=7.5),
    small_seeds=(0,),
)
