"""The variables of .mat files that MATLAB wrote, in its versions 5 to 7."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semaug.data.annotations import read_content
from semaug.util.errors import SemaugError

# Of MATLAB's file format, version 5: the kinds of elements that hold others, the formats of those that hold numbers,
# the encodings of those that hold text, and the classes of arrays.
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
CELL, STRUCT, TEXT, FIRST_NUMERIC, LAST_NUMERIC = 1, 2, 4, 6, 15
MAX_INFLATED_BYTES = 2**26
"""What compressed annotations may grow to; those of Stanford Cars are some 10 MB."""


def read_variable(path: Path, variable: str) -> list[Any]:
    """The elements of an array in a .mat file: a number, a text (str), a struct (dict), or another array (list).

    Not scipy's reader, because damaged files can make that end the process.
    """
    content = memoryview(read_content(path))
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
        raise SemaugError(f"{path} is not a MATLAB file of version 5 to 7, or is damaged") from error
    raise SemaugError(f"{path} has no variable {variable}")


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
