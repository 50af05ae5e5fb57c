"""P2P-Net (Yang et al., CVPR 2022): a fine-grained classifier that learns from its own parts, on any backbone.

Four parts that a proposal network picks are cut from the image and sent through the same layers as the image. Their
features, put in a canonical order, tell what the image's features should look like. At test time the parts are not
needed: the four logits of the image are summed.
"""

from semaug.p2p.alignment import PartAlignment
from semaug.p2p.losses import alignment_loss, confident_cross_entropy, ranking_loss
from semaug.p2p.model import P2PNet, P2POutputs
from semaug.p2p.proposals import ProposalNet, anchors, crop_parts, select_parts

__all__ = [
    "P2PNet",
    "P2POutputs",
    "PartAlignment",
    "ProposalNet",
    "alignment_loss",
    "anchors",
    "confident_cross_entropy",
    "crop_parts",
    "ranking_loss",
    "select_parts",
]
