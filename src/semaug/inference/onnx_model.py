"""A network in an ONNX file, run by ONNX Runtime on the CPU.

The file may come from an unknown source. It is checked before use, and must not refer to other files than its own. It
may have no loops, branches or functions, which exported networks do not have, so that the time does not depend on the
image. Memory is limited, and the time of every run, which ONNX Runtime checks between two operators.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semaug.util.errors import MissingPackageError, ModelError
from semaug.util.untrusted import read_bytes

MAX_NODES = 50_000  # exported networks have hundreds
IMAGE_SECONDS = 30.0  # time limit of a run, for each image of its batch
MEMORY_SHARE = 0.75  # of the machine's memory, for all ONNX models of the process
TOLERANCE = 1e-3  # of logits of an image alone and beside another, relative to the largest one if that is above 1
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
            model = onnx.load_model_from_string(content)
            _check_files(model, file)
            _check_operators(model, file)
            del model, content
            _limit_memory(runtime)
            options, self.runtime = runtime.SessionOptions(), runtime
            options.log_severity_level = 4  # errors are raised, and not printed
            options.add_session_config_entry("session.use_env_allocators", "1")
            # Exported networks have no constants left to fold. In other files folding may take forever, and cannot be
            # ended.
            self.session = runtime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
            )
            inputs = [tensor.name for tensor in self.session.get_inputs()]
        except ModelError:
            raise
        except Exception as error:  # protobuf and ONNX Runtime have exceptions of their own
            raise ModelError(f"{file} cannot be read as ONNX: {_reason(error)}") from error
        if len(inputs) != 1:
            raise ModelError(f"{file} has {len(inputs)} inputs; a classifier has one, the images")
        self.input = inputs[0]
        self._try(torch.randn(2, 3, crop, crop, generator=torch.Generator().manual_seed(0)))

    def _try(self, images: Tensor) -> None:
        """Raise a ModelError if the model does not fit the files beside it, or the images of a batch affect others."""
        together, alone = self(images), self(images[:1])
        difference = float((together[:1] - alone).abs().max())  # NaN is reported with the images that it is found on
        if difference > TOLERANCE * max(1.0, float(alone.abs().max())):
            raise ModelError(
                f"the outputs of {self.file} for an image depend on the other images of its batch, or on chance; "
                "export the network in evaluation mode"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (N, C) of inputs (N, 3, crop, crop), on the CPU."""
        options, limit = self.runtime.RunOptions(), IMAGE_SECONDS * max(1, len(images))
        options.log_severity_level = 4
        timer = Timer(limit, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            logits = self.session.run(None, {self.input: images.cpu().contiguous().numpy()}, options)[0]
        except Exception as error:
            if options.terminate:
                message = f"{self.file} takes more than {limit:g} s for {len(images)} images and is not used"
                raise ModelError(message) from error
            size = tuple(images.shape[1:])
            raise ModelError(f"{self.file} does not run on images of size {size}: {_reason(error)}") from error
        finally:
            timer.cancel()
        if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
            raise ModelError(
                f"{self.file} returns {getattr(logits, 'dtype', 'a list')}, and not numbers for the classes"
            )
        if logits.shape != (len(images), self.num_classes):
            raise ModelError(f"{self.file} returns {logits.shape} outputs, not {(len(images), self.num_classes)}")
        return torch.from_numpy(logits).float()


@cache
def _limit_memory(runtime: Any) -> None:
    """Limit the memory that ONNX Runtime takes for tensors, for all models of the process that ask for it."""
    with suppress(Exception):  # the program that uses semaug may have set its own limit
        limit = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        kinds, how = runtime.OrtAllocatorType, {"max_mem": limit, "arena_extend_strategy": 1}  # 1: no more than needed
        place = runtime.OrtMemoryInfo("Cpu", kinds.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
        runtime.create_and_register_allocator(place, runtime.OrtArenaCfg(how))


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


def _check_operators(model: Any, file: Path) -> None:
    """Raise a ModelError if a network has operators that exported ones do not have."""
    graphs = sum(type(message).__name__ == "GraphProto" for message in _messages(model))
    if graphs > 1 or model.functions:
        raise ModelError(f"{file} has loops, branches or functions, which exported networks do not, and is not read")
    if len(model.graph.node) > MAX_NODES:
        raise ModelError(f"{file} has more than {MAX_NODES} operators and is not read")


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all messages in it: tensors can be in graphs, attributes and functions."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)
