"""P2P-Net (Yang et al., CVPR 2022): a fine-grained classifier that learns from parts of its own image.

A proposal network picks four parts. They are cropped from the image and sent through the same layers. Their features,
in a canonical order, predict the image's own features. At test time the parts are not needed: the four logits of the
image are summed.

| module      | subject                                                      |
|-------------|--------------------------------------------------------------|
| `model`     | `P2PNet` on any backbone, and its description as a composite |
| `stages`    | the last stages of a backbone                                |
| `proposals` | anchors, their scores, selection and crops of parts          |
| `alignment` | the canonical order of parts                                 |
| `losses`    | the losses as functions                                      |
"""

from semaug.p2p.model import P2PNet, P2POutputs, composite

__all__ = ["P2PNet", "P2POutputs", "composite"]
