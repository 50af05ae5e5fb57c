"""Streaming: the order of images, and their pixels."""

import os
import re
import signal
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from photos import photo_folder
from semaug.data.cache import decoded
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import ImageFiles, Samples, Subset
from semaug.data.shards import ShardedImages, read_shards, write_shards
from semaug.data.stream import shards_of, stream_pixels, streaming_order
from semaug.util.errors import DataError
from semaug.util.processes import TASK_SIZE

SETTINGS = Preprocessing(24, 20)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------------- the order


def with_a_buffer(shards: list[int], generator: torch.Generator, buffer: int) -> list[int]:
    """The same order by simulation: images enter the buffer one after the other, and one leaves."""
    turn = torch.randperm(max(shards) + 1, generator=generator).tolist()
    arriving = iter(sorted(range(len(shards)), key=lambda i: turn[shards[i]]))
    held = list(islice(arriving, buffer))
    order = []
    for i, seat in zip(arriving, torch.randint(buffer, (len(shards) - len(held),), generator=generator), strict=True):
        order.append(held[seat])
        held[seat] = i
    left = torch.randperm(len(held), generator=generator).tolist()
    return order + [held[left.index(place)] for place in range(len(held))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 5), st.integers(1, 80))
def test_an_order_has_each_image_once_near_its_place(counts: list[int], seed: int, buffer: int) -> None:
    shards = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = streaming_order(shards, seeded(seed), buffer).tolist()
    assert sorted(order) == list(range(sum(counts)))
    assert order == with_a_buffer(shards.tolist(), seeded(seed), buffer)
    seen: list[int] = []  # shards
    arrival = {i: place for place, i in enumerate(streaming_order(shards, seeded(seed), buffer=1).tolist())}
    for place, i in enumerate(order):
        assert arrival[i] <= place + buffer, "at most a buffer of images is read ahead"
        seen.append(int(shards[i]))
    if buffer == 1:
        assert [shard for k, shard in enumerate(seen) if k == 0 or seen[k - 1] != shard] == list(dict.fromkeys(seen))


def test_a_buffer_that_holds_all_images_allows_every_order() -> None:
    shards = torch.tensor([0, 0, 1])
    orders = {tuple(streaming_order(shards, seeded(seed)).tolist()) for seed in range(100)}
    assert len(orders) == 6
    assert len(streaming_order(torch.empty(0, dtype=torch.long), seeded(0))) == 0
    with pytest.raises(ValueError, match="at least one image"):
        streaming_order(shards, seeded(0), buffer=0)


# ---------------------------------------------------------------------------------------------------------- the pixels


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=3, train=30, test=2, size=32)


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    write_shards(read_data(str(photos)), folder, per_shard=25)
    return read_shards(folder).splits["train"]


def test_the_shard_of_each_image_is_known_for_subsets_too(photos: Path, packed: Samples) -> None:
    assert isinstance(packed, ShardedImages)
    shards = shards_of(Subset(Subset(packed, range(0, 90, 2)), [44, 0, 13]))
    assert shards is not None
    assert shards.tolist() == [88 // 25, 0, 26 // 25]
    assert shards_of(Subset(read_data(str(photos)).splits["train"], [1])) is None


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_streamed_pixels_equal_decoded_ones(packed: Samples, workers: int) -> None:
    everything = decoded(packed, SETTINGS, None)
    generator = seeded(1)
    parts = [torch.randint(len(packed), (size,), generator=generator) for size in (3, 1, 70, 40, 5, 90, 2)]
    streamed = list(stream_pixels(packed, SETTINGS, iter(parts), workers))
    assert len(streamed) == len(parts)
    for part, pixels in zip(parts, streamed, strict=True):
        assert torch.equal(pixels, everything[part])
    assert list(stream_pixels(packed, SETTINGS, [], workers)) == []


def test_few_images_are_decoded_ahead_and_their_memory_is_reused(photos: Path) -> None:
    asked: list[int] = []

    def parts() -> Iterator[Tensor]:
        for part in torch.arange(90).repeat(10).split(8):
            asked.append(len(part))
            yield part

    everything = decoded(read_data(str(photos)).splits["train"], SETTINGS, None)
    stream = stream_pixels(read_data(str(photos)).splits["train"], SETTINGS, parts(), 2)
    for place, pixels in enumerate(stream):
        assert sum(asked) <= 8 * (place + 1) + 4 * TASK_SIZE + 8
        assert torch.equal(pixels, everything[torch.arange(8 * place, 8 * place + len(pixels)) % 90])
    assert sum(asked) == 900


def test_the_first_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{i}.png" for i in range(40))
    for file in files:
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file)
    (tmp_path / "21.png").write_bytes(b"no image")
    samples = ImageFiles(tmp_path, files, (0,) * 40)
    for workers in (0, 2):
        stream = stream_pixels(samples, SETTINGS, torch.arange(40).split(10), workers)
        assert [len(next(stream)), len(next(stream))] == [10, 10]
        with pytest.raises(DataError, match=r"^cannot read the image 21.png: it is not an image.*; check the"):
            next(stream)
        assert not active_children()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes in /proc")
def test_workers_ignore_signals_and_killing_one_ends_in_one_sentence(packed: Samples) -> None:
    stream = stream_pixels(packed, SETTINGS, torch.arange(90).repeat(40).split(30), 2)
    next(stream)
    workers = active_children()
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        wait_until_ignored(worker.pid)
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    assert sum(map(len, islice(stream, 20))) == 600
    assert all(worker.is_alive() for worker in workers)
    os.kill(workers[0].pid or 0, signal.SIGKILL)
    with pytest.raises(DataError, match="a process that reads images was killed"):
        list(stream)


def wait_until_ignored(process: int) -> None:
    """Wait until a new worker ignores SIGTERM."""
    end = time.monotonic() + 60
    while True:
        ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
        if ignored is not None and int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        assert time.monotonic() < end
        time.sleep(0.01)


def test_closing_does_not_wait_for_a_worker_that_hangs(packed: Samples, tmp_path: Path) -> None:
    """For instance because its disk does not answer."""

    class Slow:
        labels = packed.labels

        def __len__(self) -> int:
            return len(packed)

        def load(self, i: int) -> Image.Image:
            if i == 16:
                (tmp_path / "reached").touch()
                time.sleep(600)
            return packed.load(i)

        name, fingerprint = packed.name, packed.fingerprint

    stream = stream_pixels(Slow(), SETTINGS, torch.arange(90).split(16), 2)
    next(stream)
    while not (tmp_path / "reached").exists():
        time.sleep(0.01)
    stream.close()
    assert not active_children()


def test_workers_end_when_the_stream_is_closed(packed: Samples) -> None:
    stream = stream_pixels(packed, SETTINGS, torch.arange(90).split(30), 2)
    next(stream)
    assert active_children()
    stream.close()
    assert not active_children()


def test_a_split_of_many_images_holds_no_object_for_each() -> None:
    """At 8 bytes a number; a Python int, and the place in a tuple that points to it, would be 40."""
    count = 100_000
    table, shard = np.zeros((count, 5), np.int64), np.arange(count) // 1000
    table[:, 2] = np.arange(count) % 1000
    files = tuple(Path(f"{i}.tar") for i in range(100))
    chosen = list(range(0, count, 2))
    tracemalloc.start()
    whole = ShardedImages(files, shard, table, "")
    part = Subset(whole, chosen)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(part.labels[:3]) == [0, 2, 4]
    assert held < 8 * count + 20 * len(chosen)  # arrays grow by an eighth more than they need
