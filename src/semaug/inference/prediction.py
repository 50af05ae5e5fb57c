"""Classification of many image files with constant memory, written as CSV or JSON lines."""

import csv
import fnmatch
import glob
import io
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch

from semaug.data.samples import IMAGE_SUFFIXES, load_image
from semaug.inference.classifier import Classifier
from semaug.inference.loop import Pixels, decode_batches
from semaug.util.errors import DataError, SemaugError, SettingError
from semaug.util.files import open_atomically, refuse_foreign
from semaug.util.names import escape_formula, printable, shown

MAX_LINE = 2**16  # of a list of files; longer than any system's paths
# How our files begin; a table of labels begins with "path,label" too.
_OUR_TABLE = b"path,label,probability"
_OUR_LINES = re.compile(rb'\{"path": "(?:[^"\\]|\\.)*", "predictions": \[')


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one file, best first; none if it cannot be read, and `error` says why."""

    path: str
    top_k: int  # number of classes that a readable file gets
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    accepted: bool | None = None  # whether the answer is sure enough; None if every answer is accepted


@dataclass(frozen=True)
class Summary:
    """Counts of the rows that :func:`write` has written."""

    count: int  # of files
    failed: int  # number of files that cannot be read
    accepted: int  # number of answers that are sure enough
    seconds: float

    @property
    def rate(self) -> float:
        """Files per second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


def expand(inputs: Iterable[Path | str]) -> Iterator[Path]:
    """List the image files that the inputs stand for, in the order of the inputs.

    Args:
        inputs: Files; folders (all images in them and in their subfolders, sorted, without hidden ones, a folder to
            which several links lead once); glob patterns (sorted); or ``-``: files and folders from standard input,
            one per line.

    Returns:
        The files. A missing one becomes a failed prediction.

    Raises:
        DataError: If a folder or pattern stands for no image, or a name is empty; before any image is read.

    Example:
        >>> files = expand(["photos", "more/*.png"])  # doctest: +SKIP
    """
    sources: list[Iterator[Path]] = []
    for text in map(str, inputs):
        path, is_folder = Path(text), os.path.isdir(text)  # unlike Path.is_dir, False for a name that is too long
        if not text:  # as from a variable of the shell that is not set; the path of the working directory
            raise DataError("the name of an image is empty; for all images in this folder, use .")
        if text == "-":
            sources.append(_stdin())
            continue
        if is_folder:
            files = _images(path)
        elif os.path.exists(text) or not set("*?[") & set(text):  # before patterns: a file name may contain brackets
            files = iter([path])
        else:
            files = _matches(path)
        first = next(files, None)
        if first is None:
            raise DataError(f"there are no images in the folder {text}" if is_folder else f"no image matches {text}")
        sources += [iter([first]), files]
    if not sources:
        raise DataError("there is nothing to classify: name files, folders or patterns, or - for a list on stdin")
    return chain.from_iterable(sources)


def _stdin() -> Iterator[Path]:
    while line := sys.stdin.buffer.readline(MAX_LINE + 1):  # bytes: a file name need not be valid text
        if len(line) > MAX_LINE:
            raise DataError(f"a line on standard input has more than {MAX_LINE} bytes: no file has such a name")
        if name := os.fsdecode(line.rstrip(b"\r\n")):
            yield from _images(Path(name)) if os.path.isdir(name) else [Path(name)]


def _matches(pattern: Path) -> Iterator[Path]:
    """The images that match a glob pattern, or are in a folder that does.

    Below ``**`` folders are searched as by :func:`_images`: Python's glob would follow links that lead back forever.
    """
    if "**" not in pattern.parts:
        yield from chain.from_iterable(map(_images, sorted(map(Path, glob.iglob(str(pattern))))))
        return
    start = next(place for place, part in enumerate(pattern.parts) if set("*?[") & set(part))
    folder, wanted = Path(*pattern.parts[:start]), (*pattern.parts[start:], "**")
    if os.path.isdir(folder):
        yield from (file for file in _images(folder) if _fits(file.relative_to(folder).parts, wanted))


