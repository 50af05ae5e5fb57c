"""Small kernels beside large ones on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second CUDA stream, on which small kernels run while the GPU works at large ones; on a CPU there is none.

    Tensors that the block reads must stay alive and unchanged until :meth:`join`. A capture of the main stream captures
    the side stream too.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Run a block on the side stream, after what was launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the main stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
