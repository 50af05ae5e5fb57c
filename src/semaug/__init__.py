"""semaug: fine-grained image recognition with learnable semantic data augmentation.

The algorithm is in three files: :mod:`semaug.functional` (the loss), :mod:`semaug.sources` (where the covariance comes
from) and :mod:`semaug.meta` (the meta loop).
"""

from semaug.covariance import Covariance, Diagonal, Full, LowRank
from semaug.functional import augmented_logits, isda_loss, strength
from semaug.loss import ISDALoss
from semaug.meta import JointAugmentation, LearnableAugmentation
from semaug.network import Composite, Network
from semaug.sources import ClassCovariance, Constant, CovNet, ModulatedClassCovariance, Source

__version__ = "0.1.0"

__all__ = [
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
    "LowRank",
    "ModulatedClassCovariance",
    "Network",
    "Source",
    "augmented_logits",
    "isda_loss",
    "strength",
]
