"""Data sets from disk, in the layouts in which they are distributed.

Annotation files of downloaded sets are untrusted: whatever they hold, the outcome is a data set or a
:class:`SemaugError` of one sentence, and no image outside of the set's folder is ever named by them. (A user's own table
may name images anywhere.)
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semaug.data.annotations import (
    SPLIT_NAMES,
    Splits,
    data_set,
    inside,
    lines,
    listed_data_set,
    numbered,
    pairs,
    shown,
    whole_number,
)
from semaug.data.downloads import Archive, fetch
from semaug.data.matlab import read_variable
from semaug.data.samples import DataSet, Samples, embedded_birds, subset
from semaug.data.shards import holds_shards, read_shards
from semaug.data.tables import TABLE_SUFFIXES, read_table
from semaug.util.errors import SemaugError

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"))


def read_data(
    data: str,
    root: Path | None = None,
    *,
    download: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DataSet:
    """The data set of a name ("birds", or one of `KNOWN` below `root`) or at a path, recognised by its content.

    `root` is by default the environment variable SEMAUG_DATA, else the folder "data". With `download`, a named set that
    is absent is downloaded into `root` where its host offers it; `progress` is called with bytes done and their total.
    """
    if data == "birds":
        return embedded_birds()
    try:
        if data in KNOWN:
            root = root or Path(os.environ.get("SEMAUG_DATA") or "data")
            return _read_known(data, KNOWN[data], root, download, progress)
        path = Path(os.path.expanduser(data))
        if not data or not os.path.exists(path):
            names = ", ".join(("birds", *KNOWN))
            raise SemaugError(f"{shown(data)} is neither an existing path nor the name of a data set ({names})")
        if path.is_dir():
            if holds_shards(path):
                return read_shards(path)
            for known in KNOWN.values():
                if known.recognise(path):
                    return known.read(path)
            return read_folder(path)
        if path.suffix.lower() in TABLE_SUFFIXES:
            return read_table(path)
    except OSError as error:
        raise SemaugError(f"cannot read the data {shown(data)}: {error}") from error
    raise SemaugError(f"{path} is neither a folder nor a table ({', '.join(TABLE_SUFFIXES)})")


def training_splits(
    data: DataSet, select: str = "val", val_per_class: int | None = None, val_fraction: float = 0.1, seed: int = 0
) -> dict[str, Samples]:
    """The splits as a run with these settings sees them: with a validation split of the training images if need be."""
    splits = dict(data.splits)
    if select == "test":
        if "test" not in splits:
            raise SemaugError(f"{data.name} has no test split to select on")
        return {"train": splits["train"], "val": splits["test"], "test": splits["test"]}
    if "val" not in splits:
        splits["train"], splits["val"] = split_validation(splits["train"], val_per_class, val_fraction, seed)
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}


def split_validation(samples: Samples, per_class: int | None, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Training and validation images: of every class `per_class` images, or else a fraction, become validation.

    A class keeps at least one training image, and gives at least one for a fraction above 0 if it has two. The choice
    is by a hash of each image's name and the seed, so it is the same on every machine, and an image that is added
    changes the place of few others.
    """
    if per_class is not None and per_class < 0:
        raise SemaugError(f"the number of validation images per class must not be negative ({per_class})")
    if per_class is None and not 0 <= fraction < 1:
        raise SemaugError(f"the fraction of validation images must be at least 0 and below 1, not {fraction}")

    def digest(i: int) -> bytes:
        return hashlib.sha256(f"{seed}\0{samples.name(i).replace(os.sep, '/')}".encode()).digest()

    # one after the other, as names may lie far apart in shards
    digests = np.fromiter(map(digest, range(len(samples))), dtype="S32", count=len(samples))
    labels = np.array(samples.labels, dtype=np.int64)
    validation = np.zeros(len(samples), dtype=bool)
    by_class = labels.argsort(kind="stable")
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        if per_class is not None:
            wanted = per_class
        else:
            wanted = max(int(fraction * len(members) + 0.5), 1 if fraction > 0 else 0)
        drawn = members[digests[members].argsort(kind="stable")]
        validation[drawn[: max(0, min(wanted, len(members) - 1))]] = True
    training, held_out = (np.flatnonzero(part).tolist() for part in (~validation, validation))
    return subset(samples, training), subset(samples, held_out)


