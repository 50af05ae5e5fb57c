"""Images that are decoded when they are needed, ahead of who asks for them: for data that is larger than memory."""

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
from semaug.util.errors import SemaugError, printable
from semaug.util.processes import CHUNK, in_turn

BUFFER = 10_000  # images through which those of shards are shuffled: about ten shards


# ---------------------------------------------------------------------------------------------------------- the order


def shards_of(samples: Samples) -> Tensor | None:
    """The number of the shard that each image of a split is in; None where they are not in shards."""
    if isinstance(samples, Subset):
        whole = shards_of(samples.whole)
        return None if whole is None else whole[torch.from_numpy(np.array(samples.indices))]
    return torch.from_numpy(samples.shard) if isinstance(samples, ShardedImages) else None


def streaming_order(shards: Tensor, generator: torch.Generator, buffer: int = BUFFER) -> Tensor:
    """The places of all images, each once, in random order, in which shards are met one after the other.

    `shards` are the images' shards. These are shuffled, and their images, from the beginning of each to its end, go
    through a buffer: as one comes in, another one, drawn at random, goes out. The order follows from the generator
    alone, so that any place in it can be taken up again by counting. With no more images than the buffer holds, all
    orders are as likely.
    """
    if buffer < 1:
        raise ValueError(f"the buffer must hold at least one image, not {buffer}")
    total = len(shards)
    turn = torch.randperm(int(shards.max()) + 1 if total else 0, generator=generator)
    arriving = turn[shards].argsort(stable=True)
    held = min(buffer, total)
    seat = torch.cat([torch.arange(held), torch.randint(buffer, (total - held,), generator=generator)])
    # Who comes in takes the seat of the one who sat there last; those on the same seat follow each other.
    by_seat = seat.argsort(stable=True)
    last = torch.ones(total, dtype=torch.bool)
    last[:-1] = seat[by_seat[1:]] != seat[by_seat[:-1]]
    leaving = torch.empty(total, dtype=torch.long)
    leaving[by_seat[~last]] = by_seat[1:][~last[:-1]]  # when
    rest = by_seat[last]
    leaving[rest] = total + torch.randperm(len(rest), generator=generator)
    return arriving[leaving.argsort()]


# --------------------------------------------------------------------------------------------------------- the pixels


def stream_pixels(
    samples: Samples, preprocessing: Preprocessing, parts: Iterable[Tensor], workers: int, *, pinned: bool = False
) -> Generator[Tensor, None, None]:
    """Images of a split as uint8 (n, resize, resize, 3): for each of `parts`, the n images at these places.

    They are decoded in so many processes, which are ahead of who asks by about the two parts that come next; with no
    process, when they are asked for. What is made ahead lies in memory that the processes share. The first image that
    cannot be read is a :class:`SemaugError`. No part may be empty.
    """
    rest = iter(parts)
    first = next(rest, None)
    if first is None:
        return
    chunks = max(2 * workers, -(-2 * len(first) // CHUNK)) if workers > 0 else 1
    shape = (preprocessing.resize, preprocessing.resize, 3)
    memory = RawArray(c_uint8, chunks * CHUNK * math.prod(shape))
    window = _view(memory, shape)
    sizes: deque[int] = deque()

    def places() -> Iterator[int]:
        for part in chain((first,), rest):
            sizes.append(len(part))
            yield from part.tolist()

    items = ((number % len(window), i) for number, i in enumerate(places()))
    decode = partial(_decode_into, memory, samples, preprocessing)
    slot = 0
    with closing(in_turn(decode, items, workers, chunks, hear_signals=False)) as faults:
        for fault in faults:  # of the first image of a part
            pixels = torch.empty(sizes.popleft(), *shape, dtype=torch.uint8, pin_memory=pinned)
            for place, found in enumerate(chain((fault,), islice(faults, len(pixels) - 1))):
                if found is not None:
                    raise SemaugError(
                        f"{found}; semaug data check lists all such images, --on-bad-image skip leaves them out"
                    )
                pixels.numpy()[place] = window[slot]  # by numpy, whose copies take no threads
                slot = (slot + 1) % len(window)
            yield pixels


def _decode_into(memory: Any, samples: Samples, preprocessing: Preprocessing, item: tuple[int, int]) -> str | None:
    """Put an image into its slot of the shared memory; returns why that cannot be done, if it cannot."""
    slot, i = item
    found = pixels_or_reason(samples, preprocessing, i)
    if isinstance(found, str):
        return f"cannot read the image {printable(samples.name(i))}: {found}"
    _view(memory, found.shape)[slot] = found
    return None


def _view(memory: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory, dtype=np.uint8).reshape(-1, *shape)
