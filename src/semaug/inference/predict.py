"""Classify many image files with constant memory, and write the result as a table.

``write(predict(classifier, expand(["photos", "more/*.png"])), Path("labels.csv"))``
"""

import csv
import glob
import io
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from semaug.data.images import Preprocessing
from semaug.data.samples import load_image
from semaug.inference.runs import Classifier
from semaug.util.errors import SemaugError, printable
from semaug.util.spreadsheets import escape_formula

IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))

Item = TypeVar("Item")
Result = TypeVar("Result")
Pixels = npt.NDArray[np.uint8]
Format = Literal["csv", "jsonl"]


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one file, best first; none where the file could not be read, which `error` tells."""

    path: str
    top_k: int  # the number of classes that a readable file gets
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Summary:
    """How many files were classified, how many of them could not be read, and how fast it went."""

    count: int
    failed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Files per second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------- inputs


def expand(inputs: Iterable[Path | str]) -> Iterator[Path]:
    """The image files that the inputs stand for, in the order of the inputs.

    An input is a file, a folder (its images, those of subfolders too, sorted; hidden ones are left out), a glob pattern
    (sorted), or ``-``: files and folders from standard input, one per line. Inputs that stand for nothing are a
    :class:`SemaugError` at once, before any image is read. Lines of standard input are not checked, as they may still be
    on their way: a file among them that is not there becomes a failed prediction.
    """
    sources = [_source(str(given)) for given in inputs]
    if not sources:
        raise SemaugError("there is nothing to classify: name files, folders or patterns, or - for a list on stdin")
    return chain.from_iterable(sources)


def _source(given: str) -> Iterator[Path]:
    if given == "-":
        return _listed_on_stdin()
    path = Path(given)
    if path.is_dir():
        return _not_empty(_images_under(path), f"there are no images in the folder {given}")
    if path.exists():  # before patterns: names of files may have brackets
        return iter((path,))
    if glob.has_magic(given):
        matches = sorted(Path(match) for match in glob.iglob(given, recursive=True))
        images = (found for match in matches for found in _images_at(match))
        return _not_empty(images, f"no image matches {given}")
    raise SemaugError(f"there is no file or folder {given}")


def _not_empty(paths: Iterator[Path], otherwise: str) -> Iterator[Path]:
    first = next(paths, None)
    if first is None:
        raise SemaugError(otherwise)
    return chain((first,), paths)


def _listed_on_stdin() -> Iterator[Path]:
    for line in sys.stdin.buffer:  # bytes: a name need not be text in any encoding
        name = os.fsdecode(line.rstrip(b"\r\n"))
        if name:
            path = Path(name)
            yield from _images_under(path) if path.is_dir() else (path,)


def _images_at(path: Path, ancestors: frozenset[str] = frozenset()) -> Iterator[Path]:
    if path.is_dir():
        yield from _images_under(path, ancestors)
    elif path.suffix.lower() in IMAGE_SUFFIXES:
        yield path


def _images_under(folder: Path, ancestors: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The images below a folder in the order of sorted paths, one folder's names in memory at a time."""
    real = os.path.realpath(folder)
    if real in ancestors:  # a link to a folder that it lies in
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())  # paths would take four times the memory
    except OSError as error:
        raise SemaugError(f"cannot read the folder {folder}: {error.strerror}") from error
    for name in names:
        if not name.startswith("."):
            yield from _images_at(folder / name, ancestors | {real})


# ------------------------------------------------------------------------------------------------------ prediction