# --------------------------------------------------------------------------------------------------- image folders


def read_folder(folder: Path, name: str | None = None, roles: dict[str, str] = SPLIT_NAMES) -> DataSet:
    """A folder per class, below folders per split (`roles`: their names) or, without those, as "train" alone.

    Images may lie deeper inside of a class folder. Besides "train", folders that are no splits are ignored.
    """
    subfolders = _subfolders(folder)
    parts: dict[str, Path] = {}
    for part in subfolders:
        role = roles.get(part.name.lower())
        if role in parts:
            raise SemaugError(f"{folder} has both {parts[role].name} and {part.name}, which mean the same split")
        if role is not None:
            parts[role] = part
    # A class may be called "train" (next to "bus"); a split has folders inside.
    if "train" not in parts or not _subfolders(parts["train"]):
        if parts and len(parts) == len(subfolders):
            raise SemaugError(f"{folder} needs a folder train with one folder per class inside")
        parts = {"train": folder}
    images = {split: _images_by_class(part) for split, part in parts.items()}
    classes = sorted(set().union(*images.values()))
    index = {class_name: i for i, class_name in enumerate(classes)}
    splits = {
        split: [(file, index[class_name]) for class_name, files in by_class.items() for file in files]
        for split, by_class in images.items()
    }
    return data_set(name or folder.resolve().name, folder, classes, splits)


def _subfolders(folder: Path) -> list[Path]:
    folders = []
    for entry in os.scandir(folder):
        # A link to the folder itself or to one above it would hold every image once more.
        loop = entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(entry.path))
        if os.path.isdir(entry.path) and not entry.name.startswith((".", "__MACOSX")) and not loop:
            folders.append(folder / _utf8(entry.name))
    return sorted(folders)


def _images_by_class(folder: Path) -> dict[str, list[Path]]:
    by_class = {class_folder.name: _images_below(class_folder) for class_folder in _subfolders(folder)}
    if not by_class:
        empty = next(os.scandir(folder), None) is None
        raise SemaugError(f"{folder} is empty" if empty else f"{folder} has no folder per class with images inside")
    if not any(by_class.values()):
        suffixes = " ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        raise SemaugError(f"there are no images ({suffixes}) in the class folders of {folder}")
    return by_class


def _images_below(folder: Path) -> list[Path]:
    images, folders = [], [folder]
    while folders:
        current = folders.pop()
        for entry in os.scandir(current):
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(current / entry.name)
            elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:
                if not entry.is_file(follow_symlinks=False) and not os.path.isfile(entry.path):
                    raise SemaugError(f"{shown(entry.path)} is not a file or a link to one")
                images.append(current / _utf8(entry.name))
    return sorted(images)


def _utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SemaugError(f"the file name {os.fsencode(name)!r} is not UTF-8; rename the file") from error
    return name


# ---------------------------------------------------------------------------------- sets with their own annotations


def read_cub(folder: Path) -> DataSet:
    """CUB-200-2011; classes are called as in classes.txt, "001.Black_footed_Albatross"."""
    classes = numbered(folder / "classes.txt")
    return _read_image_list("cub", folder, classes, set(classes))


def read_nabirds(folder: Path) -> DataSet:
    """NABirds: of its 1,011 categories the 555 that have images are the classes, in the order of their numbers."""
    categories = numbered(folder / "classes.txt")
    labels = folder / "image_class_labels.txt"
    used = {whole_number(labels, line, text) for text, line in pairs(labels).values()} & set(categories)
    shared = {name for name, count in Counter(categories[category] for category in used).items() if count > 1}
    classes = {category: f"{name} [{category}]" if name in shared else name for category, name in categories.items()}
    return _read_image_list("nabirds", folder, classes, used)


