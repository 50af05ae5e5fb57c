"""Variables of MATLAB files, versions 5 to 7.

scipy's reader is not used because damaged files can crash the process.
"""

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from semaug.data.annotations import read_content
from semaug.util.errors import DataError

# MATLAB's file format, version 5: elements that hold others, number formats, text encodings, and classes of arrays.
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
_ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_CELL, _STRUCT, _TEXT, _NUMERIC = 1, 2, 4, range(6, 16)
_MAX_INFLATED_BYTES = 2**25  # of a compressed variable; those of Stanford Cars have 10 MB


def read_variable(path: Path, variable: str) -> list[Any]:
    """The elements of an array in a file: a number, text (str), struct (dict) or array (list) each."""
    content = memoryview(read_content(path))
    try:
        order = {b"IM": "<", b"MI": ">"}[bytes(content[126:128])]
        for kind, body in _elements(content[128:], order):
            if kind == _COMPRESSED:
                inflated = zlib.decompressobj().decompress(body, _MAX_INFLATED_BYTES)
                kind, body = next(_elements(memoryview(inflated), order))
            if kind == _MATRIX and _name(body, order) == variable and isinstance(value := _value(body, order), list):
                return value
    except (LookupError, ValueError, struct.error, zlib.error, StopIteration, RecursionError) as error:
        raise DataError(f"{path} is not a MATLAB file of version 5 to 7, or is damaged") from error
    raise DataError(f"{path} has no variable {variable}")


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Kind and content of the elements in a part of a file."""
    position = 0
    while position < len(content):
        kind, size = struct.unpack_from(f"{order}II", content, position)
        start, end = position + 8, position + 8 + size + (-size % 8 if kind != _COMPRESSED else 0)
        if kind >> 16:  # up to four bytes of content take the place of the size, which is beside the kind
            kind, size, start, end = kind & 0xFFFF, kind >> 16, position + 4, position + 8
        if start + size > min(end, len(content)):
            raise ValueError("an element is longer than its container")
        yield kind, content[start : start + size]
        position = end


def _name(body: memoryview, order: str) -> str:
    """Name of an array."""
    _, _, (_, name) = islice(_elements(body, order), 3)
    return bytes(name).decode("latin-1")


def _value(body: memoryview, order: str) -> Any:
    """Value of an array; its shape is ignored."""
    if not body:  # an empty cell
        return []
    parts = _elements(body, order)
    (_, flags), _, _ = next(parts), next(parts), next(parts)
    array_class = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    value: Any = None
    if array_class == _CELL:
        value = [_value(cell, order) for _, cell in parts]
    elif array_class == _STRUCT:
        (_, width), (_, names) = next(parts), next(parts)
        step = max(struct.unpack_from(f"{order}i", width)[0], 1)
        fields = [bytes(names[i : i + step]).split(b"\0")[0].decode() for i in range(0, len(names), step)]
        values = [_value(value, order) for _, value in parts]
        value = [dict(zip(fields, row, strict=True)) for row in zip(*[iter(values)] * len(fields), strict=True)]
    elif array_class == _TEXT:
        kind, text = next(parts, (2, b""))
        encoding = _ENCODINGS[kind]
        endian = {"<": "-le", ">": "-be"}[order] if encoding in ("utf-16", "utf-32") else ""
        value = bytes(text).decode(encoding + endian)
    elif array_class in _NUMERIC:
        kind, numbers = next(parts)
        letter = _NUMBERS[kind]
        value = list(struct.unpack(f"{order}{len(numbers) // struct.calcsize(f'={letter}')}{letter}", numbers))
    return value
