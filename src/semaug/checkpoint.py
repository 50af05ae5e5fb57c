"""Checkpoints: written atomically with a checksum, read without running any code from the file."""

import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch

from semaug.errors import UserError
from semaug.runs import write_atomically

MAGIC = b"semaug checkpoint 1\n"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) to `path`; what was there before stays beside it as ``.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    digest = hashlib.sha256(payload).hexdigest().encode()
    if path.exists():
        path.replace(previous(path))
    write_atomically(path, MAGIC + digest + b"\n" + payload)


def previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def load(path: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint of `path` and ``.previous``, or None if there is none; damaged ones are skipped."""
    for file in (path, previous(path)):
        if not file.exists():
            continue
        state = _read(file)
        if state is not None:
            return state
        warnings.warn(f"semaug: the checkpoint {file} is damaged; trying the one before it", stacklevel=2)
    if path.exists() or previous(path).exists():
        raise UserError(f"no checkpoint in {path.parent} can be read; delete the folder to start again")
    return None


def _read(file: Path) -> dict[str, Any] | None:
    content = file.read_bytes()
    head, digest_end = len(MAGIC), len(MAGIC) + 65
    payload = content[digest_end:]
    if content[:head] != MAGIC or content[head : digest_end - 1] != hashlib.sha256(payload).hexdigest().encode():
        return None
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception:  # zip and pickle have many kinds; a refused one (code in the file) is as good as damaged
        return None
    return state if isinstance(state, dict) else None