def _read_image_list(name: str, folder: Path, names: dict[int, str], used: set[int]) -> DataSet:
    """CUB's and NABirds' files; the classes are the categories `used`, ordered by number."""
    images, labels, in_train = (
        pairs(folder / f"{table}.txt") for table in ("images", "image_class_labels", "train_test_split")
    )
    index = {category: i for i, category in enumerate(sorted(used))}
    for file_name, table in (("image_class_labels.txt", labels), ("train_test_split.txt", in_train)):
        if table.keys() != images.keys():
            image = min(table.keys() ^ images.keys())
            raise SemaugError(f"image {shown(image)} is in only one of images.txt and {file_name} in {folder}")
    splits: Splits = {"train": [], "test": []}
    for image, (path, line) in images.items():
        file = inside(folder / "images", path, f"{folder / 'images.txt'} line {line}")
        text, line = labels[image]
        category = whole_number(folder / "image_class_labels.txt", line, text)
        if category not in index:
            raise SemaugError(
                f"{folder / 'image_class_labels.txt'} line {line}: class {category} is not in classes.txt"
            )
        text, line = in_train[image]
        if text not in ("0", "1"):
            raise SemaugError(f"{folder / 'train_test_split.txt'} line {line}: {shown(text)} should be 0 or 1")
        splits["train" if text == "1" else "test"].append((file, index[category]))
    return listed_data_set(name, folder, [names[category] for category in sorted(used)], splits)


def read_aircraft(folder: Path) -> DataSet:
    """FGVC-Aircraft by variant; "train" is its train and val together, as in the literature.

    The images keep the banner of 20 pixels with the photographer's name at their bottom.
    """
    base = folder / "data" if (folder / "data").is_dir() else folder
    classes = [text for _, text in lines(base / "variants.txt")]
    index = {variant: i for i, variant in enumerate(classes)}
    both = ["trainval"] if (base / "images_variant_trainval.txt").is_file() else ["train", "val"]
    splits: Splits = {"train": [], "test": []}
    for split, lists in (("train", both), ("test", ["test"])):
        for path in (base / f"images_variant_{part}.txt" for part in lists):
            for image, (variant, line) in pairs(path).items():
                if variant not in index:
                    raise SemaugError(f"{path} line {line}: the variant {shown(variant)} is not in variants.txt")
                file = inside(base / "images", f"{image}.jpg", f"{path} line {line}")
                splits[split].append((file, index[variant]))
    return listed_data_set("aircraft", folder, classes, splits)


def read_cars(folder: Path) -> DataSet:
    """Stanford Cars: the devkit's files, the single cars_annos.mat, or folders train/CLASS and test/CLASS."""
    single = folder / "cars_annos.mat"
    devkit = folder / "devkit" if (folder / "devkit").is_dir() else folder
    splits: Splits = {"train": [], "test": []}
    if single.is_file():
        classes = _class_names(single)
        for path, label, test in _annotations(single, "relative_im_path", "class", "test"):
            file = inside(folder, str(path), str(single))
            splits["test" if test == [1] else "train"].append((file, _label(single, label, classes)))
    elif any(devkit.glob("cars_*.mat")):
        classes = _class_names(devkit / "cars_meta.mat")
        test_labels = folder / "cars_test_annos_withlabels.mat"
        if not test_labels.is_file():
            test_labels = devkit / test_labels.name
        for split, annotations in (("train", devkit / "cars_train_annos.mat"), ("test", test_labels)):
            images = folder / f"cars_{split}"
            # one of the archives in circulation holds the folder twice
            images = images / images.name if (images / images.name).is_dir() else images
            for path, label in _annotations(annotations, "fname", "class"):
                file = inside(images, str(path), str(annotations))
                splits[split].append((file, _label(annotations, label, classes)))
    elif (folder / "train").is_dir():
        return read_folder(folder, "cars")
    else:
        raise SemaugError(f"{folder} has neither cars_annos.mat nor a folder devkit or train")
    return listed_data_set("cars", folder, classes, splits)


def _class_names(path: Path) -> list[str]:
    return [str(name) for name in read_variable(path, "class_names")]


def _annotations(path: Path, *fields: str) -> Iterator[tuple[Any, ...]]:
    for annotation in read_variable(path, "annotations"):
        for field in fields:
            if not isinstance(annotation, dict) or field not in annotation:
                # as in cars_test_annos.mat, which lacks the labels
                raise SemaugError(f"the annotations in {path} have no field {field}")
        yield tuple(annotation[field] for field in fields)


def _label(path: Path, label: Any, classes: list[str]) -> int:
    number = label[0] if isinstance(label, list) and len(label) == 1 else label
    if number not in range(1, len(classes) + 1):
        raise SemaugError(f"{path}: the label {shown(str(number))} is beyond the {len(classes)} classes")
    return int(number) - 1


