"""A side stream on a GPU, for small kernels beside large ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from semaug.util.devices import stream_for


class SideStream:
    """A second CUDA stream, on which small kernels run while the GPU works at large ones; on a CPU there is none.

    Tensors that the block reads must stay alive and unchanged until :meth:`join`. A capture of the main stream captures
    the side stream too.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_for("diagnostics", device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Run a block on the side stream, after what was launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, *results: Tensor) -> None:
        """Let the main stream wait for the side stream.

        Args:
            *results: Tensors made on the side stream that are read on the main stream from now on. Their memory is not
                used for other tensors of the side stream before the main stream has read it.
        """
        if self._stream is None:
            return
        main = torch.cuda.current_stream(self._stream.device)
        main.wait_stream(self._stream)
        for tensor in results:
            tensor.record_stream(main)
