"""Any classifier as early blocks → late blocks → feature → linear head, with forward-mode tangents.

| module            | subject                                                                         |
|-------------------|---------------------------------------------------------------------------------|
| `network`         | `Network`, the passes of the meta loop; `Composite`, models with several losses |
| `split`           | the early and the late part, found by running the model on noise                |
| `views`           | copies of a model that record and replay early outputs; `Tape`                  |
| `randomness`      | random states, also inside a CUDA graph                                         |
| `blocks`          | head and blocks of any model                                                    |
| `models`          | backbones by name, weights from files                                           |
| `pretrained`      | pretrained weights from the Hugging Face hub                                    |
| `activation_maps` | class-activation maps                                                           |
| `hooks`           | outputs of single modules, read or replaced                                     |
| `batchnorm`       | BatchNorm over all ranks                                                        |
| `tangents`        | forward-mode rules                                                              |
| `recording`       | operator outputs that a tangent pass reuses                                     |
| `kernels`         | fused kernels of the rules, in Triton                                           |
"""

from semaug.network.network import Composite, Network, Tape

__all__ = ["Composite", "Network", "Tape"]
