"""Data sets from disk, in the layouts in which they are distributed.

Annotation files of downloaded sets are untrusted: whatever they hold, the outcome is a data set or a
:class:`UserError` of one sentence, and no image outside of the set's folder is ever named by them. (A user's own table
may name images anywhere.)
"""

import csv
import hashlib
import importlib
import io
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from semaug.data.downloads import Archive, fetch, leads_out
from semaug.data.samples import DataSet, ImageFiles, Samples, embedded_birds, subset
from semaug.errors import UserError

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"))
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
TABLE_COLUMNS = {"path": ("path", "image", "file", "filename"), "label": ("label", "class"), "split": ("split",)}
MAX_ANNOTATION_BYTES = 2**30
"""A larger annotation file is refused before it fills the memory; the largest known set's is a twentieth of it."""

Splits = dict[str, list[tuple[Path, int]]]


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
            raise UserError(f"{_shown(data)} is neither an existing path nor the name of a data set ({names})")
        if path.is_dir():
            for known in KNOWN.values():
                if known.recognise(path):
                    return known.read(path)
            return read_folder(path)
        if path.suffix.lower() in TABLE_SUFFIXES:
            return read_table(path)
    except OSError as error:
        raise UserError(f"cannot read the data {_shown(data)}: {error}") from error
    raise UserError(f"{path} is neither a folder nor a table ({', '.join(TABLE_SUFFIXES)})")


