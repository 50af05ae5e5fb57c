"""Table "state of the art": published results on CUB-200-2011, and the method combined with P2P-Net.

**Settings of the paper.** P2P-Net (ResNet-50) as in its own paper; λ0 = 5, CovNet of hidden width D/2, a meta update
every ten half steps, on the loss of the final (concatenated) classifier only, which is also the meta loss. P2P-Net's
release: images of 550 px with a black border of 8, crops of 448, mean and deviation 0.5; SGD 0.002 at 16 images, a
tenth of it for the backbone, no warm-up, cosine by epochs. (There the last epoch has the full rate again, since the
epoch is counted modulo 300; here it has not.)

**The paper's results**, top-1 in %: P2P-Net 90.2, with ISDA 90.4, with learnable augmentation 91.0. The published
results of 17 other methods are in `published.json`, with the base model and the entry of the paper's bibliography.

**Time at full scale.** Not measured. P2P-Net passes five images through the network for each image, for 300 epochs:
about fifteen times the training of ResNet-50 in the table of data sets, whose cells are used here too.
"""

import json
from dataclasses import dataclass
from importlib.resources import files

from semaug.studies.cells import Experiment, method_cells


@dataclass(frozen=True)
class Published:
    """A result of another method."""

    method: str
    venue: str
    backbone: str
    accuracy: float  # top-1 in %
    citation: str  # entry of the paper's bibliography


def published() -> list[Published]:
    """The results of other methods, in the order of the paper's table."""
    content = json.loads(files("semaug.studies").joinpath("published.json").read_text(encoding="utf-8"))
    return [Published(**row) for row in content["rows"]]


EXPERIMENT = Experiment(
    name="table-sota-p2p",
    order=30,
    title="Published results on CUB-200-2011, and P2P-Net",
    line="published results on CUB-200-2011 beside ours, and the method with P2P-Net",
    shows="Learnable augmentation raises P2P-Net from 90.2 to 91.0, above 17 published results.",
    caption="Results of other methods are as published, collected by the paper; none of them was run here.",
    cells=method_cells("network", {"ResNet-50": (84.5, 85.3, 86.7)})
    + method_cells("network", {"P2P-Net": (90.2, 90.4, 91.0)}, strength=5.0),
    published=True,
)
