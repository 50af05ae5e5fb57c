"""Bounded reads of regular files, and JSON of a known form."""

import errno
import os
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pytest

from fuzzing import ODD_VALUES
from semaug.util import untrusted
from semaug.util.errors import FileError
from semaug.util.files import write_json
from semaug.util.untrusted import (
    add_checksum,
    is_intact,
    map_array,
    open_regular,
    parse_json,
    read_array,
    read_bytes,
    read_json,
    read_json_lines,
)


def test_only_regular_files_of_limited_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"content")
    (tmp_path / "link").symlink_to(file)
    assert read_bytes(file, 7) == read_bytes(tmp_path / "link", 7) == b"content"
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "sparse", "wb") as sparse:
        sparse.truncate(20 * 2**30)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in {
        tmp_path / "sparse": "it has more than 1000 bytes",
        tmp_path / "pipe": "it is not a regular file",
        tmp_path: "it is not a regular file",
        Path("/dev/zero"): "it is not a regular file",
        tmp_path / "absent": "there is no file",
        tmp_path / "loop": "symbolic links",
        tmp_path / ("x" * 300): "too long",
        Path(*["x" * 200] * 30): "too long",
        tmp_path / "null\0": "null",
    }.items():
        with pytest.raises(FileError, match=reason):
            read_bytes(path, 1000)
    with pytest.raises(FileError, match="more than 6 bytes"):
        open_regular(file, 6)
    with pytest.raises(FileError, match="more than 6 bytes"):
        read_bytes(Path("/proc/self/status"), 6)  # its size is said to be 0


def test_json_is_read_back_or_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"λ": [1, None, "😀"]})
    assert read_json(path) == {"λ": [1, None, "😀"]}
    for content, reason in (
        (b"{", "cannot read"),
        (b"\xff", "cannot read"),
        (b"[" * 200_000, "nested too deeply"),
        (b'["\\uD800"]', "half a character"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "it has 'b' twice in one object"),
        (b"9" * 5000, "cannot read"),
        (None, "there is no file"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(FileError, match=reason):
            read_json(path)
    path.write_text('{"a": 1}\n\n{"a": 2}\n{')
    with pytest.raises(FileError, match="a.json line 4"):
        read_json_lines(path, dict[str, int])
    write_json(path, list(range(50)))
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 50)
    with pytest.raises(FileError, match="more than 50 bytes"):
        read_json(path)


class Inner(TypedDict):
    size: int


class Outer(TypedDict):
    name: str
    inner: list[Inner]
    place: NotRequired[tuple[float, float]]
    kind: NotRequired[Literal["a", 1] | None]
    more: NotRequired[dict[str, bool]]


SOUND: dict[str, Any] = {"name": "x", "inner": [{"size": 3}], "place": [0, 1.5], "kind": None, "more": {"k": True}}


def test_json_of_another_form_is_refused_and_the_place_named() -> None:
    def parsed(**changes: object) -> object:
        return parse_json(untrusted.json.dumps({**SOUND, **changes}).encode(), "a.json", Outer)

    assert parsed(unknown=3) == {**SOUND, "unknown": 3}
    assert parsed(kind="a")
    for changes, sentence in (
        ({"name": 3}, "name should be text"),
        ({"inner": {}}, "inner should be a list"),
        ({"inner": [{"size": 1}, {"size": True}]}, "inner.1.size should be a whole number"),
        ({"inner": [{"size": 2**63}]}, "inner.0.size should be a whole number"),
        ({"inner": [{}]}, "inner.0 should be an object with size"),
        ({"place": [1]}, "place should be a list of 2"),
        ({"place": [1, float("nan")]}, "place.1 should be a number"),
        ({"kind": True}, "kind should be a or 1"),
        ({"more": {"k": 1}}, "more.k should be true or false"),
    ):
        with pytest.raises(FileError, match=rf"^cannot read a.json: {sentence}$"):
            parsed(**changes)
    for value in ODD_VALUES:
        if value != {}:
            with pytest.raises(FileError):
                parse_json(untrusted.json.dumps(value).encode(), "a.json", Outer)


def saved(file: Path, array: np.ndarray) -> None:
    with open(file, "wb+") as opened:
        np.save(opened, array)
        add_checksum(opened)


def test_arrays_of_another_shape_or_size_are_refused(tmp_path: Path) -> None:
    array, file = np.arange(6, dtype=np.uint8).reshape(2, 3), tmp_path / "a.npy"
    saved(file, array)
    assert (map_array(file, (2, 3), np.uint8) == array).all()
    assert is_intact(file, (2, 3), np.uint8)
    with open_regular(file) as opened:
        assert (read_array(opened, 6) == array).all()
    with open_regular(file) as opened, pytest.raises(FileError, match="array is damaged: an unexpected shape"):
        read_array(opened, 5)
    for shape, kind in (((3, 2), np.uint8), ((2, 3), np.int8)):
        with pytest.raises(FileError, match="is damaged; remove it"):
            map_array(file, shape, kind)
        assert not is_intact(file, shape, kind)
    sound = file.read_bytes()
    for place in range(len(sound)):
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert not is_intact(file, (2, 3), np.uint8)
    file.write_bytes(sound[:-1])
    assert not is_intact(file, (2, 3), np.uint8)
    with pytest.raises(FileError, match="is damaged; remove it"):
        map_array(file, (2, 3), np.uint8)
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(FileError, match="not a regular file"):
        map_array(tmp_path / "pipe.npy", (2, 3), np.uint8)
    with pytest.raises(FileError, match="not a regular file"):
        is_intact(tmp_path / "pipe.npy", (2, 3), np.uint8)
    saved(file, np.empty((0, 3), np.uint8))
    assert is_intact(file, (0, 3), np.uint8)
    assert map_array(file, (0, 3), np.uint8).shape == (0, 3)


def test_an_array_that_the_system_does_not_map_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    saved(tmp_path / "a.npy", np.zeros(3))
    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(FileError, match=r"cannot read .*a\.npy: Too many open files"):
        map_array(tmp_path / "a.npy", (3,), np.float64)
