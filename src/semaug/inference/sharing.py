"""Models from elsewhere, for use only: a run directory, an exported folder, a hub folder or an ONNX file alike.

They may come from strangers. Nothing is unpickled; sizes are checked before memory is taken; an ONNX file may not name
other files than its own.
"""

import importlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semaug.inference.runs import Classifier, load_classifier, read_description
from semaug.util.errors import SemaugError

MAX_ONNX_BYTES = 2_000_000_000  # a protobuf file holds at most 2 GB; larger models have their weights beside it


def open_classifier(path: Path, device: str = "cpu") -> Classifier:
    """The classifier of a run directory, of an exported or hub folder, or of an ONNX file, which runs on the CPU."""
    if path.suffix == ".onnx" or path.is_file():
        return load_onnx(path)
    return load_classifier(path, device)


def load_onnx(file: Path) -> Classifier:
    """The classifier in an ONNX file; classes and preprocessing are in the files that an export writes beside it."""
    if not file.is_file():
        raise SemaugError(f"there is no file {file}")
    if file.suffix != ".onnx":
        raise SemaugError(f"{file} is neither a folder nor an ONNX file")
    missing = [name for name in ("config.json", "classes.json") if not (file.parent / name).is_file()]
    if missing:
        raise SemaugError(f"{' and '.join(missing)} must lie beside {file}: they say what its inputs and outputs mean")
    name, classes, preprocessing, config = read_description(file.parent)
    model = OnnxModel(file)
    model.check((3, preprocessing.crop, preprocessing.crop), len(classes))
    return Classifier(model.eval(), classes, preprocessing, name, config)


class OnnxModel(nn.Module):
    """A network of one input and one output, run by ONNX Runtime on the CPU."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        try:
            onnx, runtime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
        except ImportError as error:
            raise SemaugError(f"an ONNX file needs {error.name}: pip install 'semaug[onnx]'") from error
        self.file = file
        if file.stat().st_size > MAX_ONNX_BYTES:
            raise SemaugError(f"{file} has more than {MAX_ONNX_BYTES} bytes, and is not read")
        try:
            _check_tensors(onnx.load(str(file), load_external_data=False), file)
            self.session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        except SemaugError:
            raise
        except Exception as error:  # protobuf and ONNX Runtime have kinds of their own
            raise SemaugError(f"{file} cannot be read as ONNX: {_reason(error)}") from error

    def check(self, image: tuple[int, int, int], classes: int) -> None:
        """That it takes images of this shape and tells of this many classes, as far as the file says."""
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        wanted = ((None, *image), (None, classes))
        for found, shape, what in zip((inputs, outputs), wanted, ("takes", "gives"), strict=True):
            if len(found) != 1 or found[0].type != "tensor(float)" or not _fits(found[0].shape, shape):
                described = ", ".join(f"{item.type} {item.shape}" for item in found) or "nothing"
                raise SemaugError(
                    f"{self.file} {what} {described[:200]}, which is not what the files beside it say: {shape[1:]}"
                )
        self.names = inputs[0].name, outputs[0].name
        self.classes = classes

    def forward(self, images: Tensor) -> Tensor:
        try:
            [logits] = self.session.run([self.names[1]], {self.names[0]: images.cpu().contiguous().numpy()})
        except Exception as error:
            raise SemaugError(f"{self.file} cannot be run: {_reason(error)}") from error
        if logits.shape != (len(images), self.classes):
            raise SemaugError(f"{self.file} gave outputs of shape {logits.shape} for {len(images)} images")
        return torch.from_numpy(logits)


def _fits(shape: list[Any], wanted: tuple[int | None, ...]) -> bool:
    """Whether a shape is the wanted one where both are numbers: ONNX has names for sizes that may vary."""
    if len(shape) != len(wanted):
        return False
    return all(
        want is None or not isinstance(size, int) or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_tensors(model: Any, file: Path) -> None:
    """That tensors outside of the file, which it names by path, are in the one file that an export writes beside it."""
    allowed = f"{file.name}.data"
    in_functions = (_node_tensors(node) for function in model.functions for node in function.node)
    for tensor in chain(_tensors(model.graph), chain.from_iterable(in_functions)):
        locations = [entry.value for entry in tensor.external_data if entry.key == "location"]
        if any(location != allowed for location in locations):
            raise SemaugError(f"{file} names another file than {allowed} for its weights, and is not read")
    if (file.parent / allowed).is_symlink():
        raise SemaugError(f"{file.parent / allowed} is a link, and is not read")


def _tensors(graph: Any) -> Iterator[Any]:
    """All tensors of a graph and of the graphs in it."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for inner in (attribute.g, *attribute.graphs):
            yield from _tensors(inner)
