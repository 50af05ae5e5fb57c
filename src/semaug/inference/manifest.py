"""Checksums and identity of a run directory or an exported folder, in its manifest.json.

The checksums show damage and mistakes. They are not signatures: anyone who changes a file can change them too.
"""

import hashlib
from pathlib import Path
from typing import NotRequired, TypedDict

from semaug.util.errors import FileError, RunError
from semaug.util.files import write_json
from semaug.util.untrusted import open_regular, read_json

NAME = "manifest.json"
MAX_FILE_BYTES = 40_000_000_000  # above the weights of the largest network of timm; a sparse file could take hours
FILES = (
    "config.json", "classes.json", "split.json", "metrics.jsonl", "model.safetensors", "source.safetensors",
    "evaluation.json", "samples.json", "calibration.json", "model.onnx", "model.onnx.data",
)  # fmt: skip
"""The files that have checksums, if they exist."""


class Manifest(TypedDict):
    """The content of manifest.json."""

    files: dict[str, str]  # SHA-256 by name
    run: NotRequired[str]  # a random name of the run; absent in an exported folder
    data: NotRequired[str]  # fingerprint of the data set
    weights: NotRequired[str]  # SHA-256 of the file of weights that the run started from, if there is one


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json; raises FileError if it is missing or damaged."""
    manifest: Manifest = read_json(folder / NAME, Manifest)
    return manifest


def sign(folder: Path, *more: str, run: str | None = None, data: str | None = None, weights: str | None = None) -> None:
    """Write manifest.json with the checksums of all files that a folder has now.

    Args:
        folder: A run directory or an exported folder.
        *more: Names of further files.
        run: Name of the run; None for an exported folder.
        data: Fingerprint of its data set, if it is known; an exported folder has that of its run.
        weights: Checksum of the weights that the run started from.
    """
    known = {"run": run, "data": data, "weights": weights}
    identity = {key: value for key, value in known.items() if value is not None}
    files = {name: checksum(folder / name) for name in (*FILES, *more) if (folder / name).is_file()}
    write_json(folder / NAME, {**identity, "files": files})


def add(folder: Path, name: str) -> None:
    """Add the checksum of one file, or replace it; those of all others stay."""
    manifest = read_manifest(folder)
    files = {**manifest["files"], name: checksum(folder / name)}
    write_json(folder / NAME, {**manifest, "files": files})


def verify(folder: Path, *names: str) -> None:
    """Check files of a folder against its manifest.

    Args:
        folder: A run directory or an exported folder.
        *names: Names of the files.

    Raises:
        RunError: A file has changed since it was written, or has no checksum.
        FileError: A file, or the manifest, is missing or cannot be read.
    """
    files = read_manifest(folder)["files"]
    for name in names:
        if name not in files:
            raise RunError(f"{folder / NAME} has no checksum for {name}: another program has added it")
        if checksum(folder / name) != files[name]:
            raise RunError(f"{folder / name} is damaged or was changed: its checksum is not the one in {NAME}")


def damage(folder: Path, *, weights: bool = True) -> str | None:
    """Describe damage to the files of a complete run in one sentence; None if they are intact.

    Args:
        folder: The run directory.
        weights: Whether to check the weights too, which takes seconds per gigabyte.
    """
    try:
        names = [name for name in read_manifest(folder)["files"] if weights or not name.endswith(".safetensors")]
        verify(folder, *names)
    except (FileError, RunError) as error:
        return str(error)
    return None


def is_complete(folder: Path, *, weights: bool = True) -> bool:
    """Whether a run has been trained and evaluated, and its files are intact; `weights` as for :func:`damage`."""
    if not all((folder / name).is_file() for name in (NAME, "model.safetensors", "evaluation.json")):
        return False
    return damage(folder, weights=weights) is None and "evaluation.json" in read_manifest(folder)["files"]


def checksum(file: Path) -> str:
    """The SHA-256 of a regular file; raises FileError."""
    with open_regular(file, MAX_FILE_BYTES) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
