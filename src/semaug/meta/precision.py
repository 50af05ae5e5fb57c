"""Mixed precision: autocast in the backbone's passes, and the gradient scaler that fp16 needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class MixedPrecision:
    """The precision of the passes.

    Args:
        device: Device type of the network.
        autocast: Precision of the backbone; None for that of a `torch.autocast` around the step, if any.
        scaler: Gradient scaler for fp16, or None.
    """

    def __init__(self, device: str, autocast: torch.dtype | None, scaler: GradScaler | None) -> None:
        self.device, self.autocast, self.scaler = device, autocast, scaler
        self._surrounding: torch.dtype | None = None  # precision of a torch.autocast around the step

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision of the backbone's passes; None for that of the parameters."""
        return self.autocast or self._surrounding

    @contextmanager
    def inside_step(self) -> Iterator[None]:
        """Adopt the precision of a `torch.autocast` around the step, and switch it off outside the passes."""
        enabled = torch.is_autocast_enabled(self.device)
        self._surrounding = torch.get_autocast_dtype(self.device) if enabled else None
        if self.dtype == torch.float16 and self.scaler is None:  # small gradients would be lost
            raise ValueError("autocast to fp16 needs scaler=…, the GradScaler; or use bf16")
        with torch.autocast(self.device, enabled=False):
            yield

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Autocast for a pass of the backbone."""
        if self.dtype is None:
            yield
            return
        with torch.autocast(self.device, self.dtype):
            yield
        # Autocast keeps half-precision copies of weights until its outermost block ends, which is after the whole step.
        # The next pass would use the copies from before the optimiser's step.
        torch.clear_autocast_cache()

    def scaled(self, value: Tensor) -> Tensor:
        """Multiply a loss or gradient by the loss scale."""
        return value if self.scaler is None else self.scaler.scale(value)

    def unscaled(self, gradients: list[Tensor]) -> list[Tensor]:
        """Divide gradients by the loss scale."""
        if self.scaler is None or not gradients:
            return gradients
        return list(torch._foreach_div(gradients, self.scaled(torch.ones((), device=gradients[0].device))))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the ``.grad`` of an optimiser's parameters by the loss scale."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, update: bool = False) -> bool:
        """Take one step of an optimiser whose gradients are unscaled."""
        if self.scaler is None:
            optimizer.step()
            return True
        scale = self.scaler.get_scale() if update else 0.0
        self.scaler.step(optimizer)
        if not update:
            return True
        self.scaler.update()
        return self.scaler.get_scale() >= scale