def read_imagenet(folder: Path) -> DataSet:
    """ImageNet's train/WNID and val/WNID; its validation images serve as "test", as in the literature."""
    if not (folder / "train").is_dir():
        raise SemaugError(f"{folder} has no folder train with one folder per class (n01440764, …)")
    flat = folder / "val"
    if flat.is_dir() and not _subfolders(flat):
        raise SemaugError(f"{flat} must have one folder per class (n01440764, …), with the images sorted into them")
    return read_folder(folder, "imagenet", {"train": "train", "val": "test"})


# ------------------------------------------------------------------------------------------------------- the names


@dataclass(frozen=True)
class Known:
    """A data set that is known by name."""

    read: Callable[[Path], DataSet]
    recognise: Callable[[Path], bool]
    folders: tuple[str, ...]
    """Below the root; the first is where its archive puts it, others are where copies in circulation do."""
    source: str
    archive: Archive | None = None


def _is_image_list(folder: Path) -> bool:
    tables = ("images.txt", "image_class_labels.txt", "classes.txt", "train_test_split.txt")
    # two, so that the absence of one is told, and a folder with a classes.txt is no mistake
    return sum((folder / table).is_file() for table in tables) >= 2


def _is_aircraft(folder: Path) -> bool:
    return any(base.joinpath(table).is_file() for base in (folder / "data", folder) for table in AIRCRAFT_TABLES)


def _is_cars(folder: Path) -> bool:
    return any(any(base.glob("cars_*.mat")) for base in (folder, folder / "devkit"))


def _is_imagenet(folder: Path) -> bool:
    train = folder / "train"
    names = [class_folder.name for class_folder in _subfolders(train)] if train.is_dir() else []
    return bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)


AIRCRAFT_TABLES = ("variants.txt", "images_variant_trainval.txt", "images_variant_train.txt")
KNOWN = {
    "nabirds": Known(
        read_nabirds,
        lambda folder: _is_image_list(folder) and (folder / "hierarchy.txt").is_file(),
        ("nabirds",),
        "nabirds.tar.gz from https://dl.allaboutbirds.org/nabirds (after agreeing to its terms)",
    ),
    "cub": Known(
        read_cub,
        _is_image_list,
        ("CUB_200_2011", "CUB_200_2011/CUB_200_2011", "cub"),
        "CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158",
        Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            "CUB_200_2011.tgz",
            "97eceeb196236b17998738112f37df78",
            1_150_585_339,
            "CUB_200_2011",
        ),
    ),
    "aircraft": Known(
        read_aircraft,
        _is_aircraft,
        ("fgvc-aircraft-2013b", "fgvc-aircraft-2013b/fgvc-aircraft-2013b", "aircraft"),
        "fgvc-aircraft-2013b.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        Archive(
            "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
            "fgvc-aircraft-2013b.tar.gz",
            "d4acdd33327262359767eeaa97a4f732",
            2_753_340_328,
            "fgvc-aircraft-2013b",
        ),
    ),
    "cars": Known(
        read_cars,
        _is_cars,
        ("stanford_cars", "car_data/car_data", "car_data", "cars", "."),
        "Stanford Cars from https://www.kaggle.com/datasets/cyizhuo/stanford-cars-by-classes-folder or another copy "
        "(its own host is gone)",
    ),
    "imagenet": Known(
        read_imagenet,
        _is_imagenet,
        ("imagenet", "ILSVRC/Data/CLS-LOC", "ILSVRC2012"),
        "ILSVRC2012's training and validation images from https://image-net.org (after registering)",
    ),
}
"""The named data sets, in the order in which a folder is tried."""


def _read_known(
    name: str, known: Known, root: Path, download: bool, progress: Callable[[int, int], None] | None
) -> DataSet:
    folders = [root / folder for folder in known.folders]
    for folder in folders:
        if folder != root and holds_shards(folder):
            return read_shards(folder)
        if known.recognise(folder):
            return known.read(folder)
    # Its folder is there but is not recognised: reading it says what it lacks.
    for folder in folders:
        if folder.is_dir() and folder != root:
            return known.read(folder)
    if download and known.archive is not None:
        fetch(known.archive, root, progress)
        return known.read(folders[0])
    raise SemaugError(f"{name} is not in {root}: download {known.source} and unpack it as {folders[0]}")
