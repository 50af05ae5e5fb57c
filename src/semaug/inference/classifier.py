"""Trained classifiers, from a run directory, an exported folder, a hub folder or an ONNX file.

These may come from unknown sources: nothing is unpickled, and sizes are checked before memory is allocated.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from semaug.data.images import Preprocessing
from semaug.inference.loop import predict_logits
from semaug.inference.manifest import verify
from semaug.inference.onnx_model import OnnxModel
from semaug.inference.runs import read_calibration, read_description
from semaug.network.models import build_model, read_weights
from semaug.util.errors import FileError, ModelError, RunError, SemaugError, SettingError

MAX_BUFFER_BYTES = 2_000_000_000  # of a network: tables that are not in its weights and grow with the image
TestTimeAugmentation = Literal["flip", "multi-crop"]


@dataclass
class Classifier:
    """A trained network with everything needed to use it.

    Args:
        model: The network, from inputs (N, 3, crop, crop) to logits (N, C), in evaluation mode.
        classes: Class names in the order of the outputs.
        preprocessing: How an image becomes an input.
        name: Name of the architecture, as in :func:`semaug.network.models.build_model`.
        config: The settings of its training; may be empty.
        folder: The folder that it was loaded from; None if it was not.
        temperature: Divides the logits, above 0; see :mod:`semaug.inference.calibration`.
        tta: Test-time augmentation: average the probabilities of an image and its mirror image (``"flip"``), or of its
            centre and corners and their mirror images (``"multi-crop"``). None: the centre crop alone.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
        >>> classifier = Classifier(model.eval(), ("cat", "dog"), Preprocessing(40, 32), "linear", {})
        >>> classifier.probabilities(torch.zeros(1, 40, 40, 3, dtype=torch.uint8)).shape
        torch.Size([1, 2])
    """

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    name: str
    config: dict[str, Any]
    folder: Path | None = None
    temperature: float = 1.0
    tta: TestTimeAugmentation | None = None

    def probabilities(self, pixels: Tensor) -> Tensor:
        """Class probabilities (N, C), in fp32 on the CPU, of uint8 pixels (N, resize, resize, 3).

        Raises:
            ModelError: If the network does not run on images of this size, or memory is too small.
        """
        return self.log_probabilities(pixels).exp().float()

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Logarithms of the probabilities, in fp64, which also orders classes of probability 0 in fp32."""
        if self.tta is None:
            return (self.logits(pixels).double() / self.temperature).log_softmax(1)
        size, crop = self.preprocessing.resize, self.preprocessing.crop
        crops = [self.preprocessing.evaluation_crops(pixels)]
        if self.tta == "multi-crop":
            if size == crop:
                raise SettingError(
                    f"`tta` multi-crop needs images that are larger than the crop of {crop} px; use flip"
                )
            from torchvision.transforms.v2.functional import five_crop  # takes a second to import

            crops += five_crop(pixels.permute(0, 3, 1, 2), [crop, crop])[:4]
        views = [view for each in crops for view in (each, each.flip(-1))]
        own = replace(self, tta=None, preprocessing=replace(self.preprocessing, resize=crop))
        return log_mean([own.log_probabilities(view.permute(0, 2, 3, 1)) for view in views])

    def ranked(self, pixels: Tensor, top_k: int) -> list[tuple[list[int], list[float]]]:
        """Find the most probable classes of images.

        Args:
            pixels: Images, as for :meth:`probabilities`.
            top_k: Number of classes for each image, ≥ 1; all if there are fewer.

        Returns:
            For each image the classes and their probabilities. Of equally probable classes the first comes first, as
            in an evaluation.

        Raises:
            ModelError: If an output is not finite, or as for :meth:`probabilities`.
        """
        logarithms = self.log_probabilities(pixels)
        if not logarithms.isfinite().all():
            raise ModelError("the network's outputs are not finite numbers: its training has diverged")
        ordered = logarithms.sort(dim=1, descending=True, stable=True)
        values = ordered.values[:, :top_k].exp().float()
        return list(zip(ordered.indices[:, :top_k].tolist(), values.tolist(), strict=True))

    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (N, C) of the centre crops, without the temperature; otherwise like :meth:`probabilities`."""
        try:
            [logits] = predict_logits(self.model, [pixels], self.preprocessing)
        except RuntimeError as error:
            size, reason = self.preprocessing.crop, " ".join(str(error).split())[:200]
            raise ModelError(f"{self.name} does not run on {len(pixels)} images of {size} px: {reason}") from error
        return logits


def log_mean(log_probabilities: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of probabilities, from their logarithms."""
    return torch.stack(list(log_probabilities)).logsumexp(0) - math.log(len(log_probabilities))