def default_workers() -> int:
    """Threads that decode images: a few are enough to keep a network busy."""
    return min(8, os.cpu_count() or 1)


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int) -> Iterator[Result]:
    """Results of `function` in the order of the items, made in threads, at most `ahead` of them before their turn."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def predict(
    classifier: Classifier,
    inputs: Iterable[Path | str],
    top_k: int = 5,
    batch_size: int = 64,
    workers: int | None = None,
) -> Iterator[Prediction]:
    """The `top_k` most probable classes (or all, where there are fewer) of image files, in the order of `inputs`.

    `inputs` are files, see :func:`expand`, and may be endless: what is read ahead is at most two batches. A file that
    cannot be read becomes a prediction with an `error`, and the rest goes on.
    """
    if top_k < 1 or batch_size < 1:
        raise SemaugError(f"top-k ({top_k}) and the batch size ({batch_size}) must be at least 1")
    workers = default_workers() if workers is None else max(1, workers)
    return _predictions(classifier, inputs, min(top_k, len(classifier.classes)), batch_size, workers)


def _predictions(
    classifier: Classifier, inputs: Iterable[Path | str], top_k: int, batch_size: int, workers: int
) -> Iterator[Prediction]:
    def decode(path: Path | str) -> tuple[str, Pixels | str]:
        return str(path), _pixels_or_error(Path(path), classifier.preprocessing)

    decoded = in_order(decode, inputs, workers, ahead=2 * batch_size)
    while batch := list(islice(decoded, batch_size)):
        readable = [pixels for _, pixels in batch if not isinstance(pixels, str)]
        ranked = iter(_ranked(classifier, readable, top_k) if readable else ())
        for path, pixels in batch:
            if isinstance(pixels, str):
                yield Prediction(path, top_k, error=pixels)
            else:
                yield Prediction(path, top_k, *next(ranked))


def _pixels_or_error(path: Path, preprocessing: Preprocessing) -> Pixels | str:
    try:
        return preprocessing.pixels(load_image(path))
    except SemaugError as error:
        return str(error)
    except Exception as error:  # whatever a decoder does on one broken file, the others are still wanted
        return f"cannot read the image {printable(path)}: {type(error).__name__}: {error}"


def _ranked(
    classifier: Classifier, images: list[Pixels], top_k: int
) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    probabilities = classifier.probabilities(torch.from_numpy(np.stack(images)))
    if not probabilities.isfinite().all():
        raise SemaugError("the network's outputs are not finite numbers: its weights are of no use")
    # stable: of equally probable classes the first one comes first, as in the evaluation
    values, indices = probabilities.sort(dim=1, descending=True, stable=True)
    for row, columns in zip(values[:, :top_k].tolist(), indices[:, :top_k].tolist(), strict=True):
        yield tuple(classifier.classes[column] for column in columns), tuple(row)


# ---------------------------------------------------------------------------------------------------------- output


def write(predictions: Iterable[Prediction], destination: Path | None, format: Format = "csv") -> Summary:
    """Write predictions to a file, or to standard output (None), as they come; a file appears when it is complete.

    CSV: columns path, label, probability, label_2, probability_2, …, error. Paths and labels that a spreadsheet would
    run as a formula get a leading apostrophe, which our reader of tables takes away. JSONL: one object per line, ASCII,
    every name and number exact.
    """
    if format not in ("csv", "jsonl"):
        raise SemaugError(f"the format must be csv or jsonl, not {format!r}")
    write_rows = _write_csv if format == "csv" else _write_jsonl
    count = failed = 0

    def counted() -> Iterator[Prediction]:
        nonlocal count, failed
        for prediction in predictions:
            count += 1
            failed += prediction.error is not None
            yield prediction

    start = time.perf_counter()
    with _opened(destination) as file:
        write_rows(counted(), file)
    return Summary(count, failed, time.perf_counter() - start)


def _write_csv(predictions: Iterator[Prediction], file: TextIO) -> None:
    first = next(predictions, None)
    top_k = 1 if first is None else first.top_k
    writer = csv.writer(file)  # lines end with CR LF: with LF alone, Python 3.11 leaves a CR in a cell without quotes
    ranks = ("", *(f"_{rank}" for rank in range(2, top_k + 1)))
    writer.writerow(["path", *(f"{column}{rank}" for rank in ranks for column in ("label", "probability")), "error"])
    for prediction in chain(() if first is None else (first,), predictions):
        cells = [escape_formula(prediction.path)]
        for label, probability in zip(prediction.labels, prediction.probabilities, strict=True):
            cells += [escape_formula(label), f"{probability:.6g}"]
        cells += [""] * (1 + 2 * top_k - len(cells))
        writer.writerow([*cells, escape_formula(prediction.error or "")])


def _write_jsonl(predictions: Iterator[Prediction], file: TextIO) -> None:
    for prediction in predictions:
        ranked = [
            {"label": label, "probability": probability}
            for label, probability in zip(prediction.labels, prediction.probabilities, strict=True)
        ]
        file.write(json.dumps({"path": prediction.path, "predictions": ranked, "error": prediction.error}) + "\n")


@contextmanager
def _opened(destination: Path | None) -> Iterator[TextIO]:
    # surrogateescape: names of files that are not text are written as the bytes that they are
    if destination is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape", newline="")
        yield sys.stdout
        sys.stdout.flush()
        return
    if destination.is_dir():
        raise SemaugError(f"cannot write {destination}: it is a folder")
    unfinished = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        file = open(unfinished, "w", encoding="utf-8", errors="surrogateescape", newline="")  # noqa: SIM115
    except OSError as error:
        raise SemaugError(f"cannot write {destination}: {error.strerror}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(destination)
    finally:
        unfinished.unlink(missing_ok=True)