def split_validation(samples: Samples, per_class: int | None, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Training and validation images: of every class `per_class` images, or else a fraction, become validation.

    A class keeps at least one training image, and gives at least one for a fraction above 0 if it has two. The choice
    is by a hash of each image's name and the seed, so it is the same on every machine, and an image that is added
    changes the place of few others.
    """
    if per_class is not None and per_class < 0:
        raise UserError(f"the number of validation images per class must not be negative ({per_class})")
    if per_class is None and not 0 <= fraction < 1:
        raise UserError(f"the fraction of validation images must be at least 0 and below 1, not {fraction}")
    members: dict[int, list[int]] = {}
    for i, label in enumerate(samples.labels):
        members.setdefault(label, []).append(i)

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{seed}\0{samples.name(i).replace(os.sep, '/')}".encode()).digest()

    validation: set[int] = set()
    for indices in members.values():
        if per_class is not None:
            wanted = per_class
        else:
            wanted = max(int(fraction * len(indices) + 0.5), 1 if fraction > 0 else 0)
        validation.update(sorted(indices, key=rank)[: min(wanted, len(indices) - 1)])
    training = [i for i in range(len(samples)) if i not in validation]
    return subset(samples, training), subset(samples, sorted(validation))


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
            raise UserError(f"{folder} has both {parts[role].name} and {part.name}, which mean the same split")
        if role is not None:
            parts[role] = part
    # A class may be called "train" (next to "bus"); a split has folders inside.
    if "train" not in parts or not _subfolders(parts["train"]):
        if parts and len(parts) == len(subfolders):
            raise UserError(f"{folder} needs a folder train with one folder per class inside")
        parts = {"train": folder}
    images = {split: _images_by_class(part) for split, part in parts.items()}
    classes = sorted(set().union(*images.values()))
    index = {class_name: i for i, class_name in enumerate(classes)}
    splits = {
        split: [(file, index[class_name]) for class_name, files in by_class.items() for file in files]
        for split, by_class in images.items()
    }
    return _data_set(name or folder.resolve().name, folder, classes, splits)


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
        raise UserError(f"{folder} is empty" if empty else f"{folder} has no folder per class with images inside")
    if not any(by_class.values()):
        suffixes = " ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        raise UserError(f"there are no images ({suffixes}) in the class folders of {folder}")
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
                    raise UserError(f"{_shown(entry.path)} is not a file or a link to one")
                images.append(current / _utf8(entry.name))
    return sorted(images)


def _utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the file name {os.fsencode(name)!r} is not UTF-8; rename the file") from error
    return name


# ---------------------------------------------------------------------------------- sets with their own annotations


def read_cub(folder: Path) -> DataSet:
    """CUB-200-2011; classes are called as in classes.txt, "001.Black_footed_Albatross"."""
    classes = _numbered(folder / "classes.txt")
    return _read_image_list("cub", folder, classes, set(classes))


def read_nabirds(folder: Path) -> DataSet:
    """NABirds: of its 1,011 categories the 555 that have images are the classes, in the order of their numbers."""
    categories = _numbered(folder / "classes.txt")
    labels = folder / "image_class_labels.txt"
    used = {_number(labels, line, text) for text, line in _pairs(labels).values()} & set(categories)
    shared = {name for name, count in Counter(categories[category] for category in used).items() if count > 1}
    classes = {category: f"{name} [{category}]" if name in shared else name for category, name in categories.items()}
    return _read_image_list("nabirds", folder, classes, used)


def _read_image_list(name: str, folder: Path, names: dict[int, str], used: set[int]) -> DataSet:
    """CUB's and NABirds' files; the classes are the categories `used`, ordered by number."""
    images, labels, in_train = (
        _pairs(folder / f"{table}.txt") for table in ("images", "image_class_labels", "train_test_split")
    )
    index = {category: i for i, category in enumerate(sorted(used))}
    for file_name, table in (("image_class_labels.txt", labels), ("train_test_split.txt", in_train)):
        if table.keys() != images.keys():
            image = min(table.keys() ^ images.keys())
            raise UserError(f"image {_shown(image)} is in only one of images.txt and {file_name} in {folder}")
    splits: Splits = {"train": [], "test": []}
    for image, (path, line) in images.items():
        file = _inside(folder / "images", path, f"{folder / 'images.txt'} line {line}")
        text, line = labels[image]
        category = _number(folder / "image_class_labels.txt", line, text)
        if category not in index:
            raise UserError(f"{folder / 'image_class_labels.txt'} line {line}: class {category} is not in classes.txt")
        text, line = in_train[image]
        if text not in ("0", "1"):
            raise UserError(f"{folder / 'train_test_split.txt'} line {line}: {_shown(text)} should be 0 or 1")
        splits["train" if text == "1" else "test"].append((file, index[category]))
    return _listed_data_set(name, folder, [names[category] for category in sorted(used)], splits)


def read_aircraft(folder: Path) -> DataSet:
    """FGVC-Aircraft by variant; "train" is its train and val together, as in the literature.

    The images keep the banner of 20 pixels with the photographer's name at their bottom.
    """
    base = folder / "data" if (folder / "data").is_dir() else folder
    classes = [text for _, text in _lines(base / "variants.txt")]
    index = {variant: i for i, variant in enumerate(classes)}
    both = ["trainval"] if (base / "images_variant_trainval.txt").is_file() else ["train", "val"]
    splits: Splits = {"train": [], "test": []}
    for split, lists in (("train", both), ("test", ["test"])):
        for path in (base / f"images_variant_{part}.txt" for part in lists):
            for image, (variant, line) in _pairs(path).items():
                if variant not in index:
                    raise UserError(f"{path} line {line}: the variant {_shown(variant)} is not in variants.txt")
                file = _inside(base / "images", f"{image}.jpg", f"{path} line {line}")
                splits[split].append((file, index[variant]))
    return _listed_data_set("aircraft", folder, classes, splits)


def read_cars(folder: Path) -> DataSet:
    """Stanford Cars: the devkit's files, the single cars_annos.mat, or folders train/CLASS and test/CLASS."""
    single = folder / "cars_annos.mat"
    devkit = folder / "devkit" if (folder / "devkit").is_dir() else folder
    splits: Splits = {"train": [], "test": []}
    if single.is_file():
        classes = _class_names(single)
        for path, label, test in _annotations(single, "relative_im_path", "class", "test"):
            file = _inside(folder, str(path), str(single))
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
                file = _inside(images, str(path), str(annotations))
                splits[split].append((file, _label(annotations, label, classes)))
    elif (folder / "train").is_dir():
        return read_folder(folder, "cars")
    else:
        raise UserError(f"{folder} has neither cars_annos.mat nor a folder devkit or train")
    return _listed_data_set("cars", folder, classes, splits)


def _class_names(path: Path) -> list[str]:
    return [str(name) for name in _matlab(path, "class_names")]


def _annotations(path: Path, *fields: str) -> Iterator[tuple[Any, ...]]:
    for annotation in _matlab(path, "annotations"):
        for field in fields:
            if not isinstance(annotation, dict) or field not in annotation:
                # as in cars_test_annos.mat, which lacks the labels
                raise UserError(f"the annotations in {path} have no field {field}")
        yield tuple(annotation[field] for field in fields)


def _label(path: Path, label: Any, classes: list[str]) -> int:
    number = label[0] if isinstance(label, list) and len(label) == 1 else label
    if number not in range(1, len(classes) + 1):
        raise UserError(f"{path}: the label {_shown(str(number))} is beyond the {len(classes)} classes")
    return int(number) - 1


# Of MATLAB's file format, version 5: the kinds of elements that hold others, the formats of those that hold numbers,
# the encodings of those that hold text, and the classes of arrays.
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
CELL, STRUCT, TEXT, FIRST_NUMERIC, LAST_NUMERIC = 1, 2, 4, 6, 15
MAX_INFLATED_BYTES = 2**26
"""What compressed annotations may grow to; those of Stanford Cars are some 10 MB."""


def _matlab(path: Path, variable: str) -> list[Any]:
    """The elements of an array in a .mat file: a number, a text (str), a struct (dict), or another array (list).

    Not scipy's reader, because damaged files can make that end the process.
    """
    content = memoryview(_content(path))
    try:
        order = {b"IM": "<", b"MI": ">"}[bytes(content[126:128])]
        for kind, body in _elements(content[128:], order):
            if kind == COMPRESSED:
                inflated = zlib.decompressobj().decompress(body, MAX_INFLATED_BYTES)
                kind, body = next(_elements(memoryview(inflated), order))
            name, value = _array(body, order) if kind == MATRIX else ("", None)
            if name == variable and isinstance(value, list):
                return value
    except (LookupError, ValueError, struct.error, zlib.error, StopIteration, RecursionError) as error:
        raise UserError(f"{path} is not a MATLAB file of version 5 to 7, or is damaged") from error
    raise UserError(f"{path} has no variable {variable}")


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The elements that follow one another in a part of a .mat file, by kind and content."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from(f"{order}II", content, at)
        start, end = at + 8, at + 8 + size + (-size % 8 if kind != COMPRESSED else 0)
        if kind >> 16:  # up to four bytes are kept in the place of the size, and the size next to the kind
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        if start + size > min(end, len(content)):
            raise ValueError("an element is longer than what holds it")
        yield kind, content[start : start + size]
        at = end


def _array(body: memoryview, order: str) -> tuple[str, Any]:
    """Name and value of an array; its shape is ignored."""
    if not body:  # an empty cell
        return "", []
    parts = _elements(body, order)
    (_, flags), _, (_, name) = next(parts), next(parts), next(parts)
    array_class = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    value: Any = None
    if array_class == CELL:
        value = [_array(cell, order)[1] for _, cell in parts]
    elif array_class == STRUCT:
        (_, width), (_, names) = next(parts), next(parts)
        step = max(struct.unpack_from(f"{order}i", width)[0], 1)
        fields = [bytes(names[i : i + step]).split(b"\0")[0].decode() for i in range(0, len(names), step)]
        values = [_array(value, order)[1] for _, value in parts]
        value = [dict(zip(fields, row, strict=True)) for row in zip(*[iter(values)] * len(fields), strict=True)]
    elif array_class == TEXT:
        kind, text = next(parts, (2, b""))
        encoding = ENCODINGS[kind]
        endian = {"<": "-le", ">": "-be"}[order] if encoding in ("utf-16", "utf-32") else ""
        value = bytes(text).decode(encoding + endian)
    elif FIRST_NUMERIC <= array_class <= LAST_NUMERIC:
        kind, numbers = next(parts)
        letter = NUMBERS[kind]
        value = list(struct.unpack(f"{order}{len(numbers) // struct.calcsize(f'={letter}')}{letter}", numbers))
    return bytes(name).decode("latin-1"), value


def read_imagenet(folder: Path) -> DataSet:
    """ImageNet's train/WNID and val/WNID; its validation images serve as "test", as in the literature."""
    if not (folder / "train").is_dir():
        raise UserError(f"{folder} has no folder train with one folder per class (n01440764, …)")
    flat = folder / "val"
    if flat.is_dir() and not _subfolders(flat):
        raise UserError(f"{flat} must have one folder per class (n01440764, …), with the images sorted into them")
    return read_folder(folder, "imagenet", {"train": "train", "val": "test"})


# ---------------------------------------------------------------------------------------------------------- tables


def read_table(path: Path) -> DataSet:
    """Images listed in a .csv, .tsv or .parquet file with columns path, label and, optionally, split.

    Paths are relative to the table's folder. Classes are in alphabetical order, or by value if all are whole numbers.
    """
    rows = list(_parquet_rows(path) if path.suffix.lower() == ".parquet" else _csv_rows(path))
    labels = {label for _, _, label, _ in rows}
    # by length first: "9" comes before "10"
    numbers = all(label.isascii() and label.isdigit() for label in labels)
    classes = sorted(labels, key=lambda label: (len(label), label) if numbers else (0, label))
    index = {label: i for i, label in enumerate(classes)}
    splits: Splits = {"train": []}
    for place, image, label, split in rows:
        if not image or not label:
            raise UserError(f"{path} {place}: the image or its label is empty")
        if split.lower() not in SPLIT_NAMES:
            raise UserError(f"{path} {place}: the split {_shown(split)} is not one of {', '.join(SPLIT_NAMES)}")
        splits.setdefault(SPLIT_NAMES[split.lower()], []).append((path.parent / image, index[label]))
    return _listed_data_set(path.stem, path.parent, classes, splits)


Row = tuple[str, str, str, str]
"""Place in the file, image, label, split."""


def _csv_rows(path: Path) -> Iterator[Row]:
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line}: this is not UTF-8 text") from error
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        columns = [header.index(column) for column in _columns(path, header)]
        for row in reader:
            if not row:
                continue
            place = f"line {reader.line_num}"
            if len(row) != len(header):
                raise UserError(f"{path} {place}: there are {len(row)} fields, the header has {len(header)}")
            image, label, *split = (row[column].strip() for column in columns)
            yield place, image, label, split[0] if split else "train"
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num}: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow; install it with: pip install pyarrow") from error
    try:
        header = [str(name) for name in parquet.read_schema(path).names]
    except Exception as error:  # the parser meets garbage with many kinds of exception
        raise UserError(f"{path} is not a Parquet file") from error
    columns = _columns(path, header)
    try:
        values = parquet.read_table(path, columns=columns).to_pydict()
    except Exception as error:
        raise UserError(f"{path} is a damaged Parquet file") from error
    for number, row in enumerate(zip(*(values[column] for column in columns), strict=True), start=1):
        if not all(isinstance(value, str | int) for value in row):
            raise UserError(f"{path} row {number}: image, label and split must be text or whole numbers")
        image, label, *split = (str(value).strip() for value in row)
        yield f"row {number}", image, label, split[0] if split else "train"


