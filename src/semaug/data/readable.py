"""Check before training which images can be read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from semaug.data.cache import cache_file, decode_into_cache
from semaug.data.images import Preprocessing, Unreadable, decode, unreadable_images
from semaug.data.samples import ImageFiles, Samples, Subset
from semaug.data.shards import ShardedImages
from semaug.util.errors import DataError, FileError
from semaug.util.files import write_json
from semaug.util.names import some
from semaug.util.progress import ProgressCallback
from semaug.util.untrusted import read_json

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
    """Decode all images, and leave out those that cannot be read.

    Args:
        splits: The splits; two of them may be the same.
        classes: Class names.
        preprocessing: How images are resized.
        on_bad_image: "stop" raises an error if any image cannot be read.
        cache: Folder for decoded images and the results of the check.
        workers: Number of processes that decode; 0 decodes in this one.
        progress: Called with the number of images done and their total.
        listing: File for a list of all images that cannot be read.
        keep: Whether to cache the decoded images, except those of the test split.

    Returns:
        The splits without those images, and a sentence about them, or None if there are none.

    Raises:
        DataError: Images cannot be read and `on_bad_image` is "stop", or a class has no training image left, or a split
            no image.
    """
    distinct = list({id(samples): samples for samples in splits.values()}.values())
    total, done = sum(map(len, distinct)), 0
    faults: dict[int, Unreadable] = {}
    for samples in distinct:

        def advance(here: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + here, total)

        is_trained_on = any(part is samples for split, part in splits.items() if split != "test")
        faults[id(samples)] = _unreadable(samples, preprocessing, cache, keep and is_trained_on, workers, advance)
        done += len(samples)
    names = [(samples.name(i), reason) for samples in distinct for i, reason in faults[id(samples)].items()]
    if listing is not None and names:
        write_json(listing, [{"image": name, "reason": reason} for name, reason in names])
    elif listing is not None:
        listing.unlink(missing_ok=True)
    if not names:
        return dict(splits), None
    message = unreadable_images(names, total) + (f", all listed in {listing}" if listing is not None else "")
    if on_bad_image == "stop":
        raise DataError(f"{message}; repair or remove them, or set `on_bad_image` to skip to continue without them")
    left = {
        split: Subset(samples, [i for i in range(len(samples)) if i not in faults[id(samples)]])
        if faults[id(samples)]
        else samples
        for split, samples in splits.items()
    }
    for split, samples in left.items():
        if not len(samples):
            raise DataError(f"no image of the split {split} can be read: {message}")
    lost = set(splits["train"].labels) - set(left["train"].labels) if "train" in splits else set()
    if lost:
        lost_classes = some(classes[label] for label in sorted(lost))
        raise DataError(f"no training image can be read of {lost_classes}; repair or remove these classes: {message}")
    return left, f"{message}; continuing without them"


def _unreadable(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path | None,
    keep: bool,
    workers: int,
    progress: ProgressCallback,
) -> Unreadable:
    """The images that cannot be read.

    The cache records them, or the pixels. Images recorded as unreadable are tried again, as the disk or permissions may
    have been at fault.
    """
    whole = samples
    while isinstance(whole, Subset):
        whole = whole.whole
    if not isinstance(whole, ImageFiles | ShardedImages):  # images that are drawn
        return {}
    if cache is None:
        return decode(samples, preprocessing, workers, progress)
    file = cache_file(samples, preprocessing, cache)
    if file.exists():
        return {}
    record = file.with_suffix(".unreadable.json")
    if record.is_file():
        before = read_json(record, list[int])
        if not all(0 <= i < len(samples) for i in before):
            raise FileError(f"{record} is damaged; remove it")
        return {before[i]: reason for i, reason in decode(Subset(samples, before), preprocessing).items()}
    if keep:
        unreadable = decode_into_cache(samples, preprocessing, cache, workers, progress)
    else:
        unreadable = decode(samples, preprocessing, workers, progress)
    if unreadable or not keep:
        write_json(record, list(unreadable))
    return unreadable
