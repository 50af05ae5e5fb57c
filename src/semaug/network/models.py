"""Backbones by name, from timm and torchvision, and weights from files, safely."""

from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor, nn

from semaug.util.errors import SemaugError


class SmallNet(nn.Module):
    """Four convolutions and a maximum over places: the network for the embedded birds, trained in minutes on a CPU.

    A maximum keeps a trait of a few pixels that an average over the image would drown.
    """

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
        features: Tensor = self.blocks(self.stem(images))
        return cast(Tensor, self.head(features.amax((2, 3))))

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Which parameters form the stem and the blocks, in timm's manner."""
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}


def _convolution(inputs: int, outputs: int, pool: bool) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def build_model(name: str, num_classes: int, crop: int, pretrained: bool = False) -> nn.Module:
    """A classifier by its timm name, or by its torchvision name as ``torchvision/resnet50``; ``small`` is our own.

    A name that only torchvision knows needs no prefix. `crop` is the size of the images, which some transformers fix
    when they are made. `pretrained` fetches the library's default weights, which needs a network.
    """
    if name == "small":
        if pretrained:
            raise SemaugError("the model 'small' has no pretrained weights; leave out --pretrained True")
        return SmallNet(num_classes)
    library, _, short = name.rpartition("/")
    if library not in ("", "timm", "torchvision"):
        raise SemaugError(f"unknown model {name!r}: write a timm name, or torchvision/NAME")
    import timm
    import torchvision

    in_timm = timm.is_model(short)
    in_torchvision = short in torchvision.models.list_models(module=torchvision.models)
    try:
        if library != "torchvision" and in_timm:
            return _build_timm(short, num_classes, crop, pretrained)
        if library != "timm" and in_torchvision:
            return _build_torchvision(short, num_classes, crop, pretrained)
    except OSError as error:
        raise SemaugError(
            f"the pretrained weights of {name} could not be fetched ({type(error).__name__}); "
            "give a file with --weights, or train from scratch with --pretrained False"
        ) from error
    raise SemaugError(f"unknown model {name!r}{_similar(short)}")


def _similar(name: str) -> str:
    import difflib

    import timm
    import torchvision

    known = [*timm.list_models(), *torchvision.models.list_models(module=torchvision.models)]
    close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(close)}?" if close else "; timm.list_models() shows the names"


def _build_timm(name: str, num_classes: int, crop: int, pretrained: bool) -> nn.Module:
    import timm

    try:  # transformers are made for one size of image; other families do not know the option
        model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, img_size=crop)
    except TypeError:
        model = timm.create_model(name, pretrained=pretrained, num_classes=num_classes)
    return model


def _build_torchvision(name: str, num_classes: int, crop: int, pretrained: bool) -> nn.Module:
    import torchvision

    from semaug.network.blocks import find_head

    options: dict[str, Any] = {"image_size": crop} if name.startswith("vit_") and not pretrained else {}
    model: nn.Module = torchvision.models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
    head_name, head = find_head(model)
    parent = model.get_submodule(head_name.rpartition(".")[0])
    inputs = head.weight.shape[1]
    fresh = nn.Linear(inputs, num_classes) if isinstance(head, nn.Linear) else nn.Conv2d(inputs, num_classes, 1)
    setattr(parent, head_name.rpartition(".")[2], fresh)
    return model


@dataclass
class LoadReport:
    """What of a weights file went into a model."""

    loaded: list[str] = field(default_factory=list)
    other_shape: list[str] = field(default_factory=list)  # in both, but of another shape: left as initialised
    missing: list[str] = field(default_factory=list)  # in the model only
    unused: list[str] = field(default_factory=list)  # in the file only

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for names, what in (
            (self.other_shape, "of another shape, left as initialised"),
            (self.missing, "not in the file, left as initialised"),
            (self.unused, "of the file not used"),
        ):
            if names:
                listed = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
                parts.append(f"{len(names)} {what} ({listed})")
        return "; ".join(parts)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a checkpoint saved by torch, which is never unpickled beyond tensors."""
    if not path.is_file():
        raise SemaugError(f"there is no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch would say here how to run the code all the same
        raise SemaugError(f"{path} cannot be read as tensors alone; code in it is never run") from error
    except Exception as error:  # safetensors, zip and pickle each have their own kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SemaugError(f"cannot read weights from {path}: {reason}") from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise SemaugError(f"{path} does not hold a state dict of tensors")
    return {name.removeprefix("module."): value for name, value in content.items()}


def load_weights(model: nn.Module, path: Path) -> LoadReport:
    """Load what fits from a weights file; a head for other classes stays as initialised, and the report says so."""
    weights, own = read_weights(path), model.state_dict()
    report = LoadReport()
    for name, value in own.items():
        if name not in weights:
            if not name.endswith("num_batches_tracked"):
                report.missing.append(name)
        elif weights[name].shape != value.shape:
            report.other_shape.append(name)
        else:
            value.copy_(weights[name])
            report.loaded.append(name)
    report.unused = [name for name in weights if name not in own]
    if not any(name.endswith("weight") for name in report.loaded):
        raise SemaugError(f"nothing in {path} fits the model {type(model).__name__}: {report}")
    return report