def _columns(path: Path, header: list[str]) -> list[str]:
    """The columns of image, label and, if it is there, split, under the names they have in the header."""
    found = {column.strip().lower(): column for column in reversed(header)}
    columns = []
    for role, names in TABLE_COLUMNS.items():
        named = [found[name] for name in names if name in found]
        if not named and role != "split":
            present = _some(header) or "none"
            raise UserError(f"{path} needs a column {' or '.join(names)}; its columns are: {present}")
        columns += named[:1]
    return columns


# ---------------------------------------------------------------------------------------------- what readers share


class Value(NamedTuple):
    """The second field of a line in an annotation file."""

    text: str
    line: int


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"the annotation file {path} is missing")
    if path.stat().st_size > MAX_ANNOTATION_BYTES:
        raise UserError(f"{path} is too large for an annotation file ({path.stat().st_size} bytes)")
    return path.read_bytes()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{path} line {number}: this is not UTF-8 text") from error
        if text:
            yield number, text


def _pairs(path: Path) -> dict[str, Value]:
    """What follows the first word of each line, by that word."""
    pairs: dict[str, Value] = {}
    for number, line in _lines(path):
        fields = line.split(maxsplit=1)
        if len(fields) != 2:
            raise UserError(f"{path} line {number}: {_shown(line)} should be two fields")
        if fields[0] in pairs:
            raise UserError(f"{path} line {number}: {_shown(fields[0])} is there twice")
        pairs[fields[0]] = Value(fields[1], number)
    return pairs


