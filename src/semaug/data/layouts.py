"""The layouts in which data sets are distributed, as a table that :func:`semaug.data.readers.read_data` consults.

To add a layout, write a function that reads it and one that recognises it, and add an entry to `LAYOUTS`. Annotation
files are untrusted: whatever they hold, the outcome is a data set or a :class:`DataError` of one sentence, and no image
outside of the data set's folder is ever opened. (A user's own table may list images anywhere.)
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semaug.data.annotations import SPLIT_NAMES, Field, Splits, data_set, lines, numbered, pairs, without_set
from semaug.data.downloads import Archive
from semaug.data.huggingface import (
    holds_metadata,
    holds_parquet,
    holds_saved,
    read_metadata,
    read_parquet_images,
    read_saved,
)
from semaug.data.matlab import read_variable
from semaug.data.samples import IMAGE_SUFFIXES, DataSet, ImageFiles, ignored_files
from semaug.data.shards import holds_shards, read_shards
from semaug.data.tables import TABLE_SUFFIXES, read_table
from semaug.data.webdataset import holds_tars, read_webdataset
from semaug.util.errors import DataError
from semaug.util.names import class_title, shown


@dataclass(frozen=True)
class Layout:
    """A layout of data sets or, with `folders`, a data set known by name."""

    name: str
    recognise: Callable[[Path], bool]  # whether a path holds it; called in the order of `LAYOUTS`
    read: Callable[[Path], DataSet]  # raises DataError
    may_leave_out: bool = False  # whether image files may lie beside the lists or archives that name the images
    folders: tuple[str, ...] = ()  # below the data root: first where its archive puts it, then where other copies do
    source: str = ""  # where a named set can be obtained, for the message if it is missing
    archive: Archive | None = None  # its download, if its host offers one without registration


# ------------------------------------------------------------------------------------------------------- image folders


def read_folder(folder: Path, name: str | None = None, roles: dict[str, str] = SPLIT_NAMES) -> DataSet:
    """Read one folder per class, below one folder per split or, if there are no splits, as "train" only.

    Images may be in subfolders of a class folder. Beside "train", folders that are not splits are ignored, as are
    images beside the class folders; both are counted.

    Args:
        folder: The folder.
        name: Name of the data set; that of the folder by default.
        roles: Split by folder name in lower case.

    Returns:
        The data set; its classes are in alphabetical order.

    Raises:
        DataError: A split or class has no images, or a file cannot be used.
    """
    images, ignored = _images_in(folder, roles)
    classes = sorted(set().union(*images.values()))
    index = {class_name: label for label, class_name in enumerate(classes)}
    splits = {
        split: [(file, index[class_name]) for class_name, files in by_class.items() for file in files]
        for split, by_class in images.items()
    }
    return data_set(name or folder.resolve().name, folder, classes, splits, listed=False, ignored=+ignored)


_NOT_CLASSES = {"data", "default", *SPLIT_NAMES}  # names of folders


def with_left_out(folder: Path, data: DataSet) -> DataSet:
    """Count the image files in a folder that a data set read from lists or archives in it leaves out.

    A few other pictures do no harm, such as those of a README.

    Args:
        folder: The folder.
        data: The data set.

    Returns:
        The data set, with their number in `ignored`.

    Raises:
        DataError: They seem to be a data set of their own, in folders of classes.
    """
    own = {file for samples in data.splits.values() if isinstance(samples, ImageFiles) for file in samples.files}
    left_out: dict[str, list[Path]] = {}
    for current, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        parts = [part for part in Path(current).relative_to(folder).parts if without_set(part) not in _NOT_CLASSES]
        others = [Path(current, name) for name in names if _count_images([name]) and Path(current, name) not in own]
        if parts and others:
            left_out.setdefault(parts[0], []).extend(others)
    count, largest = sum(map(len, left_out.values())), max(len(samples) for samples in data.splits.values())
    are_classes = any(name in data.classes or class_title(name) in data.classes for name in left_out)
    if are_classes or (len(left_out) > 1 and count >= largest):
        first = min(file for files in left_out.values() for file in files)
        raise DataError(
            f"{folder} has {count} images in folders of classes that are not in its list or archives of images, first "
            f"{shown(str(first.relative_to(folder)))}; move either of them to another folder"
        )
    return replace(data, ignored={**data.ignored, **{f"{name}/": len(files) for name, files in left_out.items()}})


def _images_in(folder: Path, roles: Mapping[str, str]) -> tuple[dict[str, dict[str, list[Path]]], Counter[str]]:
    """The images of a folder by split and class, and the number of other files, as :func:`read_folder` finds them."""
    subfolders = _subfolders(folder)
    parts: dict[str, Path] = {}
    for part in subfolders:
        role = roles.get(without_set(part.name))
        if role in parts:
            raise DataError(f"{folder} has both {parts[role].name} and {part.name}, which mean the same split")
        if role is not None:
            parts[role] = part
    # A class may be called "train" (next to "bus"); a split has folders inside.
    if "train" not in parts or not _subfolders(parts["train"]):
        if parts and len(parts) == len(subfolders):
            raise DataError(f"{folder} needs a folder train with one folder per class inside")
        parts = {"train": folder}
    ignored = Counter[str]()
    if parts != {"train": folder}:
        for other in set(subfolders) - set(parts.values()):
            ignored[f"{other.name}/"] += sum(map(_count_images, (files for _, _, files in os.walk(other))))
    for part in {folder, *parts.values()}:
        ignored[f"{part.resolve().name}/"] += _count_images(os.listdir(part))
    return {split: _images_by_class(part, ignored) for split, part in parts.items()}, ignored


def _count_images(names: Iterable[str]) -> int:
    return sum(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in names if not name.startswith("."))


_CLUTTER = ("thumbs.db", "desktop.ini")  # which file managers write


def _subfolders(folder: Path) -> list[Path]:
    folders = []
    for entry in os.scandir(folder):
        # A link to the folder itself, or to one above it, would hold every image again.
        is_loop = entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(entry.path))
        if os.path.isdir(entry.path) and not entry.name.startswith((".", "__MACOSX")) and not is_loop:
            folders.append(folder / _utf8(entry.name))
    return sorted(folders)


def _images_by_class(folder: Path, ignored: Counter[str]) -> dict[str, list[Path]]:
    """The images by class; `ignored` is increased by the number of other files by suffix."""
    by_class = {class_folder.name: _images_below(class_folder, ignored) for class_folder in _subfolders(folder)}
    if not by_class:
        is_empty = next(os.scandir(folder), None) is None
        raise DataError(f"{folder} is empty" if is_empty else f"{folder} has no folder per class with images inside")
    if not any(by_class.values()):
        suffixes = " ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        others = f"; {ignored_files(ignored)}" if ignored else ""
        raise DataError(f"there are no images ({suffixes}) in the class folders of {folder}{others}")
    return by_class


def _images_below(folder: Path, ignored: Counter[str]) -> list[Path]:
    images, folders = [], [folder]
    while folders:
        current = folders.pop()
        for entry in os.scandir(current):
            if entry.name.startswith("."):
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.is_dir(follow_symlinks=False):
                folders.append(current / _utf8(entry.name))
            elif suffix in IMAGE_SUFFIXES:
                if not entry.is_file(follow_symlinks=False) and not os.path.isfile(entry.path):
                    raise DataError(f"{shown(entry.path)} is not a file or a link to one")
                images.append(current / _utf8(entry.name))
            elif entry.name.lower() not in _CLUTTER:
                ignored[suffix] += 1
    return sorted(images)


def _utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        if sys.getfilesystemencoding() != "utf-8":  # as in the locale C without Python's UTF-8 mode
            raise DataError(f"Python reads file names as {sys.getfilesystemencoding()}; set PYTHONUTF8=1") from error
        raise DataError(f"the file name {os.fsencode(name)!r} is not UTF-8; rename the file") from error
    return name


def _read_imagenet(folder: Path) -> DataSet:
    """ImageNet's train/WNID and val/WNID; its validation images are the "test" split, as in the literature."""
    if not (folder / "train").is_dir():
        raise DataError(f"{folder} has no folder train with one folder per class (n01440764, …)")
    flat = folder / "val"
    if flat.is_dir() and not _subfolders(flat):
        raise DataError(f"{flat} must have one folder per class (n01440764, …), with the images sorted into them")
    return read_folder(folder, "imagenet", {"train": "train", "val": "test"})


