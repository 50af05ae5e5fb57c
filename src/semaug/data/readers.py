"""Data sets by name or path, and the choice of validation images."""

import hashlib
import os
import warnings
from pathlib import Path

import numpy as np

from semaug.data.downloads import fetch
from semaug.data.layouts import LAYOUTS, Layout, with_left_out
from semaug.data.samples import DataSet, Samples, Subset, embedded_birds, ignored_files
from semaug.data.shards import holds_shards, read_shards
from semaug.util import distributed
from semaug.util.errors import DataError, FileError, SettingError
from semaug.util.names import shown
from semaug.util.progress import ProgressCallback

KNOWN = {layout.name: layout for layout in LAYOUTS if layout.folders}
"""The named data sets except "birds"."""


def read_data(
    data: str, root: Path | None = None, *, download: bool = False, progress: ProgressCallback | None = None
) -> DataSet:
    """Read a data set by its name or path.

    Args:
        data: "birds", a name in `KNOWN`, or the path of a folder or table, whose layout is recognised by its content.
        root: Folder of the named data sets; by default the environment variable SEMAUG_DATA, or else "data".
        download: Whether to download a named data set that is missing, if its host offers it.
        progress: Called with the number of bytes downloaded and their total.

    Returns:
        The data set.

    Raises:
        DataError: There is no such data set, or it is damaged or incomplete.
    """
    if data == "birds":
        return embedded_birds()
    try:
        if data in KNOWN:
            return _read_named(KNOWN[data], data_root(root), download, progress)
        path = Path(os.path.expanduser(data))
        if not data or not os.path.exists(path):
            names = ", ".join(("birds", *KNOWN))
            raise DataError(f"{shown(data)} is neither an existing path nor the name of a data set ({names})")
        for layout in LAYOUTS:
            if layout.recognise(path):
                found = layout.read(path)
                return with_left_out(path, found) if layout.may_leave_out and path.is_dir() else found
    except FileError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        place = "" if error.filename is None else f" ({shown(str(error.filename))})"
        raise DataError(f"cannot read the data {shown(data)}: {error.strerror or error}{place}") from error
    raise DataError(f"{path} is neither a folder nor a table (.csv, .tsv or .parquet)")


def refuse_ambiguity(data: str, root: Path | None = None) -> None:
    """Raise an error if an argument is the name of a data set and also that of another folder.

    Args:
        data: Name of a data set, or a path; "./birds" is never a name.
        root: Folder of the named data sets, as in :func:`read_data`.

    Raises:
        DataError: A folder with the name of a data set exists.
    """
    if (data != "birds" and data not in KNOWN) or not os.path.isdir(data):
        return
    places = [data_root(root) / folder for folder in KNOWN[data].folders] if data in KNOWN else []
    if not any(place.is_dir() and place.samefile(data) for place in places):
        which = "the embedded drawings" if data == "birds" else "a data set"
        raise DataError(f"{data} is a folder here and the name of {which}; write ./{data} for the folder, or rename it")


def data_root(root: Path | None) -> Path:
    """The folder of the named data sets: `root`, the environment variable SEMAUG_DATA, or "data"."""
    return root or Path(os.environ.get("SEMAUG_DATA") or "data")


def _read_named(layout: Layout, root: Path, download: bool, progress: ProgressCallback | None) -> DataSet:
    folders = [root / folder for folder in layout.folders]
    for folder in folders:
        if folder != root and holds_shards(folder):
            return read_shards(folder)
        if layout.recognise(folder):
            return layout.read(folder)
    for folder in folders:
        if folder.is_dir() and folder != root:  # not recognised: reading it reports what is missing
            return layout.read(folder)
    if download and layout.archive is not None:
        fetch(layout.archive, root, progress)
        return layout.read(folders[0])
    raise DataError(f"the folder {root} has no {layout.name}: download {layout.source} and unpack it as {folders[0]}")


def training_splits(
    data: DataSet, select: str = "val", val_per_class: int | None = None, val_fraction: float = 0.1, seed: int = 0
) -> dict[str, Samples]:
    """The splits as a training run sees them.

    Args:
        data: The data set.
        select: How the epoch to keep is chosen: "val", "test" or "last". Unless it is chosen on "val", all training
            images are trained on, and "val" is the test split.
        val_per_class: Validation images of each class, if the data set has no validation split.
        val_fraction: Their share of the training images instead, if `val_per_class` is None.
        seed: Seed of their choice.

    Returns:
        "train", "val" and, if the data set has one, "test".

    Raises:
        SettingError: There is no test split where `select` needs one, or a number is out of range.
        DataError: No image is left to validate on.
    """
    if data.ignored and distributed.is_rank_zero():
        warnings.warn(f"semaug: {data.name}: {ignored_files(data.ignored)}", stacklevel=2)
    splits = dict(data.splits)
    if select != "val":
        if "test" not in splits:
            raise SettingError(f"{data.name} has no test split, which `select` {select} needs")
        return {"train": splits["train"], "val": splits["test"], "test": splits["test"]}
    if "val" not in splits:
        splits["train"], splits["val"] = split_validation(splits["train"], val_per_class, val_fraction, seed)
        if not len(splits["val"]):
            reason = "`val_per_class` is 0" if val_per_class == 0 else "no class has two training images"
            otherwise = "; `select` last needs none" if "test" in splits else ""
            raise DataError(f"{data.name} leaves no images to validate on: {reason}{otherwise}")
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}


def split_validation(samples: Samples, per_class: int | None, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Divide images into training and validation images.

    Images are chosen by a hash of name and seed, so the choice is the same on every machine, and an added image changes
    the place of few others. A class keeps at least one training image; with a `fraction` above 0 it gives at least one
    validation image if it has two.

    Args:
        samples: The images.
        per_class: Validation images of each class.
        fraction: Their share of each class instead, if `per_class` is None; from 0, below 1.
        seed: Seed of the choice.

    Returns:
        Training and validation images.

    Raises:
        SettingError: A number is out of range.
    """
    if per_class is not None and per_class < 0:
        raise SettingError(f"`val_per_class` is the number of validation images, so it must not be {per_class}")
    if per_class is None and not 0 <= fraction < 1:
        raise SettingError(f"`val_fraction`, of validation images, must be at least 0 and below 1, not {fraction}")

    def digest(i: int) -> bytes:
        return hashlib.sha256(f"{seed}\0{samples.name(i).replace(os.sep, '/')}".encode()).digest()

    # in order, as the names of shards are read from disk
    digests = np.fromiter(map(digest, range(len(samples))), dtype="S32", count=len(samples))
    labels = np.array(samples.labels, dtype=np.int64)
    validation = np.zeros(len(samples), dtype=bool)
    by_class = labels.argsort(kind="stable")
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        if per_class is not None:
            wanted = per_class
        else:
            wanted = max(int(fraction * len(members) + 0.5), 1 if fraction > 0 else 0)
        ordered = members[digests[members].argsort(kind="stable")]
        validation[ordered[: max(0, min(wanted, len(members) - 1))]] = True
    training, held_out = (np.flatnonzero(part).tolist() for part in (~validation, validation))
    return Subset(samples, training), Subset(samples, held_out)
