"""Record the outputs of operators in a forward pass, so that a tangent pass can reuse them.

A tangent pass repeats an earlier forward pass. :class:`OperatorRecorder` is a mode for the earlier pass: it notes, in
order, the calls of operators that have a tangent rule. While the autograd graph of that pass exists this costs almost
no memory, because the graph holds nearly all of these outputs anyway.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Bounds = tuple[float, float]
"""The range in which a clamping activation passes its input on: (0, ∞) for ReLU, (0, 6) for ReLU6."""

STORED = {torch.conv1d, torch.conv2d, torch.conv3d, F.linear}
"""Operators whose output is stored: the graph usually holds it too, for the BatchNorm or activation that follows."""

FUSED = {F.batch_norm, Tensor.add_}
"""Operators whose rule also applies the in-place activation that follows them."""


@dataclass
class OperatorCall:
    """One call of an operator that has a tangent rule."""

    function: Any
    output: Tensor | None = None  # without its graph
    version: int = 0
    bounds: Bounds | None = None  # of the in-place activation that follows

    def store(self, output: Tensor) -> None:
        """Store the output; `reusable` detects when it has been overwritten since."""
        self.output, self.version = output.detach(), output._version

    def reusable(self, like: Tensor) -> Tensor | None:
        """The stored output, or None if it was overwritten or its shape or type differs from `like`."""
        if self.output is None or self.output._version != self.version:
            return None
        return self.output if self.output.shape == like.shape and self.output.dtype == like.dtype else None


@dataclass
class OperatorRecord:
    """The calls of one forward pass, in order."""

    calls: list[OperatorCall] = field(default_factory=list)

    def release_outputs(self) -> None:
        """Free the stored outputs; the order of the calls and their activations remain."""
        for call in self.calls:
            call.output = None


class OperatorRecorder(TorchFunctionMode):
    """Mode that appends the calls made inside it to a record.

    Args:
        record: Where the calls are appended.
        batch_norm: Whether calls of BatchNorm are recorded; False where its statistics span all ranks.
    """

    def __init__(self, record: OperatorRecord, batch_norm: bool = True) -> None:
        super().__init__()
        self.calls, self.batch_norm = record.calls, batch_norm
        self._last: Tensor | None = None  # output of the latest call in `FUSED`, until the next operator runs

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        output = func(*args, **kwargs)
        last, self._last = self._last, None
        if is_recorded(func, args) and (self.batch_norm or func is not F.batch_norm):
            self.calls.append(OperatorCall(func))
            if func in STORED:
                self.calls[-1].store(output)
            else:
                self._last = output
        elif last is not None and args and args[0] is last:
            call, call.bounds = self.calls[-1], in_place_bounds(func, args, kwargs)
            if call.bounds is not None and call.function is F.batch_norm:
                call.store(last)
        return output


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    # A fused kernel draws dropout masks in an order that no other pass can repeat.
    with sdpa_kernel(SDPBackend.MATH) if dropout_p else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


def is_recorded(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call of `func` with positional arguments `args` belongs in a record."""
    return (func in STORED or func in FUSED) and bool(args) and args[0].is_floating_point()


def in_place_bounds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounds | None:
    """The bounds of an activation `func` that clamps its input in place; None for any other operator."""
    if func in (torch.relu_, Tensor.relu_):
        return 0.0, float("inf")
    if func in (F.relu, F.relu6):
        in_place = args[1] if len(args) > 1 else kwargs.get("inplace", False)
        return (0.0, 6.0 if func is F.relu6 else float("inf")) if in_place else None
    if func is F.hardtanh:
        names = ("input", "min_val", "max_val", "inplace")
        options = {"min_val": -1.0, "max_val": 1.0, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
        return (options["min_val"], options["max_val"]) if options["inplace"] else None
    return None