def _is_imagenet(folder: Path) -> bool:
    train = folder / "train"
    names = [class_folder.name for class_folder in _subfolders(train)] if train.is_dir() else []
    test = folder / "test"
    if test.is_dir() and _subfolders(test):  # ImageNet's test images have no classes
        return False
    return bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)


# ---------------------------------------------------------------------------------------------------- CUB and NABirds


def _read_cub(folder: Path) -> DataSet:
    """CUB-200-2011; classes have their names in classes.txt, such as "001.Black_footed_Albatross"."""
    return _read_image_list("cub", folder, numbered(folder / "classes.txt"))


def _read_nabirds(folder: Path) -> DataSet:
    """NABirds; the classes are those 555 of its 1,011 categories that have images, in the order of their numbers."""
    categories = numbered(folder / "classes.txt")
    used = {label.number() for label in pairs(folder / "image_class_labels.txt").values()} & categories.keys()
    counts = Counter(categories[number] for number in used)  # two categories may have the same name
    names = {number: f"{name} [{number}]" if counts[name] > 1 else name for number, name in categories.items()}
    return _read_image_list("nabirds", folder, {number: names[number] for number in used})


def _read_image_list(name: str, folder: Path, classes: dict[int, str]) -> DataSet:
    """Read the annotation files that CUB and NABirds share; classes are ordered by number."""
    images = pairs(folder / "images.txt")
    labels, in_train = pairs(folder / "image_class_labels.txt"), pairs(folder / "train_test_split.txt")
    for file_name, table in (("image_class_labels.txt", labels), ("train_test_split.txt", in_train)):
        if table.keys() != images.keys():
            image = min(table.keys() ^ images.keys())
            raise DataError(f"image {shown(image)} is in only one of images.txt and {file_name} in {folder}")
    index = {number: label for label, number in enumerate(sorted(classes))}
    splits: Splits = {"train": [], "test": []}
    for image, path in images.items():
        if labels[image].number() not in index:
            raise DataError(f"{labels[image].place}: class {labels[image].number()} is not in classes.txt")
        if in_train[image].text not in ("0", "1"):
            raise DataError(f"{in_train[image].place}: {shown(in_train[image].text)} should be 0 or 1")
        split = "train" if in_train[image].text == "1" else "test"
        splits[split].append((path.below(folder / "images"), index[labels[image].number()]))
    return data_set(name, folder, [classes[number] for number in index], splits)


