"""The feature maps of a convolutional backbone's last stages."""

from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from semaug.network.blocks import find_head, in_sequence
from semaug.network.hooks import recorded_outputs
from semaug.network.views import evaluation_mode

_SIDE = 128  # of a test image: with stride 32 its last map is larger than 1 × 1, unlike the result of global pooling


class Stages:
    """The last stages of a backbone.

    A timm network names its stages. In any other network, a stage consists of all modules in (nested) sequence whose
    maps have the same resolution. This object holds no modules, so that it also serves copies and views of the model.
    The backbone loses its linear head, and parameters that the stages do not use are frozen.

    Args:
        backbone: A network of timm or torchvision, or another one that is a sequence of modules.
        count: Number of stages.

    Raises:
        ValueError: The backbone does not have that many stages of falling resolution.
    """

    def __init__(self, backbone: nn.Module, count: int) -> None:
        self.count = count
        self._names: list[str] | None = None  # of modules; a timm network needs none
        images = next(backbone.parameters()).new_zeros(1, 3, _SIDE, _SIDE)
        problem = ValueError(
            f"{type(backbone).__name__} has no {count} stages of falling resolution for images of any size, which "
            "P2P-Net needs: use a convolutional network such as resnet50"
        )
        try:
            with torch.no_grad(), evaluation_mode(backbone):
                if not hasattr(backbone, "forward_intermediates"):
                    self._names = self._find(backbone, images)
                maps = self.maps(backbone, images)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise problem from error
        sides = [_side(output) for output in maps]
        if len(maps) < count or 0 in sides or sides != sorted(set(sides), reverse=True):
            raise problem
        self.channels = [output.shape[1] for output in maps]
        self._freeze_unused(backbone, images)

    def maps(self, backbone: nn.Module, images: Tensor) -> list[Tensor]:
        """The map (N, channels, rows, columns) of each stage of `backbone`, or a copy of it, on `images`."""
        if self._names is None:
            run = cast(Any, backbone).forward_intermediates
            return cast(list[Tensor], run(images, indices=self.count, stop_early=True, intermediates_only=True))
        return list(_outputs(backbone, self._names, images).values())

    def _find(self, backbone: nn.Module, images: Tensor) -> list[str]:
        last: dict[int, str] = {}
        for name, output in _outputs(backbone, [name for name, _ in in_sequence(backbone)], images).items():
            side = _side(output)
            if 1 < side <= min(last, default=side):  # a larger map comes from pooling to a fixed size
                last[side] = name
        return list(last.values())[-self.count :]

    def _freeze_unused(self, backbone: nn.Module, images: Tensor) -> None:
        with suppress(ValueError):  # if the backbone was built without a classifier
            backbone.set_submodule(find_head(backbone)[0], nn.Identity())
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        with torch.enable_grad(), evaluation_mode(backbone):
            total = torch.stack([output.sum() for output in self.maps(backbone, images)]).sum()
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)


def _side(output: Any) -> int:
    """The side of a map (N, channels, side, side); 0 for anything else, such as a transformer's channels-last maps."""
    is_map = isinstance(output, Tensor) and output.ndim == 4 and output.shape[2] == output.shape[3]
    return output.shape[2] if is_map else 0


def _outputs(model: nn.Module, names: list[str], images: Tensor) -> dict[str, Tensor]:
    """The outputs of the named modules in one pass, in the order of their (last) calls."""
    with recorded_outputs({name: model.get_submodule(name) for name in names}) as calls:
        model(images)
    outputs: dict[str, Tensor] = {}
    for name, output in calls:
        outputs.pop(name, None)
        outputs[name] = output
    return outputs
