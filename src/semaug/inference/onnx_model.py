"""A network in an ONNX file, run by ONNX Runtime on the CPU.

The file may come from an unknown source. It is checked before use, and must not refer to other files than its own.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semaug.util.errors import MissingPackageError, ModelError
from semaug.util.untrusted import read_bytes

MAX_ONNX_BYTES = 2_000_000_000  # a protobuf file holds at most 2 GB; larger models have their weights in a second file


def import_onnx(*packages: str) -> list[Any]:
    """Import packages that ONNX needs; a MissingPackageError says how to install them."""
    try:
        return [importlib.import_module(name) for name in packages]
    except ImportError as error:
        raise MissingPackageError(
            f"ONNX needs the package {error.name}: pip install '.[onnx]' in the clone, or use the model without ONNX"
        ) from error


class OnnxModel(nn.Module):
    """A classifier in an ONNX file.

    Args:
        file: The ONNX file.
        crop: Side of the images that it takes.
        num_classes: Number of its outputs.

    Raises:
        MissingPackageError: If onnx or onnxruntime is not installed.
        FileError: If the file cannot be read or is too large.
        ModelError: If the file is damaged, refers to other files, or has other inputs or outputs.
    """

    def __init__(self, file: Path, crop: int, num_classes: int) -> None:
        super().__init__()
        onnx, runtime = import_onnx("onnx", "onnxruntime")
        self.file, self.num_classes = file, num_classes
        content = read_bytes(file, MAX_ONNX_BYTES)
        try:
            _check_files(onnx.load_model_from_string(content), file)
            self.session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
            [self.input] = [tensor.name for tensor in self.session.get_inputs()]
        except ModelError:
            raise
        except Exception as error:  # protobuf and ONNX Runtime have exceptions of their own
            raise ModelError(f"{file} cannot be read as ONNX: {_reason(error)}") from error
        self(torch.zeros(1, 3, crop, crop))  # raises an error if the model does not fit the files beside it

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (N, C) of inputs (N, 3, crop, crop), on the CPU."""
        try:
            logits = self.session.run(None, {self.input: images.cpu().contiguous().numpy()})[0]
        except Exception as error:
            size = tuple(images.shape[1:])
            raise ModelError(f"{self.file} does not run on images of size {size}: {_reason(error)}") from error
        if logits.shape != (len(images), self.num_classes):
            raise ModelError(f"{self.file} returns {logits.shape} outputs, not {(len(images), self.num_classes)}")
        return torch.from_numpy(logits)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_files(model: Any, file: Path) -> None:
    """Raise a ModelError if weights are in another file than the one that an export writes beside `file`."""
    allowed = f"{file.name}.data"
    for message in _messages(model):
        for entry in getattr(message, "external_data", ()):
            if entry.key == "location" and entry.value != allowed:
                raise ModelError(f"{file} refers to another file than {allowed} for its weights and is not read")
    weights = file.parent / allowed
    if weights.is_symlink() or (weights.exists() and not weights.is_file()):
        raise ModelError(f"{weights} is a link or not a file and is not read")


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all messages in it: tensors can be in graphs, attributes and functions."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)
