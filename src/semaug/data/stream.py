"""Images that are decoded in every epoch, ahead of their use, for data that is larger than memory."""

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from ctypes import c_uint8
from functools import partial
from itertools import chain, islice
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semaug.data.images import Preprocessing, pixels_or_reason
from semaug.data.samples import Samples, Subset
from semaug.data.shards import ShardedImages
from semaug.util.errors import DataError
from semaug.util.names import printable
from semaug.util.processes import TASK_SIZE, ordered_map

BUFFER = 10_000  # images through which those of shards are shuffled: about ten shards


def shards_of(samples: Samples) -> Tensor | None:
    """The number of the shard of each image, (N,), or None if the images are not in shards."""
    if isinstance(samples, Subset):
        whole = shards_of(samples.whole)
        return None if whole is None else whole[torch.from_numpy(np.array(samples.indices))]
    return torch.from_numpy(samples.shard) if isinstance(samples, ShardedImages) else None


def streaming_order(shards: Tensor, generator: torch.Generator, buffer: int = BUFFER) -> Tensor:
    """Draw a random order of images that reads one shard after the other.

    The shards are shuffled, and their images, in order, pass through a buffer: each image that enters replaces a random
    one, which leaves. The order depends on the generator only, so that it can be resumed anywhere. If the buffer holds
    all images, all orders are equally likely.

    Args:
        shards: The shard of each image, (N,).
        generator: A CPU generator.
        buffer: Size of the buffer, at least 1.

    Returns:
        The indices of all images, each once, (N,).

    Raises:
        ValueError: The buffer is empty.
    """
    if buffer < 1:
        raise ValueError(f"the buffer must hold at least one image, not {buffer}")
    total = len(shards)
    turn = torch.randperm(int(shards.max()) + 1 if total else 0, generator=generator)
    entering = turn[shards].argsort(stable=True)
    filled = min(buffer, total)
    seat = torch.cat([torch.arange(filled), torch.randint(buffer, (total - filled,), generator=generator)])
    # An image leaves when the next one takes its seat; the last on each seat leave at the end.
    by_seat = seat.argsort(stable=True)
    is_last = torch.ones(total, dtype=torch.bool)
    is_last[:-1] = seat[by_seat[1:]] != seat[by_seat[:-1]]
    leaves_at = torch.empty(total, dtype=torch.long)
    leaves_at[by_seat[~is_last]] = by_seat[1:][~is_last[:-1]]
    rest = by_seat[is_last]
    leaves_at[rest] = total + torch.randperm(len(rest), generator=generator)
    return entering[leaves_at.argsort()]


def stream_pixels(
    samples: Samples, preprocessing: Preprocessing, parts: Iterable[Tensor], workers: int, *, pinned: bool = False
) -> Generator[Tensor, None, None]:
    """Decode images part by part, about two parts ahead of the consumer, into memory shared with the workers.

    Args:
        samples: The images.
        preprocessing: How to resize them.
        parts: Indices of the images of each part, (n,), at least one; read lazily.
        workers: Number of processes; 0 decodes on demand in this one.
        pinned: Whether the result is in pinned memory.

    Yields:
        For each part uint8 (n, resize, resize, 3).

    Raises:
        DataError: An image cannot be read.
    """
    rest = iter(parts)
    first = next(rest, None)
    if first is None:
        return
    tasks = max(2 * workers, -(-2 * len(first) // TASK_SIZE)) if workers > 0 else 1
    shape = (preprocessing.resize, preprocessing.resize, 3)
    memory = RawArray(c_uint8, tasks * TASK_SIZE * math.prod(shape))
    slots = _view(memory, shape)
    sizes: deque[int] = deque()

    def indices() -> Iterator[int]:
        for part in chain((first,), rest):
            sizes.append(len(part))
            yield from part.tolist()

    items = ((number % len(slots), i) for number, i in enumerate(indices()))
    decode = partial(_decode_into, memory, samples, preprocessing)
    slot = 0
    with closing(ordered_map(decode, items, workers, tasks_ahead=tasks, ignore_signals=True)) as errors:
        for first_error in errors:  # of the first image of a part
            pixels = torch.empty(sizes.popleft(), *shape, dtype=torch.uint8, pin_memory=pinned)
            for row, error in enumerate(chain((first_error,), islice(errors, len(pixels) - 1))):
                if error is not None:
                    raise DataError(f"{error}; check the data set, or set `on_bad_image` to skip")
                pixels.numpy()[row] = slots[slot]  # numpy copies without threads
                slot = (slot + 1) % len(slots)
            yield pixels


def _decode_into(memory: Any, samples: Samples, preprocessing: Preprocessing, item: tuple[int, int]) -> str | None:
    """Decode an image into its slot of the shared memory; returns a message if it cannot be read."""
    slot, i = item
    pixels = pixels_or_reason(samples, preprocessing, i)
    if isinstance(pixels, str):
        return f"cannot read the image {printable(samples.name(i))}: {pixels}"
    _view(memory, pixels.shape)[slot] = pixels
    return None


def _view(memory: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory, dtype=np.uint8).reshape(-1, *shape)
