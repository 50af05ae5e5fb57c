"""Dual tensors pushed through a function, by torch's own forward mode and by the tangent rules."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from semaug.network.recording import OperatorRecord, OperatorRecorder
from semaug.network.tangents import TangentRules

Function = Callable[..., Tensor]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def duals(tensors: list[Tensor], moving: list[bool]) -> list[Tensor]:
    """Copies of the tensors that may be overwritten; those that move have a random tangent."""
    result = []
    for index, (tensor, moves) in enumerate(zip(tensors, moving, strict=True)):
        copy = tensor.clone()
        tangent = numbers(*tensor.shape, seed=100 + index, dtype=tensor.dtype)
        result.append(make_dual(copy, torch.empty_like(copy).copy_(tangent)) if moves else copy)
    return result


def torchs(function: Function, tensors: list[Tensor], moving: list[bool]) -> tuple[Tensor, Tensor]:
    """Output and tangent by torch's own forward mode."""
    with torch.no_grad(), dual_level(), sdpa_kernel(SDPBackend.MATH):
        primal, tangent = unpack_dual(function(*duals(tensors, moving)))
        return primal.clone(), tangent.clone()


def ours(
    function: Function, tensors: list[Tensor], moving: list[bool], record: OperatorRecord | None = None
) -> tuple[Tensor, Tensor]:
    """Output and tangent by the tangent rules."""
    with torch.no_grad(), dual_level(), sdpa_kernel(SDPBackend.MATH):
        inputs = duals(tensors, moving)
        with TangentRules(record):
            output = function(*inputs)
        primal, tangent = unpack_dual(output)
        return primal.clone(), tangent.clone()


def recorded(function: Function, tensors: list[Tensor]) -> tuple[Tensor, OperatorRecord]:
    """The record of a pass, and its output, whose graph holds the recorded tensors."""
    record = OperatorRecord()
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    with OperatorRecorder(record):
        output = function(*inputs)
    return output, record


def assert_same(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-11) -> None:
    for a, b in zip(result, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= tolerance * (1 + b.double().abs().max())


ACTIVATIONS: dict[str, Function] = {
    "none": lambda y: y,
    "relu_": lambda y: F.relu(y, inplace=True),
    "torch.relu_": torch.relu_,
    "method relu_": lambda y: y.relu_(),
    "relu6_": lambda y: F.relu6(y, inplace=True),
    "hardtanh_": lambda y: F.hardtanh(y, -0.5, 0.5, inplace=True),
    "relu": F.relu,
    "add, relu_": lambda y: F.relu(y.__iadd__(2.0 * y), inplace=True),
    "read, relu_": lambda y: y.sum() * F.relu(y, inplace=True),
    "relu beside": lambda y: F.relu(y) + y,
    "twice": lambda y: F.relu(F.relu(y, inplace=True).__iadd__(-0.1), inplace=True),
}
