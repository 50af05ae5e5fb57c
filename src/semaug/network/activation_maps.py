"""Class-activation maps: how much each position of a network's last feature map adds to a class's logit.

Where the feature map is pooled before a linear head, the map of a class is exact (Zhou et al., CVPR 2016): the head's
weights of the class times the feature map. Its positions add up to the logit without its bias. Elsewhere, as in a
transformer with a class token, gradients take the place of the head's weights (HiResCAM, Draelos and Carin, 2020). On
pooled maps both are equal.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.isda.precision import full_precision, widened
from semaug.network.blocks import find_head
from semaug.network.hooks import hooked, recorded_outputs
from semaug.network.network import Network, model_logits
from semaug.network.randomness import restored_random_state
from semaug.network.views import evaluation_mode
from semaug.util.errors import ModelError


def class_maps(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Compute how much each position of the last feature map adds to the logit of a class.

    This is ``Σ_d A_d ∂logit/∂A_d`` at each position, the derivative of the logit when that position is scaled. A is the
    last map or grid of tokens on which the logit depends at more than one position. In a transformer with a class token
    that is the input of the last attention. Class and register tokens are left out.

    Args:
        model: A classifier with a linear head; it runs in evaluation mode, and nothing of it changes.
        images: Normalised images (N, 3, H, W).
        labels: The class to explain for each image (N,).

    Returns:
        Maps (N, h, w). Negative values speak against the class.

    Raises:
        ModelError: If the network has no such map, or no linear head.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3, bias=False))
    >>> images, labels = torch.randn(2, 3, 9, 9), torch.tensor([0, 2])
    >>> maps = class_maps(model, images, labels)
    >>> bool(torch.allclose(maps.sum((1, 2)), model(images)[[0, 1], labels], atol=1e-6))
    True
    """
    try:
        width = find_head(model)[1].weight.shape[1]
    except ValueError as error:
        raise ModelError(str(error)) from error
    prefix: int | None = getattr(model, "num_prefix_tokens", None)  # of timm's transformers
    with evaluation_mode(model), torch.enable_grad(), recorded_outputs(dict(model.named_modules())) as calls:
        logits = model_logits(model(images.detach().requires_grad_()))  # a graph even if all weights are frozen
        outputs = [output for _, output in calls if isinstance(output, Tensor) and len(output) == len(images)]
        outputs = [output for output in outputs if _as_map(output, width, prefix) is not None]
        chosen = logits.gather(1, labels[:, None].to(logits.device)).sum()
        gradients = torch.autograd.grad(chosen, outputs, allow_unused=True) if outputs else ()
    last: tuple[bool, Tensor] | None = None  # of the maps as wide as the head's input, or of all if there are none
    for output, gradient in zip(outputs, gradients, strict=True):
        reach = None if gradient is None else _as_map(gradient, width, prefix)
        is_wide = width in (output.shape[1], output.shape[-1])
        if reach is not None and int((reach != 0).any(1).any(0).sum()) > 1 and (last is None or is_wide >= last[0]):
            last = is_wide, output.detach() * gradient
    product = None if last is None else _as_map(last[1], width, prefix)
    if product is None:
        raise ModelError(f"{type(model).__name__} has no feature map of more than one position before its head")
    return product.sum(1)


def _as_map(output: Tensor, width: int, prefix: int | None) -> Tensor | None:
    """A module's output as (N, D, h, w); None if it is neither a map of several positions nor a grid of tokens."""
    if output.ndim == 4 and output.shape[1] != width and output.shape[3] == width:  # channels last, as in Swin
        output = output.permute(0, 3, 1, 2)
    if output.ndim == 3 and output.shape[2] == width:
        side = math.isqrt(output.shape[1] - (prefix or 0))
        start = output.shape[1] - side**2
        if prefix in (None, start):
            output = output[:, start:].mT.unflatten(2, (side, side))
    return output if output.ndim == 4 and math.prod(output.shape[2:]) > 1 else None


# -- pooled maps, for SnapMix -----------------------------------------------------------------------------------------


def find_map_layer(network: Network, images: Tensor) -> str:
    """Name of the module whose output is the last feature map (N, D, h, w), for images like these.

    Raises:
        ModelError: There is no such module, or its map is not pooled before the head.
    """
    noise = noise_like(images)
    known = dict(network.model.named_modules())
    for name, shape in reversed(output_shapes(network, known, noise)):
        if len(shape) == 4 and shape[1] == network.feature_dim and math.prod(shape[2:]) > 1:
            # The head sees a pooled map if it does not matter where in the map something is.
            changes = torch.clone, partial(torch.flip, dims=(-2, -1))
            if are_equal(*(features_with(network, noise, known[name], change) for change in changes)):
                return name
            break
    raise ModelError(
        f"SnapMix needs a map of {network.feature_dim} channels and more than one position that is pooled before the "
        f"head, and {type(network.model).__name__} has none; choose another network, or larger images",
        on_all_ranks=True,
    )


@torch.no_grad()
def feature_maps(network: Network, layer: str, images: Tensor) -> Tensor:
    """The output (N, D, h, w) of the module `layer` on images (N, 3, H, W), in a pass that updates no statistics."""
    with recorded_outputs({layer: network.model.get_submodule(layer)}) as calls:
        network.forward_late(images)
    maps: Tensor = calls[-1][1]
    return maps


@torch.no_grad()
def activation_maps(features: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
    """Class-activation maps at the size of the images, each at least 0 with a sum of 1.

    The head's bias adds the same number everywhere and drops out.

    Args:
        features: Feature maps (N, D, h, w).
        weight: The head's weight (N, D) for the class of each image.
        size: Height and width of the images.

    Returns:
        Maps (N, H, W). A map that is the same everywhere becomes the uniform distribution.
    """
    with full_precision(features):
        maps = torch.einsum("ndhw,nd->nhw", widened(features), widened(weight))
    maps = F.interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    maps = maps - maps.amin((1, 2), keepdim=True)
    total = maps.sum((1, 2), keepdim=True)
    return torch.where(total > 0, maps / total, 1 / math.prod(size))


# -- passes on noise --------------------------------------------------------------------------------------------------


@contextmanager
def _quietly(network: Network, images: Tensor) -> Iterator[None]:
    """Run passes without side effects: no graph, evaluation mode, random generators restored."""
    with torch.no_grad(), evaluation_mode(network.model), restored_random_state(images.device):
        yield


def noise_like(images: Tensor) -> Tensor:
    """Two random images like those of a batch, always the same."""
    return torch.randn(2, *images.shape[1:], generator=torch.Generator().manual_seed(0)).to(images)


def features_with(network: Network, noise: Tensor, module: nn.Module, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The features (N, D) of some images with a module's output changed.

    Args:
        network: The classifier.
        noise: Images (N, 3, H, W).
        module: The module.
        change: Called with the module's output; what it returns takes its place.
    """
    with _quietly(network, noise), hooked(module, change):
        return network.forward_late(noise)[0]


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two outputs are the same up to rounding."""
    return torch.allclose(first, second, rtol=1e-3, atol=1e-4 * float(first.abs().max()))


def output_shapes(
    network: Network, modules: Mapping[str, nn.Module], images: Tensor
) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of the modules' outputs that are tensors, in the order in which they are computed."""

    def shape(output: object) -> tuple[int, ...] | None:
        return tuple(output.shape) if isinstance(output, Tensor) else None

    with recorded_outputs(modules, shape) as calls, _quietly(network, images):
        network.forward_late(images)
    return [(name, size) for name, size in calls if size is not None]
