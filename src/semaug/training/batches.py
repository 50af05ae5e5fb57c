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

from semaug.data.augmentation import rand_augment
from semaug.data.images import Preprocessing
from semaug.data.samples import Samples
from semaug.data.stream import shards_of, stream_pixels, streaming_order
from semaug.training.methods import Batch, Transforms
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

    parts: list[Part]
    rows: Tensor  # this rank's, of the batch of all ranks
    meta_rows: Tensor
    seed: int  # of what changes images by more than crop and flip
    after: Tensor  # the state of the generator


class Batches:
    """The training images in batches of two halves, in another order in every epoch; of each batch this rank's part."""

    def __init__(
        self,
        source: Tensor | Samples,
        samples: Samples,
        transforms: Transforms,
        config: TrainConfig,
        pixels: Pixels,
    ) -> None:
        """`source` are the decoded pixels of all `samples`, or these themselves where nothing is decoded yet."""
        self.source, self.transforms, self.config, self.pixels = source, transforms, config, pixels
        self.preprocessing = pixels.preprocessing
        self.labels = as_tensor(samples.labels).to(pixels.device)
        learnable = config.method.removeprefix("p2p+") == "learnable"
        self.meta_images = config.augmentation.meta_images if learnable else "half"
        self.trained, self.held_out = self._for_training(samples.labels)
        shards = shards_of(samples)
        self.shards = None if shards is None else shards[self.trained]
        smallest = self.images // self.steps
        if smallest // 2 < distributed.world_size():
            raise SemaugError(
                f"halves of {smallest // 2} images are too small for {distributed.world_size()} processes, each of "
                "which needs one; give a larger --batch-size, or start fewer"
            )

    @property
    def images(self) -> int:
        """How many images an epoch has."""
        return len(self.trained)

    @property
    def steps(self) -> int:
        """How many batches an epoch has: none has a single image, which cannot be cut in two halves."""
        return min(math.ceil(self.images / (2 * given(self.config.batch_size))), self.images // 2)

    def _for_training(self, labels: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The images that the network is trained on, and those of each class held out for the meta loss."""
        if self.meta_images != "held-out":
            return torch.arange(len(labels)), torch.empty(0, dtype=torch.long)
        share = self.config.augmentation.meta_share
        if not 0 < share < 1:
            raise SemaugError(f"--meta-share must lie between 0 and 1, not {share:g}")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.config.seed)).tolist()
        by_class: dict[int, list[int]] = {}
        for i in order:
            by_class.setdefault(labels[i], []).append(i)
        counts = {label: max(1, round(share * len(members))) for label, members in by_class.items()}
        if any(counts[label] >= len(members) for label, members in by_class.items()):
            raise SemaugError(
                "a class has too few images to hold some out for the meta loss; give a smaller --meta-share"
            )
        held_out = sorted(i for label, members in by_class.items() for i in members[: counts[label]])
        kept = sorted(i for label, members in by_class.items() for i in members[counts[label] :])
        return torch.tensor(kept), torch.tensor(held_out)

    @contextmanager
    def left(self, epoch: int, within: dict[str, Any]) -> Iterator[Iterator[Inputs]]:
        """For each step that is left of an epoch its inputs, and the state of the generator after them.

        `within` says how many steps were made (`step`) and, if any, the state of the generator then (`generator`).
        """
        plans, ahead = tee(self._plans(epoch, within))
        places = (part.places[part.rows] for plan in ahead for part in plan.parts)
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
            yield self._plan(self.trained[batch], generator)

    def _plan(self, places: Tensor, generator: torch.Generator) -> Plan:
        """Random numbers are drawn for the whole batch, of all ranks, whatever this rank needs of it."""
        every = torch.arange(len(places))
        rows, meta_rows = (distributed.shard(every, meta=meta) for meta in (False, True))
        needed = rows if self.transforms[2] is None else torch.cat(_with_partners(rows, len(places)))
        draw = self.preprocessing.draw_crops
        parts = [Part(places, needed, *draw(len(places), generator))]
        plain = self.meta_images != "randaugment" and self.transforms == (None, None, None)
        seed = 0 if plain else int(torch.randint(2**62, (), generator=generator))
        if self.meta_images == "held-out":
            drawn = self.held_out[torch.randint(len(self.held_out), places.shape, generator=generator)]
            parts.append(Part(drawn, meta_rows, *draw(len(places), generator)))
        return Plan(parts, rows, meta_rows, seed, generator.get_state())

    def _inputs(self, plan: Plan, pixels: Iterator[Tensor]) -> tuple[Tensor, ...]:
        """Images and labels of a batch and, where the meta loss has a batch of its own, that of the meta loss.

        What is made, and returned, is this rank's part.
        """
        on_crops, on_images, on_batch = self.transforms
        total = len(plan.parts[0].places)
        crops, targets = self._crops(plan.parts[0], next(pixels))
        with _drawing_from(plan.seed):
            images = self.preprocessing.normalised(crops if on_crops is None else on_crops(crops, plan.rows, total))
            if on_images is not None:
                images = on_images(images, plan.rows, total)
            if on_batch is not None:
                images, targets = self._mixed(on_batch, images, targets, plan)
            if self.meta_images == "randaugment":  # the halves change places, and look otherwise
                own = int((plan.rows < math.ceil(total / 2)).sum())  # of the first half
                crops, meta_targets = (torch.cat([part[own:], part[:own]]) for part in (crops, targets))
                meta_crops = rand_augment(crops, plan.meta_rows, total)
        if self.meta_images == "half":
            return images, targets
        if self.meta_images == "held-out":
            meta_crops, meta_targets = self._crops(plan.parts[1], next(pixels))
        return images, targets, self.preprocessing.normalised(meta_crops), meta_targets

    def _mixed(self, mix: Batch, images: Tensor, targets: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Each image mixed with the one before it in the batch of all ranks, in the same way for all."""
        sizes = [len(part) for part in _with_partners(plan.rows, len(plan.parts[0].places))]
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
