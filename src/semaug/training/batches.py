"""Batches of training images: which images a step gets, how they are cropped and transformed, and their pixels.

All random numbers of an epoch follow from its seed. They are drawn for the batches of all ranks, before any image is
read, so they depend neither on the number of ranks nor on where images are decoded, and an epoch can be resumed at any
step.
"""

import math
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import tee
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semaug.data.augmentation import ImageTransforms, OnBatch
from semaug.data.images import Preprocessing, to_device
from semaug.data.samples import Samples
from semaug.data.stream import shards_of, stream_pixels, streaming_order
from semaug.training.settings import TrainConfig, required
from semaug.training.state import EpochState
from semaug.util import distributed
from semaug.util.devices import stream_for
from semaug.util.errors import SettingError

Batch = TypeVar("Batch")
Images = Tensor | Samples
"""Images of a split: decoded pixels, uint8 (N, resize, resize, 3), or the samples themselves, decoded when needed."""


@dataclass
class PixelLoader:
    """Loads pixels onto a device."""

    preprocessing: Preprocessing
    device: torch.device
    workers: int  # processes that decode images ahead, if they are not decoded yet
    waited: float = 0.0  # seconds spent waiting for them

    def load(self, images: Images, batches: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """Yield the pixels, uint8 (N, resize, resize, 3), of several batches of indices into the images of a split."""
        if isinstance(images, Tensor):
            for indices in batches:
                yield self._resident(images, indices)
            return
        on_gpu = self.device.type == "cuda"
        with closing(stream_pixels(images, self.preprocessing, batches, self.workers, pinned=on_gpu)) as stream:
            while True:
                started = time.perf_counter()
                pixels = next(stream, None)
                self.waited += time.perf_counter() - started
                if pixels is None:
                    return
                yield pixels.to(self.device, non_blocking=on_gpu)

    def _resident(self, images: Tensor, indices: Tensor) -> Tensor:
        """Some of the decoded images of a split, on the device."""
        if images.is_cuda or self.device.type == "cpu":
            return images[to_device(indices, images.device)]
        pinned = torch.empty(len(indices), *images.shape[1:], dtype=images.dtype, pin_memory=True)
        return torch.index_select(images, 0, indices, out=pinned).to(self.device, non_blocking=True)


def prefetched(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Prepare batches, trees of tensors, one ahead on a stream of their own; on a CPU they are yielded as they come."""
    if device.type != "cuda":
        yield from batches
        return
    stream = stream_for("batches", device)

    def prepare() -> Batch | None:
        with torch.cuda.stream(stream):
            return next(batches, None)

    batch = prepare()
    while batch is not None:
        user = torch.cuda.current_stream(device)
        user.wait_stream(stream)
        for tensor in pytree.tree_leaves(batch):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(user)  # so that its memory is not reused for a batch while the user needs it
        ahead = prepare()
        yield batch
        batch = ahead


@dataclass(frozen=True)
class _Plan:
    """The random draws of a step, for the batch of all ranks."""

    indices: Tensor  # of its images in the training split
    rows: Tensor  # of the batch, that this rank trains on
    needed: Tensor  # rows that it loads: where images are mixed, those with their partners
    boxes: Tensor  # of the crops
    flipped: Tensor
    seed: int  # of further transforms
    generator: Tensor  # its state after these draws


class Batches:
    """The training images in batches of two halves, in a new order in every epoch; of each batch this rank's rows.

    Args:
        images: Images of the training split.
        samples: The training split, for its labels and shards.
        transforms: Transforms of the method, in addition to cropping and flipping.
        config: Resolved settings of the run.
        loader: Loads pixels.

    Raises:
        SettingError: If a half batch has fewer images than there are ranks.
    """

    def __init__(
        self, images: Images, samples: Samples, transforms: ImageTransforms, config: TrainConfig, loader: PixelLoader
    ) -> None:
        self._images, self._transforms, self._seed, self._loader = images, transforms, config.seed, loader
        self._preprocessing, self._shards = loader.preprocessing, shards_of(samples)
        labels = torch.from_numpy(np.array(samples.labels, dtype=np.int64))
        self._labels = labels.to(loader.device)
        self._chances: Tensor | None = None  # summed up over the images; None: each image is drawn once
        if config.sampler != "shuffle":
            if self._shards is not None and not isinstance(images, Tensor):
                raise SettingError(
                    f"`sampler` {config.sampler} draws images in any order, and streamed shards are read one after the "
                    "other; use `class_weights` instead, or another `images_on`",
                    on_all_ranks=True,
                )
            self._chances = class_weights(labels.bincount(), config.sampler)[labels].cumsum(0)
        self.images = len(samples)
        batch = 2 * required(config.batch_size)
        self.steps = min(math.ceil(self.images / batch), self.images // 2)  # so that each half has an image
        half, ranks = self.images // self.steps // 2, distributed.world_size()
        if half < ranks:
            raise SettingError(
                f"halves of {half} images are too small for {ranks} processes, each of which needs one; give a larger "
                "`batch_size`, or start fewer processes",
                on_all_ranks=True,
            )

    @contextmanager
    def remaining(self, epoch: int, state: EpochState) -> Iterator[Iterator[tuple[Tensor, Tensor, Tensor]]]:
        """Iterate over the remaining steps: images, labels, and the state of the random generator after the step.

        `epoch` is the number of completed epochs, and `state` the progress within the next one.
        """
        plans, ahead = tee(self._plans(epoch, state))
        needed = (plan.indices[plan.needed] for plan in ahead)
        with closing(self._loader.load(self._images, needed)) as pixels:
            inputs = ((*self._inputs(plan, next(pixels)), plan.generator) for plan in plans)
            yield prefetched(inputs, self._loader.device)

    def _plans(self, epoch: int, state: EpochState) -> Iterator[_Plan]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        if self._chances is not None:  # what torch's WeightedRandomSampler draws, for any number of images
            chances = torch.rand(self.images, dtype=torch.float64, generator=generator) * self._chances[-1]
            order = torch.searchsorted(self._chances, chances)
        elif self._shards is None:
            order = torch.randperm(self.images, generator=generator)
        else:
            order = streaming_order(self._shards, generator)
        if state.generator is not None:
            generator.set_state(state.generator)
        for indices in order.tensor_split(self.steps)[state.step :]:
            total = len(indices)
            rows = distributed.shard(torch.arange(total))
            needed = rows if self._transforms.on_batch is None else torch.cat(_with_partners(rows, total))
            boxes, flipped = self._preprocessing.draw_crops(total, generator)
            seed = 0 if self._transforms.is_plain else int(torch.randint(2**62, (), generator=generator))
            yield _Plan(indices, rows, needed, boxes, flipped, seed, generator.get_state())

    def _inputs(self, plan: _Plan, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of this rank's rows."""
        transforms, total, needed = self._transforms, len(plan.indices), plan.needed
        crops = self._preprocessing.cropped(pixels, plan.boxes[:, needed], plan.flipped[needed])
        labels = self._labels[to_device(plan.indices[needed], self._labels.device)]
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(plan.seed)
            if transforms.on_crops is not None:
                crops = transforms.on_crops(crops, needed, total)
            images = self._preprocessing.normalised(crops)
            if transforms.on_images is not None:
                images = transforms.on_images(images, needed, total)
            if transforms.on_batch is not None:
                images, labels = self._mixed(transforms.on_batch, images, labels, plan)
        return images, labels

    def _mixed(self, mix: OnBatch, images: Tensor, labels: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        """Mix each image with the one before it in the batch of all ranks, with the same draws for all."""
        sizes = [len(part) for part in _with_partners(plan.rows, len(plan.indices))]
        mixed = []
        for some_images, some_labels in zip(images.split(sizes), labels.split(sizes), strict=True):
            torch.default_generator.manual_seed(plan.seed)
            mixed.append([part[1:] for part in mix(some_images, some_labels)])  # the first is a partner only
        first, second = zip(*mixed, strict=True)
        return torch.cat(first), torch.cat(second)


def class_weights(images: Tensor, balance: str) -> Tensor:
    """Weights (C,) of classes with n images each, in fp64; their mean over all images is 1.

    They are proportional to 1/n for ``"balanced"``, as in scikit-learn, or to 1/√n for ``"square-root"``.
    """
    counts = images.double()
    weights = counts.clamp_min(1) ** {"balanced": -1.0, "square-root": -0.5}[balance]
    return weights * (counts.sum() / (counts * weights).sum())


def _with_partners(rows: Tensor, total: int) -> list[Tensor]:
    """A rank's rows of the first and of the second half of a batch, each preceded by the row before them."""
    first = rows < math.ceil(total / 2)
    return [torch.cat([(part[:1] - 1) % total, part]) for part in (rows[first], rows[~first])]
