"""Checkpoints: written atomically with a checksum, read without running any code from the file.

A file is a line with the version, a line with the SHA-256 of that line and the rest, and the rest: what `torch.save`
wrote. In version 1 the sum was that of the rest alone.
"""

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from semaug.util.errors import SemaugError
from semaug.util.files import write_atomically

State = dict[str, Any]
VERSION = 2
HEAD = re.compile(rb"semaug checkpoint (\d{1,9})\n([0-9a-f]{64})\n")


def _from_1(state: State) -> State:
    """Version 1 was saved at the ends of epochs only, and did not say whether a warning had been given."""
    return {"within": None, "warned": False, **state} if "epoch" in state else state


MIGRATIONS: dict[int, Callable[[State], State]] = {1: _from_1}
"""How the content of a version becomes that of the next."""


def save(path: Path, state: State) -> None:
    """Write `state` (tensors and plain values) to `path`; what was there before stays beside it as ``.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    title = b"semaug checkpoint %d\n" % VERSION
    write_atomically(path, title, _sum(title, payload) + b"\n", payload, keep=previous(path))


def previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def load(path: Path) -> State | None:
    """The newest whole checkpoint of `path` and ``.previous``, or None if there is none.

    A damaged one is set aside as ``.damaged``, lest the next :func:`save` put it in the place of the whole one.
    """
    for file in (path, previous(path)):
        if not file.exists():
            continue
        state = _read(file)
        if state is not None:
            if file != path and path.exists():
                path.replace(path.with_name(path.name + ".damaged"))
            return state
        warnings.warn(f"semaug: the checkpoint {file} is damaged; trying the one before it", stacklevel=2)
    if path.exists() or previous(path).exists():
        raise SemaugError(f"no checkpoint in {path.parent} can be read; delete the folder to start again")
    return None


def _read(file: Path) -> State | None:
    checked = _checked(file)
    if checked is None:
        return None
    version, payload = checked
    if version > VERSION:
        raise SemaugError(
            f"{file} was written by a newer semaug (version {version} of checkpoints; this reads {VERSION})"
        )
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception:  # zip and pickle have many kinds; a refused one (code in the file) is as good as damaged
        return None
    return _migrated(state, version) if isinstance(state, dict) else None


def _migrated(state: State, version: int) -> State:
    for older in range(version, VERSION):
        state = MIGRATIONS[older](state)
    return state


def _checked(file: Path) -> tuple[int, memoryview] | None:
    """Version and payload of a file, if its checksum is right."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SemaugError(f"cannot read {file}: {error.strerror or error}") from error
    head = HEAD.match(content)
    if head is None or int(head[1]) < 1:
        return None
    version, payload = int(head[1]), memoryview(content)[head.end() :]
    title = b"" if version == 1 else content[: head.start(2)]
    return (version, payload) if head[2] == _sum(title, payload) else None


def _sum(title: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(title)
    digest.update(payload)
    return digest.hexdigest().encode()