def _fits(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the names of a path match the parts of a pattern."""
    if not wanted:
        return not names
    if wanted[0] == "**":
        return _fits(names, wanted[1:]) or (bool(names) and _fits(names[1:], wanted))
    return bool(names) and fnmatch.fnmatch(names[0], wanted[0]) and _fits(names[1:], wanted[1:])


def _images(path: Path) -> Iterator[Path]:
    """The images at or below a path, sorted. A folder to which several links lead is searched once."""
    levels, visited = [iter([path])], set[tuple[int, int]]()
    while levels:
        current = next(levels[-1], None)
        if current is None:
            levels.pop()
            continue
        try:
            state = current.stat()
            is_folder = stat.S_ISDIR(state.st_mode)
            names = sorted(entry.name for entry in current.iterdir()) if is_folder else []  # smaller than paths
        except FileNotFoundError:  # a link to nothing, whose prediction will fail
            is_folder = False
        except OSError as error:
            raise DataError(f"cannot read {shown(str(current))}: {error.strerror}") from error
        if not is_folder:
            if current.suffix.lower() in IMAGE_SUFFIXES:
                yield current
        elif (state.st_dev, state.st_ino) not in visited:
            visited.add((state.st_dev, state.st_ino))
            levels.append(map(current.joinpath, (name for name in names if not name.startswith("."))))


def predict(
    classifier: Classifier,
    inputs: Iterable[Path | str],
    top_k: int = 5,
    batch_size: int = 64,
    workers: int | None = None,
    threshold: float | None = None,
) -> Iterator[Prediction]:
    """Predict the most probable classes of image files.

    Args:
        classifier: The classifier.
        inputs: Image files, see :func:`expand`; may be endless, as at most two batches are read ahead.
        top_k: Number of classes per image, ≥ 1; all if there are fewer.
        batch_size: Images per batch, ≥ 1.
        workers: Threads that decode images; None: one for each core, at most 8.
        threshold: Probability from which an answer is accepted
            (:func:`semaug.inference.calibration.choose_threshold`); None: every answer.

    Returns:
        The predictions, in the order of ``inputs``. An unreadable file becomes a prediction with an ``error``.

    Raises:
        SettingError: If a number is below 1.
        ModelError: If the network's outputs are not finite.

    Example:
        >>> answers = list(predict(classifier, expand(["photos"])))  # doctest: +SKIP
    """
    if top_k < 1 or batch_size < 1:
        raise SettingError(f"`top_k` ({top_k}) and `batch_size` ({batch_size}) must be at least 1")
    return _predictions(classifier, inputs, min(top_k, len(classifier.classes)), batch_size, workers, threshold)


def _predictions(
    classifier: Classifier,
    inputs: Iterable[Path | str],
    top_k: int,
    batch_size: int,
    workers: int | None,
    threshold: float | None,
) -> Iterator[Prediction]:
    def load(path: Path | str) -> tuple[str, Pixels | str]:
        try:
            return str(path), classifier.preprocessing.pixels(load_image(path))
        except SemaugError as error:
            return str(path), str(error)
        except Exception as error:  # a decoder may raise anything; the other files still get their predictions
            return str(path), f"cannot read the image {printable(path)}: {type(error).__name__}: {error}"

    for batch in decode_batches(load, inputs, batch_size, workers):
        images = [pixels for _, pixels in batch if not isinstance(pixels, str)]
        ranked = iter(classifier.ranked(torch.from_numpy(np.stack(images)), top_k) if images else ())
        for path, pixels in batch:
            if isinstance(pixels, str):
                yield Prediction(path, top_k, error=pixels, accepted=None if threshold is None else False)
            else:
                indices, values = next(ranked)
                accepted = None if threshold is None else values[0] >= threshold
                labels = tuple(classifier.classes[i] for i in indices)
                yield Prediction(path, top_k, labels, tuple(values), accepted=accepted)


def write(
    predictions: Iterable[Prediction], destination: Path | None, format: Literal["csv", "jsonl"] = "csv"
) -> Summary:
    """Write predictions as they come.

    Args:
        predictions: The predictions.
        destination: The file, which appears when it is complete. It replaces one with earlier answers, even if that was
            edited: answers have no checksum, since other programs read them. None: standard output.
        format: ``"csv"``: columns path, label, probability, label_2, probability_2, …, error and, if answers may be
            rejected, accepted (yes or no); paths and labels that a spreadsheet would run as a formula get a leading
            apostrophe, which our table reader removes. ``"jsonl"``: one object per line, in ASCII; names and numbers
            are exact.

    Returns:
        Number of files, failures and the time.

    Raises:
        SettingError: If the format is unknown.
        FileError: If the file cannot be written; before the first prediction is made.

    Example:
        >>> write(predict(classifier, expand(["photos"])), Path("answers.csv"))  # doctest: +SKIP
    """
    if format not in ("csv", "jsonl"):
        raise SettingError(f"`format` must be csv or jsonl, not {format!r}")
    start, count, failed, accepted = time.perf_counter(), 0, 0, 0
    clean = printable if destination is None and sys.stdout.isatty() else str
    with _output(destination) as file:
        table = csv.writer(file)  # lines end with CR LF: with LF, Python 3.11 does not quote a cell that contains CR
        for prediction in predictions:
            if format == "jsonl":
                file.write(json.dumps(_json_row(prediction)) + "\n")
            else:
                if count == 0:
                    table.writerow(_csv_header(prediction.top_k) + ["accepted"] * (prediction.accepted is not None))
                table.writerow(map(clean, _csv_row(prediction)))
            count += 1
            failed += prediction.error is not None
            accepted += prediction.error is None and prediction.accepted is not False
        if count == 0 and format == "csv":
            table.writerow(_csv_header(1))
    return Summary(count, failed, accepted, time.perf_counter() - start)


def _csv_header(top_k: int) -> list[str]:
    ranks = ["", *(f"_{rank}" for rank in range(2, top_k + 1))]
    return ["path", *(f"{column}{rank}" for rank in ranks for column in ("label", "probability")), "error"]


def _csv_row(prediction: Prediction) -> list[str]:
    ranked = zip(prediction.labels, prediction.probabilities, strict=True)
    cells = [cell for label, value in ranked for cell in (escape_formula(label), f"{value:.6g}")]
    cells += [""] * (2 * prediction.top_k - len(cells))
    accepted = [] if prediction.accepted is None else ["yes" if prediction.accepted else "no"]
    return [escape_formula(prediction.path), *cells, escape_formula(prediction.error or ""), *accepted]


def _json_row(prediction: Prediction) -> dict[str, Any]:
    ranked = zip(prediction.labels, prediction.probabilities, strict=True)
    answers = [{"label": label, "probability": probability} for label, probability in ranked]
    row = {"path": prediction.path, "predictions": answers, "error": prediction.error}
    return row if prediction.accepted is None else {**row, "accepted": prediction.accepted}


@contextmanager
def _output(destination: Path | None) -> Iterator[IO[str]]:
    # surrogateescape: file names that are not valid text are written as their bytes
    if destination is not None:
        refuse_foreign(destination, _OUR_TABLE, _OUR_LINES)
        with open_atomically(destination, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")  # as in a file
        yield sys.stdout
        sys.stdout.flush()
