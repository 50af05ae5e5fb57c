"""What each step of training is made on: which images, how they are cropped and changed, and where they come from.

All that is random is drawn from the seed of the epoch, for the batches of all ranks, before images are looked at: so it
depends neither on the number of ranks nor on whether images are decoded already, and any step of an epoch can be taken
up again.
"""

import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semaug.data.augmentation import ImageTransforms, OnBatch
from semaug.data.images import Preprocessing
from semaug.data.samples import Samples
from semaug.data.stream import shards_of, stream_pixels, streaming_order
from semaug.training.settings import TrainConfig, given
from semaug.util import distributed
from semaug.util.errors import SemaugError

Inputs = tuple[tuple[Tensor, ...], Tensor]
"""What a step takes (images, labels and, where the meta loss has its own, those), and the generator's state after."""


class Pixels:
    """Pixels of images on a device: of decoded images, or decoded just ahead of who asks for them."""

    def __init__(self, preprocessing: Preprocessing, device: torch.device, workers: int) -> None:
        self.preprocessing, self.device, self.workers = preprocessing, device, workers
        self.waited = 0.0  # seconds, for images that were not yet decoded

    def of(self, images: Tensor | Samples, parts: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """For each part of a split, given as the places of its images, their pixels."""
        if isinstance(images, Tensor):
            for part in parts:
                yield images[part.to(images.device)].to(self.device)
            return
        on_gpu = self.device.type == "cuda"
        with closing(stream_pixels(images, self.preprocessing, parts, self.workers, pinned=on_gpu)) as found:
            while True:
                started = time.perf_counter()
                pixels = next(found, None)
                self.waited += time.perf_counter() - started
                if pixels is None:
                    return
                yield pixels.to(self.device, non_blocking=on_gpu)


@dataclass(frozen=True)
class Part:
    """Images of a batch of all ranks, by their places in the training split, and how they are cropped."""

    places: Tensor
    rows: Tensor  # those that this rank needs
    corners: Tensor
    flipped: Tensor


@dataclass(frozen=True)
class Plan:
    """What is drawn for a step: the batch and, where it is held out, that of the meta loss."""

    part: Part
    rows: Tensor  # this rank's, of the batch of all ranks
    seed: int  # of what changes images by more than crop and flip
    after: Tensor  # the state of the generator


class Batches:
    """The training images in batches of two halves, in another order in every epoch; of each batch this rank's part."""

    def __init__(
        self,
        source: Tensor | Samples,
        samples: Samples,
        transforms: ImageTransforms,
        config: TrainConfig,
        pixels: Pixels,
    ) -> None:
        """`source` are the decoded pixels of all `samples`, or these themselves where nothing is decoded yet."""
        self.source, self.transforms, self.config, self.pixels = source, transforms, config, pixels
        self.preprocessing = pixels.preprocessing
        self.labels = as_tensor(samples.labels).to(pixels.device)
        self.shards = shards_of(samples)
        smallest = self.images // self.steps
        if smallest // 2 < distributed.world_size():
            raise SemaugError(
                f"halves of {smallest // 2} images are too small for {distributed.world_size()} processes, each of "
                "which needs one; give a larger --batch-size, or start fewer"
            )

    @property
    def images(self) -> int:
        """How many images an epoch has."""
        return len(self.labels)

    @property
    def steps(self) -> int:
        """How many batches an epoch has: none has a single image, which cannot be cut in two halves."""
        return min(math.ceil(self.images / (2 * given(self.config.batch_size))), self.images // 2)

    @contextmanager
    def left(self, epoch: int, within: dict[str, Any]) -> Iterator[Iterator[Inputs]]:
        """For each step that is left of an epoch its inputs, and the state of the generator after them.

        `within` says how many steps were made (`step`) and, if any, the state of the generator then (`generator`).
        """
        plans, ahead = tee(self._plans(epoch, within))
        places = (plan.part.places[plan.part.rows] for plan in ahead)
        with closing(self.pixels.of(self.source, places)) as pixels:
            yield ((self._inputs(plan, pixels), plan.after) for plan in plans)

    def _plans(self, epoch: int, within: dict[str, Any]) -> Iterator[Plan]:
        """What is drawn for each step that is left of an epoch, from the seed alone."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        if self.shards is None:
            order = torch.randperm(self.images, generator=generator)
        else:
            order = streaming_order(self.shards, generator)
        if "generator" in within:
            generator.set_state(within["generator"])
        for batch in order.tensor_split(self.steps)[within["step"] :]:
            yield self._plan(batch, generator)

    def _plan(self, places: Tensor, generator: torch.Generator) -> Plan:
        """Random numbers are drawn for the whole batch, of all ranks, whatever this rank needs of it."""
        rows = distributed.shard(torch.arange(len(places)))
        needed = rows if self.transforms.on_batch is None else torch.cat(_with_partners(rows, len(places)))
        draw = self.preprocessing.draw_crops
        part = Part(places, needed, *draw(len(places), generator))
        seed = 0 if self.transforms.is_plain else int(torch.randint(2**62, (), generator=generator))
        return Plan(part, rows, seed, generator.get_state())

    def _inputs(self, plan: Plan, pixels: Iterator[Tensor]) -> tuple[Tensor, ...]:
        """Images and labels of a batch and, where the meta loss has a batch of its own, that of the meta loss.

        What is made, and returned, is this rank's part.
        """
        transforms, total = self.transforms, len(plan.part.places)
        crops, targets = self._crops(plan.part, next(pixels))
        with _drawing_from(plan.seed):
            if transforms.on_crops is not None:
                crops = transforms.on_crops(crops, plan.rows, total)
            images = self.preprocessing.normalised(crops)
            if transforms.on_images is not None:
                images = transforms.on_images(images, plan.rows, total)
            if transforms.on_batch is not None:
                images, targets = self._mixed(transforms.on_batch, images, targets, plan)
        return images, targets

    def _mixed(self, mix: OnBatch, images: Tensor, targets: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Each image mixed with the one before it in the batch of all ranks, in the same way for all."""
        sizes = [len(part) for part in _with_partners(plan.rows, len(plan.part.places))]
        found = []
        for some, labels in zip(images.split(sizes), targets.split(sizes), strict=True):
            torch.default_generator.manual_seed(plan.seed)
            found.append([part[1:] for part in mix(some, labels)])  # the first has not met its own partner
        first, second = zip(*found, strict=True)
        return torch.cat(first), torch.cat(second)

    def _crops(self, part: Part, pixels: Tensor) -> tuple[Tensor, Tensor]:
        crops = self.preprocessing.cropped(pixels, part.corners[:, part.rows], part.flipped[part.rows])
        return crops, self.labels[part.places[part.rows].to(self.labels.device)]


def as_tensor(labels: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(labels, dtype=np.int64))


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Inside, the CPU's random numbers follow from the seed alone, whatever has been drawn before."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _with_partners(rows: Tensor, total: int) -> list[Tensor]:
    """A rank's rows of the first and of the second half of a batch, each with the row before them at the front."""
    first = rows < math.ceil(total / 2)
    return [torch.cat([(part[:1] - 1) % total, part]) for part in (rows[first], rows[~first])]