def _number(path: Path, line: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"{path} line {line}: {_shown(text)} should be a number")
    return int(text)


def _numbered(path: Path) -> dict[int, str]:
    names: dict[int, str] = {}
    for key, (text, line) in _pairs(path).items():
        if names.setdefault(_number(path, line, key), text) is not text:
            raise UserError(f"{path} line {line}: the class {_shown(key)} is there twice")
    return names


def _inside(folder: Path, name: str, place: str) -> Path:
    """The path of `name` below `folder`; refused if it could lead out of it."""
    if leads_out(name):
        raise UserError(f"{place}: the image {_shown(name)} would lie outside of the data set's folder")
    return folder / name


def _listed_data_set(name: str, folder: Path, classes: Sequence[str], splits: Splits) -> DataSet:
    """A data set whose images are known from a list, so that they may be absent."""
    files = [file for entries in splits.values() for file, _ in entries]
    absent = [file for file in files if not os.path.isfile(file)]
    if absent:
        first = str(absent[0]).removeprefix(f"{folder}{os.sep}")
        raise UserError(
            f"{len(absent)} of the {len(files)} images listed in {folder} are absent, first {_shown(first)}"
        )
    return _data_set(name, folder, classes, splits)


def _data_set(name: str, folder: Path, classes: Sequence[str], splits: Splits) -> DataSet:
    repeated = [class_name for class_name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise UserError(f"two classes of {folder} have the same name: {_some(repeated)}")
    for split, entries in splits.items():
        if not entries:
            raise UserError(f"{folder} has no images in the split {split}")
    present = {split: {label for _, label in entries} for split, entries in splits.items()}
    for split, labels in present.items():
        extra = sorted(labels - present["train"])
        if extra:
            names = _some([classes[label] for label in extra])
            raise UserError(f"{folder} has classes in {split} that are not in train: {names}")
    without = [class_name for label, class_name in enumerate(classes) if label not in present["train"]]
    if without:
        raise UserError(f"{folder} has classes without images: {_some(without)}")
    samples: dict[str, Samples] = {
        split: ImageFiles(folder, tuple(file for file, _ in splits[split]), tuple(label for _, label in splits[split]))
        for split in ("train", "val", "test")
        if split in splits
    }
    return DataSet(name, tuple(classes), samples)


def _shown(text: str) -> str:
    """Foreign text in a sentence: on one line, and not too long."""
    return repr(text if len(text) <= 100 else f"{text[:99]}…")


def _some(names: Iterable[str]) -> str:
    shown = [_shown(name) for name in names]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


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
        if known.recognise(folder):
            return known.read(folder)
    # Its folder is there but is not recognised: reading it says what it lacks.
    for folder in folders:
        if folder.is_dir() and folder != root:
            return known.read(folder)
    if download and known.archive is not None:
        fetch(known.archive, root, progress)
        return known.read(folders[0])
    raise UserError(f"{name} is not in {root}: download {known.source} and unpack it as {folders[0]}")
