"""Checkpoint files: written atomically with a checksum, read without running any code in them.

A file is a line with the version and the run that wrote it, a line with the SHA-256 of that line and the rest, and the
rest: what `torch.save` wrote.
"""

import hashlib
import io
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semaug.util.errors import FileError, RunError, lacks_memory
from semaug.util.files import write_atomically
from semaug.util.progress import Progress
from semaug.util.untrusted import CHUNK_BYTES, open_regular

State = dict[str, Any]
VERSION = 3
MAX_HEADER_BYTES = 1_000
_HEADER = re.compile(rb"semaug checkpoint (\d{1,9})(?: ([0-9a-f-]*))?\n([0-9a-f]{64})\n")


def snapshot(state: State) -> State:
    """Copy the tensors of a state to the CPU, so that training can continue while the copy is written.

    Tensors that share memory share it in the copy too, as they do in the file. The host waits for copies from a GPU,
    which go into pinned memory: a thread that writes the copy does not touch the GPU.
    """
    memory: dict[tuple[torch.device, int], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = tensor.device, storage.data_ptr()
        if place not in memory:
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memory[place] = content.to("cpu", copy=True, non_blocking=content.is_cuda)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(memory[place].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    copy: State = pytree.tree_map_only(Tensor, copied, state)
    for device in {device for device, _ in memory if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copy


def save(path: Path, state: State, run: str = "") -> None:
    """Write a checkpoint; the file that it replaces is renamed to ``.previous``.

    Args:
        path: The file.
        state: Tensors and plain values.
        run: The run that it belongs to, in hexadecimal digits and hyphens.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    title = b"semaug checkpoint %d %s\n" % (VERSION, run.encode())
    digest = hashlib.sha256(title)
    digest.update(payload)
    write_atomically(path, title, digest.hexdigest().encode() + b"\n", payload, keep=previous(path))


def previous(path: Path) -> Path:
    """The file of the checkpoint before the one at `path`."""
    return path.with_name(path.name + ".previous")


def delete(path: Path) -> None:
    """Delete a checkpoint, the one before it and a damaged one, as far as they exist."""
    for file in (path, previous(path), _damaged(path)):
        with suppress(OSError):
            file.unlink()


def _damaged(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")


def load(path: Path, run: str | None = None) -> State | None:
    """Read the newest intact checkpoint, `path` or the one before it, onto the CPU; None if there is none.

    A damaged file is renamed to ``.damaged``, so that the next :func:`save` does not replace the intact one by it.

    Args:
        path: The file.
        run: The run that it must belong to; None for any.

    Raises:
        RunError: If no checkpoint is intact, or another run or another version of semaug wrote it.
        FileError: If the file cannot be read, or is a pipe or a device.
    """
    files = [file for file in (path, previous(path)) if file.exists()]
    for file in files:
        state = _read(file, run)
        if state is not None:
            if file != path and path.exists():
                path.replace(_damaged(path))
            return state
        Progress().say(f"the checkpoint {file} is damaged; trying the one before it")
    if files:
        raise RunError(f"no checkpoint in {path.parent} can be read; delete the folder to start again")
    return None


def _read(file: Path, run: str | None) -> State | None:
    """The state in a file; None if it is damaged."""
    with open_regular(file) as opened:
        try:
            header = _HEADER.match(opened.read(MAX_HEADER_BYTES))
            if header is None:
                return None
            # The checksum first, in pieces: a damaged or sparse file may be larger than memory.
            opened.seek(header.end())
            digest = hashlib.sha256(header.string[: header.start(3)])
            while piece := opened.read(CHUNK_BYTES):
                digest.update(piece)
            if header[3] != digest.hexdigest().encode():
                return None
            opened.seek(header.end())
            payload = opened.read()
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror or error}") from error
    if int(header[1]) != VERSION:
        versions = f"checkpoint version {int(header[1])}; this one reads {VERSION}"
        raise RunError(f"another version of semaug wrote {file} ({versions}); use that one, or choose another `output`")
    if run is not None and header[2] != run.encode():
        raise RunError(f"{file} is a checkpoint of another run; restore that of this run, or choose another `output`")
    try:
        with warnings.catch_warnings(action="ignore"):  # of formats that torch does not expect
            state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # zip and pickle raise many kinds; a file with code in it counts as damaged
        if isinstance(error, MemoryError | RuntimeError) and lacks_memory(error):
            raise
        return None
    return state if isinstance(state, dict) else None