def _is_image_list(folder: Path) -> bool:
    tables = ("images.txt", "image_class_labels.txt", "classes.txt", "train_test_split.txt")
    # Two are enough to report a missing one; a classes.txt alone may be in any folder.
    return sum((folder / table).is_file() for table in tables) >= 2


# ------------------------------------------------------------------------------------------------- Aircraft and Cars


def _read_aircraft(folder: Path) -> DataSet:
    """FGVC-Aircraft by variant; "train" is its train and val together, as in the literature.

    The banner with the photographer's name, 20 pixels at the bottom of each image, is not cut off.
    """
    base = folder / "data" if (folder / "data").is_dir() else folder
    classes = [line.text for line in lines(base / "variants.txt")]
    index = {variant: label for label, variant in enumerate(classes)}
    both = ["trainval"] if (base / "images_variant_trainval.txt").is_file() else ["train", "val"]
    splits: Splits = {"train": [], "test": []}
    for split, lists in (("train", both), ("test", ["test"])):
        for path in (base / f"images_variant_{part}.txt" for part in lists):
            for image, (variant, place) in pairs(path).items():
                if variant not in index:
                    raise DataError(f"{place}: the variant {shown(variant)} is not in variants.txt")
                splits[split].append((Field(f"{image}.jpg", place).below(base / "images"), index[variant]))
    return data_set("aircraft", folder, classes, splits)


def _is_aircraft(folder: Path) -> bool:
    tables = ("variants.txt", "images_variant_trainval.txt", "images_variant_train.txt")
    return any(base.joinpath(table).is_file() for base in (folder / "data", folder) for table in tables)


