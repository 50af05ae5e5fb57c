"""semaug: fine-grained image recognition with learnable semantic data augmentation.

The algorithm is in three files: :mod:`semaug.isda.loss` (the loss), :mod:`semaug.isda.sources` (where the covariance comes
from) and :mod:`semaug.meta.learner` (the meta loop).
"""

from semaug.isda.covariance import Covariance, Diagonal, Full
from semaug.isda.loss import ISDALoss, augmented_logits, isda_loss
from semaug.isda.sources import ClassCovariance, Constant, CovNet, Source
from semaug.isda.strength import strength
from semaug.meta.learner import JointAugmentation, LearnableAugmentation
from semaug.network.network import Composite, Network

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
    "Network",
    "Source",
    "augmented_logits",
    "isda_loss",
    "strength",
]