def as_composite(composite: str | None, model: nn.Module, num_classes: int) -> nn.Module:
    """Build a composite model around a network.

    Args:
        composite: ``"p2p"`` for a P2P-Net, or None for the network itself.
        model: The network.
        num_classes: Number of classes.

    Returns:
        The composite model, or the network.

    Raises:
        ValueError: If the network has no stages to build a P2P-Net from.
        ModelError: If the composite model is unknown.
    """
    if composite is None:
        return model
    if composite != "p2p":
        raise ModelError(f"unknown composite model {composite!r}")
    from semaug.p2p import P2PNet

    return P2PNet(model, num_classes)


def load_classifier(run: Path, device: str | torch.device = "cpu") -> Classifier:
    """Load the trained classifier of a run directory or of an exported folder.

    Args:
        run: The folder; it may come from an unknown source.
        device: Where to put the network.

    Returns:
        The classifier, in evaluation mode.

    Raises:
        RunError: If the folder is not a run directory, or its training has not finished.
        ModelError: If the weights are damaged or do not fit the network.

    Example:
        >>> classifier = load_classifier(Path("runs/birds"))  # doctest: +SKIP
    """
    name, classes, preprocessing, config = read_description(run)
    file = run / "model.safetensors"
    if not file.is_file():
        raise RunError(f"{run} has no model.safetensors: its training has not finished; run the same command again")
    verify(run, file.name)
    weights = read_weights(file)
    if not any(value.ndim and value.shape[0] == len(classes) for value in weights.values()):
        raise ModelError(f"no tensor in {file} fits the {len(classes)} classes of {run}")
    try:
        _check_weights(partial(_build, name, config, classes, preprocessing), weights, file)
        model = _build(name, config, classes, preprocessing)
        model.load_state_dict(weights)
    except SemaugError:
        raise
    except Exception as error:  # libraries that build networks raise many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"the weights of {run} do not fit a {name}: {reason}") from error
    model = model.to(device).to(memory_format=torch.channels_last)  # faster for convolutions, on a CPU too
    return Classifier(model.eval(), classes, preprocessing, name, config, run, _temperature(run))


def _check_weights(build: Callable[[], nn.Module], weights: Mapping[str, Tensor], file: Path) -> None:
    """Raise an error if weights do not fit a network, or it needs far more memory than they; takes none itself."""
    with warnings.catch_warnings(action="ignore"):
        try:
            with torch.device("meta"):
                model = build()
        except RuntimeError:  # a few networks read values of tensors when they are built
            with _WithoutParameters():
                model = build()
        with torch.device("meta"):
            model.load_state_dict(weights)
    for name, own in model.state_dict().items():
        if weights[name].is_complex() or own.is_floating_point() != weights[name].is_floating_point():
            raise ModelError(f"{name} in {file} has the type {str(weights[name].dtype).removeprefix('torch.')}")
    if sum(buffer.nbytes for buffer in model.buffers()) > MAX_BUFFER_BYTES:
        raise ModelError(
            f"the network of {file} needs tables of more than {MAX_BUFFER_BYTES // 10**9} GB for its images"
        )


class _WithoutParameters(TorchFunctionMode):
    """Create tensors that a layer will initialise itself, as its parameters, without memory, and others as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def _build(name: str, config: dict[str, Any], classes: tuple[str, ...], preprocessing: Preprocessing) -> nn.Module:
    model = build_model(name, len(classes), preprocessing.crop)
    return as_composite(config.get("composite"), model, len(classes))


def _temperature(folder: Path) -> float:
    calibration = read_calibration(folder)
    return 1.0 if calibration is None else calibration["temperature"]


def open_classifier(path: Path, device: str | torch.device = "cpu") -> Classifier:
    """Load a classifier from a run directory, an exported or hub folder, or an ONNX file.

    Args:
        path: The folder, or an ONNX file with the config.json and classes.json of its export beside it.
        device: Where to put the network; ONNX runs on the CPU.

    Returns:
        The classifier, in evaluation mode.

    Raises:
        RunError: If the folder is not a run directory, or its training has not finished.
        ModelError: If the network or its weights are damaged or do not fit.
        FileError: If the file, or one of the files beside it, is missing.

    Example:
        >>> classifier = open_classifier(Path("exported/model.onnx"))  # doctest: +SKIP
    """
    if path.suffix != ".onnx" and not path.is_file():
        return load_classifier(path, device)
    if path.suffix != ".onnx":
        raise ModelError(f"{path} is neither a folder nor an ONNX file")
    for file in (path, path.with_name("config.json"), path.with_name("classes.json")):
        if not file.is_file():
            beside = "" if file is path else f"; it must be beside {path} and describes its inputs and outputs"
            raise FileError(f"there is no file {file}{beside}")
    name, classes, preprocessing, config = read_description(path.parent)
    verify(path.parent, path.name, *([f"{path.name}.data"] if path.with_name(f"{path.name}.data").exists() else []))
    model = OnnxModel(path, preprocessing.crop, len(classes))
    folder = path.parent
    return Classifier(model.eval(), classes, preprocessing, name, config, folder, _temperature(folder))
