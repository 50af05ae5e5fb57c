"""Files of unknown origin: bounded reads of regular files, and JSON of a known form.

Nothing here waits for a pipe, reads a device, or takes more memory than a limit. Every fault is a :class:`FileError` of
one sentence.
"""

import json
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import MISSING, fields, is_dataclass
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import (
    IO,
    Annotated,
    Any,
    BinaryIO,
    Literal,
    NotRequired,
    Required,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np
import numpy.typing as npt

from semaug.util.errors import FileError
from semaug.util.names import shown
from semaug.util.ranges import range_in

MAX_JSON_BYTES = 64_000_000
CHUNK_BYTES = 2**20
_CHECKSUM_BYTES, _CHECKSUM_CHUNK, _REPORT_BYTES = 4, 2**17, 2**26
MAX_INTEGER = 2**63


def open_regular(path: Path, limit: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file, or a link to it.
        limit: Larger files are refused, in bytes.

    Returns:
        The open file.

    Raises:
        FileError: The file is missing, is a folder, pipe or device, is too large or cannot be opened.
    """
    try:
        # without O_NONBLOCK, opening a pipe would wait for a writer; it changes nothing for regular files
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise OSError("it is not a regular file")
            if limit is not None and state.st_size > limit:
                raise OSError(f"it has more than {limit} bytes")
            return os.fdopen(descriptor, "rb")
        except OSError:
            os.close(descriptor)
            raise
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise FileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; raises FileError."""
    parts, left = list[bytes](), limit + 1
    with open_regular(path, limit) as file:
        try:
            while left > 0 and (part := file.read(min(left, CHUNK_BYTES))):  # Python allocates all of it
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    if left <= 0:  # it has grown, or its file system does not know sizes
        raise FileError(f"cannot read {path}: it has more than {limit} bytes")
    return b"".join(parts)


def read_json(path: Path, form: Any = object) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        form: The form that it must have, as a type: see :func:`_fault`; by default any.

    Returns:
        The content.

    Raises:
        FileError: The file cannot be read, has more than `MAX_JSON_BYTES`, or is not JSON of this form.
    """
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path, form)


def parse_json(content: bytes, place: object, form: Any = object) -> Any:
    """Parse JSON text that was read from `place`; otherwise like :func:`read_json`."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_object)
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which no file can hold
    except UnicodeEncodeError:
        raise FileError(f"cannot read {place}: it holds half a character (a lone surrogate)") from None
    except ValueError as error:
        raise FileError(f"cannot read {place}: {error}") from error
    except RecursionError:
        raise FileError(f"cannot read {place}: it is nested too deeply") from None
    fault = _fault(value, form, "")
    if fault is not None:
        raise FileError(f"cannot read {place}: {fault}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A name that occurs twice is an error, since readers differ in which value they use."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has {shown(twice)} twice in one object")
    return value


def read_json_lines(path: Path, form: Any = object) -> list[Any]:
    """The content of a file with one JSON value per line, each of a form; raises FileError."""
    lines = read_bytes(path, MAX_JSON_BYTES).split(b"\n")
    return [parse_json(line, f"{path} line {i}", form) for i, line in enumerate(lines, start=1) if line.strip()]


def _fault(value: Any, form: Any, place: str) -> str | None:
    """Describe how a JSON value differs from a form; None if it does not.

    Forms are ``object`` (anything), ``str``, ``bool``, ``int`` (of 64 bits), ``float`` (finite; also an integer), None,
    ``list[X]``, ``tuple[X, Y]``, ``dict[str, X]``, ``Literal``, unions, TypedDict and dataclasses, which ignore further
    keys, and numbers of a range, ``Annotated[X, Range(…)]``.
    """
    origin, parts = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        faults = [_fault(value, part, place) for part in parts]
        return None if None in faults else faults[0]
    if origin in (Required, NotRequired):
        return _fault(value, parts[0], place)
    if origin is Annotated:
        allowed, fault = range_in(form), _fault(value, parts[0], place)
        outside = fault is None and allowed is not None and value not in allowed
        return f"{place[1:][:100]} should be {allowed}" if outside else fault
    inside: list[tuple[Any, Any, str]] = []
    if _has_keys(form):
        fits = isinstance(value, dict) and _required_keys(form) <= value.keys()
        hints = get_type_hints(form, include_extras=True)
        inside = [(value[key], hints[key], key) for key in hints if key in value] if fits else []
    elif origin is dict:
        fits = isinstance(value, dict)
        inside = [(item, parts[1], key) for key, item in value.items()] if fits else []
    elif origin is list:
        fits = isinstance(value, list)
        inside = [(item, parts[0], str(i)) for i, item in enumerate(value)] if fits else []
    elif origin is tuple:
        fits = isinstance(value, list) and len(value) == len(parts)
        inside = [(item, parts[i], str(i)) for i, item in enumerate(value)] if fits else []
    elif origin is Literal:
        fits = any(type(value) is type(part) and value == part for part in parts)
    elif form is int:
        fits = type(value) is int and abs(value) < MAX_INTEGER
    elif form is float:
        fits = (type(value) is int and abs(value) < MAX_INTEGER) or (type(value) is float and math.isfinite(value))
    else:
        fits = form is object or form is Any or type(value) is form or (value is None and form is type(None))
    if not fits:
        return f"{place[1:][:100] or 'its content'} should be {_describe(form)}"
    return next((fault for item, part, key in inside if (fault := _fault(item, part, f"{place}.{key}"))), None)


def _has_keys(form: Any) -> bool:
    return is_typeddict(form) or is_dataclass(form)


def _required_keys(form: Any) -> Set[str]:
    if is_typeddict(form):
        keys: Set[str] = form.__required_keys__
        return keys
    return {field.name for field in fields(form) if field.default is MISSING}


def _describe(form: Any) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    if form in words:
        return words[form]
    if _has_keys(form):
        return f"an object with {', '.join(sorted(_required_keys(form))) or 'settings'}"
    if get_origin(form) is Literal:
        return " or ".join(map(str, get_args(form)))
    if get_origin(form) is tuple:
        return f"a list of {len(get_args(form))}"
    return "a list" if get_origin(form) is list else "an object"


def read_array(file: BinaryIO, limit: int) -> npt.NDArray[Any]:
    """Read an array in the .npy format, of at most `limit` bytes, from an open file; raises FileError if damaged."""
    try:
        shape, fortran_order, dtype = _array_header(file)
        size = math.prod(shape) * dtype.itemsize
        limit = min(limit, os.fstat(file.fileno()).st_size)
        if fortran_order or dtype.hasobject or min(shape, default=0) < 0 or size > limit:
            raise ValueError("an unexpected shape or type")
        return np.frombuffer(file.read(size), dtype).reshape(shape).copy()
    except Exception as error:  # the parser of headers raises exceptions of many kinds
        raise FileError(f"the array is damaged: {' '.join(str(error).split())[:100]}") from error


def add_checksum(file: IO[bytes]) -> None:
    """Append to a .npy file, open for reading and writing, the CRC-32 of what it holds; NumPy ignores it."""
    checksum = _crc32(file, file.seek(0, os.SEEK_END))
    file.seek(0, os.SEEK_END)
    file.write(checksum)


def is_intact(
    path: Path, shape: tuple[int, ...], dtype: Any, progress: Callable[[int, int], None] | None = None
) -> bool:
    """Whether a .npy file has a shape, a type and the checksum of :func:`add_checksum`.

    All of it is read, a little at a time: CRC-32 is several times as fast as SHA-256, and enough against damage.

    Args:
        path: The file.
        shape: The shape that it must have.
        dtype: The type that it must have.
        progress: Called with the number of rows read and their total.

    Raises:
        FileError: The file cannot be read.
    """
    with open_regular(path) as file:
        try:
            end = _skip_header(file, shape, dtype) + math.prod(shape) * np.dtype(dtype).itemsize

            def report(done: int) -> None:
                if progress is not None:
                    progress(shape[0] * done // end, shape[0])

            return _crc32(file, end, report) == file.read(_CHECKSUM_BYTES)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception:  # the parser of headers raises exceptions of many kinds
            return False


def map_array(path: Path, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Map a .npy file with a checksum into memory, copy-on-write.

    Args:
        path: The file, for which :func:`is_intact` was called: the content is not read here.
        shape: The shape that it must have.
        dtype: The type that it must have.

    Returns:
        The array.

    Raises:
        FileError: The file cannot be read, or has another shape, type or size.
    """
    with open_regular(path) as file:
        try:
            start = _skip_header(file, shape, dtype)
            # empty arrays cannot be mapped
            mapped = np.memmap(file, dtype, "c", start, shape) if math.prod(shape) else np.empty(shape, dtype)
            return cast(npt.NDArray[Any], mapped)
        except OSError as error:  # too many open files, no memory
            raise FileError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:
            raise FileError(f"{path} is damaged; remove it") from error


def _skip_header(file: BinaryIO, shape: tuple[int, ...], dtype: Any) -> int:
    """Where the content of a .npy file with a checksum starts; raises any exception if it has another form or size."""
    if _array_header(file) != (shape, False, np.dtype(dtype)):
        raise ValueError("another shape or type")
    start = file.tell()
    if os.fstat(file.fileno()).st_size != start + math.prod(shape) * np.dtype(dtype).itemsize + _CHECKSUM_BYTES:
        raise ValueError("another size")
    return start


def _crc32(file: IO[bytes], count: int, report: Callable[[int], None] = lambda done: None) -> bytes:
    """The CRC-32 of the first `count` bytes of a file, which is left after them; `report` gets the number so far."""
    file.seek(0)
    checksum = done = 0
    while part := file.read(min(count - done, _CHECKSUM_CHUNK)):
        checksum = zlib.crc32(part, checksum)
        done += len(part)
        if done % _REPORT_BYTES == 0:
            report(done)
    return checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _array_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)
