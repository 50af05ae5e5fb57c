"""The inference loop: decode images ahead in threads, and run a network on batches of pixels."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from semaug.data.images import Preprocessing
from semaug.data.samples import Samples
from semaug.util.errors import DataError
from semaug.util.threads import available_cores

Pixels = npt.NDArray[np.uint8]  # of one image, (resize, resize, 3), see Preprocessing.pixels
Item = TypeVar("Item")
Result = TypeVar("Result")


def decode_batches(
    load: Callable[[Item], Result], items: Iterable[Item], batch_size: int, workers: int | None = None
) -> Iterator[list[Result]]:
    """Load items in threads while the caller works on earlier ones.

    Args:
        load: Loads one item. An exception is raised when the item's turn comes, and ends the loop.
        items: What to load; it may be endless, as at most two batches are loaded ahead.
        batch_size: Results in each batch, ≥ 1; the last batch may be smaller.
        workers: Number of threads; None: one for each core that this process may use, at most 8.

    Yields:
        Batches of results, in the order of the items.
    """
    rest = iter(items)
    pool = ThreadPoolExecutor(max(1, workers) if workers is not None else min(8, available_cores()))
    try:
        pending = deque(pool.submit(load, item) for item in islice(rest, 2 * batch_size))
        while pending:
            batch: list[Result] = []
            while pending and len(batch) < batch_size:
                batch.append(pending.popleft().result())
                pending.extend(pool.submit(load, item) for item in islice(rest, 1))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def decode_samples(
    samples: Samples, indices: Iterable[int], preprocessing: Preprocessing, batch_size: int, workers: int | None = None
) -> Iterator[Tensor]:
    """Decode images of a split by :func:`decode_batches`.

    Args:
        samples: The split; its ``load`` must be thread-safe.
        indices: Which of its images to decode.
        preprocessing: Makes pixels from an image.
        batch_size: Images in each batch, ≥ 1.
        workers: Number of threads; None: one for each core, at most 8.

    Yields:
        The pixels of each batch, uint8 (N, resize, resize, 3).

    Raises:
        DataError: If an image cannot be read; the message names it.
    """

    def load(i: int) -> Pixels:
        try:
            return preprocessing.pixels(samples.load(i))
        except (OSError, ValueError, SyntaxError) as error:  # from samples that raise no DataError of their own
            raise DataError(f"cannot read the image {samples.name(i)}: {error}") from error

    for batch in decode_batches(load, indices, batch_size, workers):
        yield torch.from_numpy(np.stack(batch))


def run_batches(
    function: Callable[[Tensor], Tensor],
    pixel_batches: Iterable[Tensor],
    preprocessing: Preprocessing,
    *,
    device: str | torch.device = "cpu",
    autocast: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Run a function on the normalised centre crops of batches of pixels, without gradients.

    Args:
        function: A network or a part of one: takes inputs (N, 3, crop, crop) on ``device``.
        pixel_batches: Batches of uint8 pixels (N, resize, resize, 3) on any device.
        preprocessing: Makes inputs from pixels.
        device: Where the function runs.
        autocast: Precision of the function, for example ``torch.bfloat16``; None: that of its weights.

    Yields:
        The outputs for each batch, in fp32 on the CPU.
    """
    for pixels in pixel_batches:
        with torch.inference_mode():
            inputs = preprocessing.evaluation_input(pixels.to(device, non_blocking=True))
            with torch.autocast(torch.device(device).type, autocast, enabled=autocast is not None):
                outputs = function(inputs).float().cpu()
        yield outputs


def predict_logits(
    model: nn.Module,
    pixel_batches: Iterable[Tensor],
    preprocessing: Preprocessing,
    *,
    autocast: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Run a network on batches of pixels by :func:`run_batches`.

    Args:
        model: The network; it is switched to evaluation mode and stays in it.
        pixel_batches: Batches of uint8 pixels (N, resize, resize, 3) on any device.
        preprocessing: Makes inputs from pixels.
        autocast: Precision of the network; None: that of its weights.

    Yields:
        The logits (N, C) of each batch, in fp32 on the CPU.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return run_batches(model.eval(), pixel_batches, preprocessing, device=device, autocast=autocast)
