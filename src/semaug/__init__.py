"""semaug: fine-grained image recognition with learnable semantic data augmentation.

Three files hold the method of the paper:

| file                | subject                                        |
|---------------------|------------------------------------------------|
| `isda/loss.py`      | the ISDA loss (equations 1 to 3)               |
| `isda/sources.py`   | where the covariance Σ of a sample comes from  |
| `meta/algorithm.py` | the meta loop that learns Σ (Algorithm 1)      |
"""

from semaug.util import threads as _threads  # noqa: F401  # first, as it must precede torch

# isort: split
from semaug.isda.covariance import Covariance, Diagonal, Full
from semaug.isda.criterion import ISDALoss
from semaug.isda.loss import augmented_logits, isda_loss, sampled_loss
from semaug.isda.sources import ClassCovariance, Constant, CovNet, Source
from semaug.isda.strength import AutoStrength, strength
from semaug.meta.learner import JointAugmentation, LearnableAugmentation
from semaug.meta.mixing import ManifoldMixup, SnapMix
from semaug.network.network import Composite, Network

__version__ = "0.1.0"

__all__ = [
    "AutoStrength",
    "ClassCovariance",
    "Composite",
    "Constant",
    "CovNet",
    "Covariance",
    "Diagonal",
    "Full",
    "ISDALoss",
    "JointAugmentation",
    "LearnableAugmentation",
    "ManifoldMixup",
    "Network",
    "SnapMix",
    "Source",
    "augmented_logits",
    "isda_loss",
    "sampled_loss",
    "strength",
]
