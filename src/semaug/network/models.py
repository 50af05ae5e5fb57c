"""Backbones by name, from timm and torchvision, and weights from safetensors files."""

import difflib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from semaug.network.blocks import find_head
from semaug.network.pretrained import pretrained_file, torchvision_file
from semaug.util.errors import ModelError, SettingError

MAX_TENSORS = 10_000  # in a file of weights; networks have at most a few thousand
V1 = "-v1"
"""Ending of the name of a ResNet whose first bottleneck of a stage has its stride in the first convolution."""


class SmallNet(nn.Module):
    """Four convolutions and a global maximum: the network for the embedded birds, trained in minutes on a CPU.

    The maximum preserves traits of a few pixels, which an average over the image would lose.

    Args:
        num_classes: Number of classes.
        width: Channels of the first convolution; the features have four times as many.
    """

    block_names = ("stem", "blocks.0", "blocks.1", "blocks.2")

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = _convolution(3, width, pool=True)
        self.blocks = nn.Sequential(
            _convolution(width, 2 * width, pool=True),
            _convolution(2 * width, 4 * width, pool=True),
            _convolution(4 * width, 4 * width, pool=False),
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, C) of `images` (N, 3, height, width)."""
        features: Tensor = self.blocks(self.stem(images))
        return cast(Tensor, self.head(features.amax((2, 3))))


def _convolution(inputs: int, outputs: int, pool: bool) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def build_model(name: str, num_classes: int, crop: int, pretrained: bool = False, drop_path: float = 0.0) -> nn.Module:
    """Build a classifier by name.

    Args:
        name: "small", a timm name, or a torchvision name. A prefix "timm/" or "torchvision/" says which library is
            meant; without it timm is tried first. The ending "-v1" of a ResNet with bottlenecks puts their strides
            where the original ResNet and Keras have them, in the first 1×1 convolution rather than the 3×3.
        num_classes: Number of classes.
        crop: Side of the images in pixels, which some transformers need in advance.
        pretrained: Whether to start from the library's default weights, see :mod:`semaug.network.pretrained`.
        drop_path: Rate of drop path (stochastic depth) in the last block.

    Returns:
        The model, in training mode.

    Raises:
        SettingError: The name is unknown, or the model has no pretrained weights or no drop path.
        ModelError: The pretrained weights cannot be downloaded.
    """
    file = pretrained_weights(name) if pretrained else None
    without = f"{name} has no drop path; set `drop_path` to 0"
    if drop_path and (name == "small" or name.endswith(V1)):
        raise SettingError(without)
    if name == "small":
        return SmallNet(num_classes)
    if name.endswith(V1):
        return _with_first_strides(build_model(name.removesuffix(V1), num_classes, crop), name)
    library, short = _library(name)
    try:
        if library == "timm":
            return _build_timm(short, num_classes, crop, file, **({"drop_path_rate": drop_path} if drop_path else {}))
        options = {"stochastic_depth_prob": drop_path} if drop_path else {}
        return _build_torchvision(short, num_classes, crop, file, **options)
    except TypeError as error:
        if drop_path:
            raise SettingError(without) from error
        raise


def pretrained_weights(name: str) -> Path:
    """Find the file of a network's pretrained weights, or download it.

    Args:
        name: As in :func:`build_model`.

    Raises:
        SettingError: The name is unknown, or the network has no pretrained weights that can be read safely.
        ModelError: The file is not in the cache and cannot be downloaded.
    """
    if name == "small":
        raise SettingError("the model 'small' has no pretrained weights; leave out `pretrained`")
    if name.endswith(V1):
        raise SettingError(
            f"the libraries have no weights for the model {name!r}; give a file as `weights`, or train from scratch "
            "without `pretrained`"
        )
    library, short = _library(name)
    return pretrained_file(short) if library == "timm" else torchvision_file(short)


def _library(name: str) -> tuple[str, str]:
    """The library that has a network, and the name that it has there."""
    library, _, short = name.rpartition("/")
    if library not in ("", "timm", "torchvision"):
        raise SettingError(f"unknown model {name!r}: write a timm name, or torchvision/NAME")
    import timm
    import torchvision

    in_torchvision = torchvision.models.list_models(module=torchvision.models)
    if library != "torchvision" and timm.is_model(short):
        return "timm", short
    if library != "timm" and short in in_torchvision:
        return "torchvision", short
    similar = difflib.get_close_matches(short, sorted({*timm.list_models(), *in_torchvision}), n=3)
    hint = f"did you mean {', '.join(similar)}?" if similar else "timm.list_models() shows the names"
    raise SettingError(f"unknown model {name!r}; {hint}")


def _build_timm(name: str, num_classes: int, crop: int, weights: Path | None, **options: Any) -> nn.Module:
    import timm

    options["num_classes"] = num_classes
    if weights is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": str(weights), "custom_load": False}}
    try:  # only networks for one size of image have the option `img_size`
        model: nn.Module = timm.create_model(name, img_size=crop, **options)
    except TypeError:
        model = timm.create_model(name, **options)
    return model


def _build_torchvision(name: str, num_classes: int, crop: int, weights: Path | None, **options: Any) -> nn.Module:
    import torchvision

    options |= {"image_size": crop} if name.startswith("vit_") and weights is None else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    if weights is not None:
        try:
            model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ModelError(f"{weights} holds other things than the weights of {name}; delete the file") from error
        if hasattr(model, "transform_input"):  # of Inception, whose weights want another normalisation
            cast(Any, model).transform_input = True
    head_name, head = find_head(model)
    inputs = head.weight.shape[1]
    new_head = nn.Linear(inputs, num_classes) if isinstance(head, nn.Linear) else nn.Conv2d(inputs, num_classes, 1)
    model.set_submodule(head_name, new_head)
    return model


def _with_first_strides(model: nn.Module, name: str) -> nn.Module:
    """Move the stride of every bottleneck from its second convolution, of 3×3, to the first, of 1×1."""
    blocks = [block for block in model.modules() if getattr(getattr(block, "conv2", None), "stride", None) == (2, 2)]
    if not blocks or not all(hasattr(block, "conv3") for block in blocks):
        raise SettingError(f"unknown model {name!r}: {V1} is for ResNets with bottlenecks, such as resnet50{V1}")
    for block in blocks:
        cast(nn.Conv2d, block.conv1).stride, cast(nn.Conv2d, block.conv2).stride = (2, 2), (1, 1)
    return model


def weights_file(path: Path) -> Path:
    """The .safetensors file that `path` names: the file itself, or that of a run directory or exported folder.

    Raises:
        ModelError: The file is missing, of another format, or has another size than its header says.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"there is no weights file {file}")
    if file.suffix != ".safetensors":
        raise ModelError(
            f"{file} is not a .safetensors file; other formats can hold code. To convert a state dict that you trust: "
            "safetensors.torch.save_file(torch.load(OLD, weights_only=True), NEW)"
        )
    with _opened(file):  # before anything reads all of it
        return file


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except Exception as error:  # safetensors raises errors of its own kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"cannot read weights from {file}: {reason}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file by name, or those of a run directory or exported folder.

    Other formats (.pth, .bin) can hold code and are refused.

    Raises:
        ModelError: The file is missing, damaged, or of another format, or has more than `MAX_TENSORS`.
    """
    with _opened(weights_file(path)) as file:
        names = file.keys()
        if len(names) <= MAX_TENSORS:
            return {name: file.get_tensor(name) for name in names}
        raise ValueError(f"it has {len(names)} tensors, and at most {MAX_TENSORS} are read")


def _converted(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights as timm would load them: original names translated, position embeddings resized to the model's images."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or not type(model).__module__.startswith("timm."):
        return weights
    try:
        return cast(dict[str, Tensor], convert(dict(weights), model))
    except Exception:  # of many kinds, on weights of another network; the names then say what does not fit
        return weights


def load_weights(model: nn.Module, path: Path) -> str:
    """Load the fitting tensors of a weights file; a head for other classes stays as initialised.

    Args:
        model: The network, which is changed.
        path: A .safetensors file, or a run directory or exported folder.

    Returns:
        A sentence that says how many tensors were loaded and which were not.

    Raises:
        ModelError: The file cannot be read, or no weight in it fits the model.
    """
    weights, own = _converted(read_weights(path), model), model.state_dict()
    fitting = {name: weights[name] for name in own if name in weights and weights[name].shape == own[name].shape}
    infinite = next((name for name, tensor in fitting.items() if not tensor.isfinite().all()), None)
    if infinite is not None:
        raise ModelError(f"{path} has numbers that are not finite, in {infinite}")
    parts = [f"{len(fitting)} tensors loaded"]
    for what, names in {
        "of another shape, left as initialised": [name for name in own if name in weights and name not in fitting],
        "not in the file, left as initialised": [name for name in own if name not in weights],
        "of the file not used": [name for name in weights if name not in own],
    }.items():
        names = [name for name in names if not name.endswith("num_batches_tracked")]
        if names:
            parts.append(f"{len(names)} {what} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})")
    report = "; ".join(parts)
    if not any(name.endswith("weight") for name in fitting):
        raise ModelError(f"nothing in {path} fits the model {type(model).__name__}: {report}")
    model.load_state_dict(fitting, strict=False)
    return report