def _read_cars(folder: Path) -> DataSet:
    """Stanford Cars: the devkit's files, the single cars_annos.mat, or folders train/CLASS and test/CLASS."""
    single = folder / "cars_annos.mat"
    devkit = folder / "devkit" if (folder / "devkit").is_dir() else folder
    splits: Splits = {"train": [], "test": []}
    if single.is_file():
        classes = [str(name) for name in read_variable(single, "class_names")]
        for path, label, test in _annotations(single, "relative_im_path", "class", "test"):
            mark = _only(test)
            if mark not in (0, 1):
                raise DataError(f"{single}: the test mark {shown(str(mark))} should be 0 or 1")
            file = Field(str(path), str(single)).below(folder)
            splits["test" if mark == 1 else "train"].append((file, _car_label(single, label, classes)))
    elif any(devkit.glob("cars_*.mat")):
        classes = [str(name) for name in read_variable(devkit / "cars_meta.mat", "class_names")]
        test_labels = folder / "cars_test_annos_withlabels.mat"
        if not test_labels.is_file():
            test_labels = devkit / test_labels.name
        for split, annotations in (("train", devkit / "cars_train_annos.mat"), ("test", test_labels)):
            images = folder / f"cars_{split}"
            if (images / images.name).is_dir():  # some archives hold the folder twice
                images = images / images.name
            for path, label in _annotations(annotations, "fname", "class"):
                file = Field(str(path), str(annotations)).below(images)
                splits[split].append((file, _car_label(annotations, label, classes)))
    elif (folder / "train").is_dir():
        return read_folder(folder, "cars")
    else:
        raise DataError(f"{folder} has neither cars_annos.mat nor a folder devkit or train")
    return data_set("cars", folder, classes, splits)


def _annotations(path: Path, *fields: str) -> Iterator[tuple[Any, ...]]:
    for annotation in read_variable(path, "annotations"):
        for field in fields:
            if not isinstance(annotation, dict) or field not in annotation:
                # as in cars_test_annos.mat, which lacks the labels
                raise DataError(f"the annotations in {path} have no field {field}")
        yield tuple(annotation[field] for field in fields)


def _only(value: Any) -> Any:
    """The number of a MATLAB matrix of one number."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _car_label(path: Path, label: Any, classes: list[str]) -> int:
    number = _only(label)
    if number not in range(1, len(classes) + 1):
        raise DataError(f"{path}: the label {shown(str(number))} is beyond the {len(classes)} classes")
    return int(number) - 1


def _is_cars(folder: Path) -> bool:
    return any(any(base.glob("cars_*.mat")) for base in (folder, folder / "devkit"))


# ----------------------------------------------------------------------------------------------------------- the table

LAYOUTS = [
    Layout("shards", holds_shards, read_shards, may_leave_out=True),
    Layout("hugging-face", holds_saved, read_saved, may_leave_out=True),
    Layout("hugging-face-parquet", holds_parquet, read_parquet_images, may_leave_out=True),
    Layout("table", lambda path: path.is_file() and path.suffix.lower() in TABLE_SUFFIXES, read_table),
    Layout(
        "nabirds",
        lambda folder: _is_image_list(folder) and (folder / "hierarchy.txt").is_file(),
        _read_nabirds,
        folders=("nabirds",),
        source="nabirds.tar.gz from https://dl.allaboutbirds.org/nabirds (after agreeing to its terms)",
    ),
    Layout(
        "cub",
        _is_image_list,
        _read_cub,
        folders=("CUB_200_2011", "CUB_200_2011/CUB_200_2011", "cub"),
        source="CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158",
        archive=Archive(
            url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            name="CUB_200_2011.tgz",
            md5="97eceeb196236b17998738112f37df78",
            size=1_150_585_339,
            folder="CUB_200_2011",
        ),
    ),
    Layout(
        "aircraft",
        _is_aircraft,
        _read_aircraft,
        folders=("fgvc-aircraft-2013b", "fgvc-aircraft-2013b/fgvc-aircraft-2013b", "aircraft"),
        source="fgvc-aircraft-2013b.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        archive=Archive(
            url="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
            name="fgvc-aircraft-2013b.tar.gz",
            md5="d4acdd33327262359767eeaa97a4f732",
            size=2_753_340_328,
            folder="fgvc-aircraft-2013b",
        ),
    ),
    Layout(
        "cars",
        _is_cars,
        _read_cars,
        folders=("stanford_cars", "car_data/car_data", "car_data", "cars", "."),
        source="Stanford Cars from https://www.kaggle.com/datasets/cyizhuo/stanford-cars-by-classes-folder or another "
        "copy (its own host is gone)",
    ),
    Layout(
        "imagenet",
        _is_imagenet,
        _read_imagenet,
        folders=("imagenet", "ILSVRC/Data/CLS-LOC", "ILSVRC2012"),
        source="ILSVRC2012's training and validation images from https://image-net.org (after registering)",
    ),
    Layout("hugging-face-metadata", holds_metadata, read_metadata, may_leave_out=True),
    Layout("webdataset", holds_tars, read_webdataset, may_leave_out=True),
    Layout("folder", Path.is_dir, read_folder),
]
"""In the order in which a path is tried."""
