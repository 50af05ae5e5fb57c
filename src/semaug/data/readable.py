"""Which images of a data set can be read: found out before training starts, not in the middle of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from semaug.data.annotations import some
from semaug.data.images import (
    Preprocessing,
    ProgressCallback,
    Unreadable,
    cache_file,
    cannot_be_read,
    decode,
    decode_into_cache,
)
from semaug.data.samples import ImageFiles, Samples, Subset, subset
from semaug.data.shards import ShardedImages
from semaug.util.errors import SemaugError
from semaug.util.files import write_json

OnBadImage = Literal["stop", "skip"]


def readable_splits(
    splits: Mapping[str, Samples],
    classes: Sequence[str],
    preprocessing: Preprocessing,
    on_bad_image: OnBadImage = "stop",
    *,
    cache: Path | None = None,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    listing: Path | None = None,
    keep: bool = True,
) -> tuple[dict[str, Samples], str | None]:
    """The splits without the images that cannot be read, and a sentence about these; None if there are none.

    With "stop" such images are a :class:`SemaugError`, and with "skip" they are where a class loses all of its training
    images or a split all it has. All of them are listed in the file `listing`. What is decoded is kept in the cache
    for training, except for the test split, and unless `keep` is False.
    """
    parts = _distinct(splits.values())
    total, done = sum(map(len, parts)), 0
    faults: dict[int, Unreadable] = {}
    for samples in parts:

        def advance(here: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + here, total)

        kept = keep and any(part is samples for split, part in splits.items() if split != "test")
        faults[id(samples)] = _unreadable(samples, preprocessing, cache, kept, workers, advance)
        done += len(samples)
    names = [(samples.name(i), why) for samples in parts for i, why in faults[id(samples)].items()]
    if listing is not None:
        _write_listing(listing, names)
    if not names:
        return dict(splits), None
    sentence = cannot_be_read(names, total) + (f", all listed in {listing}" if listing is not None else "")
    if on_bad_image == "stop":
        raise SemaugError(f"{sentence}; repair or remove them, or go on without them by --on-bad-image skip")
    left = {split: _without(samples, faults[id(samples)]) for split, samples in splits.items()}
    _check_left(splits, left, classes, sentence)
    return left, f"{sentence}; going on without them"


def _distinct(splits: Iterable[Samples]) -> list[Samples]:
    """Every split once: "val" may be the same as "test"."""
    return list({id(samples): samples for samples in splits}.values())


def _unreadable(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path | None,
    keep: bool,
    workers: int,
    progress: ProgressCallback,
) -> Unreadable:
    """The images that cannot be read; pixels are kept in the cache if asked for, and otherwise that all were looked at.

    What the cache knows to be unreadable is looked at again, as it may have been the fault of a disk or of permissions.
    """
    if not _are_files(samples):
        return {}
    if cache is None:
        return decode(samples, preprocessing, workers, progress)
    file = cache_file(samples, preprocessing, cache)
    if file.exists():
        return {}
    known = file.with_suffix(".unreadable.json")
    if known.is_file():
        before = json.loads(known.read_bytes())
        return {before[i]: why for i, why in decode(subset(samples, before), preprocessing).items()}
    if keep:
        unreadable = decode_into_cache(samples, preprocessing, cache, workers, progress)
    else:
        unreadable = decode(samples, preprocessing, workers, progress)
    if unreadable or not keep:
        write_json(known, list(unreadable))
    return unreadable


def _are_files(samples: Samples) -> bool:
    while isinstance(samples, Subset):
        samples = samples.whole
    return isinstance(samples, ImageFiles | ShardedImages)


def _without(samples: Samples, unreadable: Unreadable) -> Samples:
    return subset(samples, [i for i in range(len(samples)) if i not in unreadable]) if unreadable else samples


def _check_left(
    before: Mapping[str, Samples], left: Mapping[str, Samples], classes: Sequence[str], sentence: str
) -> None:
    empty = [split for split, samples in left.items() if not len(samples)]
    if empty:
        raise SemaugError(f"no image of the split {empty[0]} can be read: {sentence}")
    lost = sorted(set(before["train"].labels) - set(left["train"].labels)) if "train" in left else []
    if lost:
        names = some(classes[label] for label in lost)
        raise SemaugError(f"no training image can be read of {names}; repair or remove these classes: {sentence}")


def _write_listing(file: Path, names: Sequence[tuple[str, str]]) -> None:
    if names:
        write_json(file, [{"image": name, "reason": why} for name, why in names])
    else:
        file.unlink(missing_ok=True)
