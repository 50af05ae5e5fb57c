"""The last stages of any convolutional backbone: what it puts out at each resolution."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from semaug.network.blocks import find_head, in_sequence

LOOK = 128  # pixels: the last map of a network of stride 32 has more than one place, unlike what global pooling makes


class Stages:
    """The last `count` stages of a backbone: their channels, and how to get their maps from images.

    A timm network says where its stages are. In any other, a stage is all modules in (nested) sequence whose maps have
    one resolution, and its output is that of the last of them, as one look at a small image shows. This holds no
    modules, so that a copy of the model, or one with some modules replaced, can use it.
    """

    def __init__(self, backbone: nn.Module, count: int) -> None:
        self.count = count
        self.by_timm = hasattr(backbone, "forward_intermediates")
        self.names: list[str] = []
        was_training = {module: module.training for module in backbone.modules()}
        backbone.eval()
        try:
            with torch.no_grad():
                images = next(backbone.parameters()).new_zeros(1, 3, LOOK, LOOK)
                if not self.by_timm:
                    self.names = self._find(backbone, images)
                maps = self.maps(backbone, images)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise self._without_stages(backbone) from error
        finally:
            for module, training in was_training.items():
                module.training = training
        sides = [output.shape[2] if _is_map(output) else 0 for output in maps]
        if len(maps) < count or 0 in sides or sides != sorted(set(sides), reverse=True):
            raise self._without_stages(backbone)
        self.channels = [output.shape[1] for output in maps]

    def _without_stages(self, backbone: nn.Module) -> ValueError:
        return ValueError(
            f"{type(backbone).__name__} has no {self.count} stages of falling resolution for images of any size, which "
            "P2P-Net needs: take a convolutional network such as resnet50"
        )

    def maps(self, backbone: nn.Module, images: Tensor) -> list[Tensor]:
        """The output (N, channels, rows, columns) of each stage."""
        if self.by_timm:
            run = cast(Any, backbone).forward_intermediates
            found: list[Tensor] = run(images, indices=self.count, stop_early=True, intermediates_only=True)
            return found
        return list(_outputs(backbone, self.names, images).values())

    def _find(self, backbone: nn.Module, images: Tensor) -> list[str]:
        last: dict[int, str] = {}
        for name, output in _outputs(backbone, [name for name, _ in in_sequence(backbone)], images).items():
            side = output.shape[2] if _is_map(output) else 0
            if 1 < side <= min(last, default=side):  # a larger one comes from pooling to a fixed size
                last[side] = name
        return list(last.values())[-self.count :]


def _is_map(output: Any) -> bool:
    """Whether this is (N, channels, side, side); a transformer's maps have their channels last."""
    return isinstance(output, Tensor) and output.ndim == 4 and output.shape[2] == output.shape[3]


def _outputs(model: nn.Module, names: list[str], images: Tensor) -> dict[str, Tensor]:
    """What the named modules put out in one pass, in the order of their calls.

    The hooks live for this call alone: one that stayed would write into the wrong model once that is copied.
    """
    outputs: dict[str, Tensor] = {}
    handles = []
    for name in names:

        def keep(module: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
            outputs.pop(name, None)  # a module that is called again takes its place anew
            outputs[name] = output

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def drop_unused(backbone: nn.Module, stages: Stages) -> None:
    """Put the identity in the place of the backbone's linear head, and freeze what else the stages do not use."""
    try:
        name, _ = find_head(backbone)
    except ValueError:  # made without a classifier
        pass
    else:
        parent, _, key = name.rpartition(".")
        setattr(backbone.get_submodule(parent), key, nn.Identity())
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    was_training = {module: module.training for module in backbone.modules()}
    backbone.eval()
    with torch.enable_grad():
        total = torch.stack([m.sum() for m in stages.maps(backbone, trained[0].new_zeros(1, 3, LOOK, LOOK))]).sum()
        found = torch.autograd.grad(total, trained, allow_unused=True)
    for module, training in was_training.items():
        module.training = training
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.requires_grad_(gradient is not None)
