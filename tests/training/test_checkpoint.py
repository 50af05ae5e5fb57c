"""Checkpoints survive what happens to files, and no code in them runs."""

import errno
import hashlib
import io
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from semaug.training import checkpoints as checkpoint
from semaug.util.errors import SemaugError


def test_the_newest_state_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "last"
    assert checkpoint.load(file) is None
    for epoch in (1, 2):
        checkpoint.save(file, {"epoch": epoch, "weights": torch.arange(3.0), "nested": {"list": [1, 2.5, None, "a"]}})
    state = checkpoint.load(file)
    assert state is not None
    assert state["epoch"] == 2
    assert state["nested"] == {"list": [1, 2.5, None, "a"]}
    assert not list(file.parent.glob("*.part"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "last"
    checkpoint.save(file, {"epoch": 1})
    checkpoint.save(file, {"epoch": 2})
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    if damage == "missing":
        state = checkpoint.load(file)
    else:
        with pytest.warns(UserWarning, match="is damaged"):
            state = checkpoint.load(file)
    assert state == {"epoch": 1}


def test_two_damaged_checkpoints_are_an_error_not_a_new_start(tmp_path: Path) -> None:
    file = tmp_path / "last"
    for _ in range(2):
        checkpoint.save(file, {"epoch": 1})
    file.write_bytes(b"")
    checkpoint.previous(file).write_bytes(b"garbage")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(SemaugError, match="no checkpoint in"):
        checkpoint.load(file)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def torch_dump(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("dump", [pickle.dumps, torch_dump])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, dump: Callable[[object], bytes]) -> None:
    evil = dump(Malicious(tmp_path / "owned"))
    title = b"semaug checkpoint %d\n" % checkpoint.VERSION
    (tmp_path / "last").write_bytes(title + hashlib.sha256(title + evil).hexdigest().encode() + b"\n" + evil)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(SemaugError):
        checkpoint.load(tmp_path / "last")
    assert not (tmp_path / "owned").exists()


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "last"
    checkpoint.save(file, {"epoch": 1})
    checkpoint.save(file, {"epoch": 2})
    file.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert checkpoint.load(file) == {"epoch": 1}
    original = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: die() if self.name.endswith(".part") else original(self, to))
    with pytest.raises(KeyboardInterrupt):  # as if killed just before the new one has its name
        checkpoint.save(file, {"epoch": 2})
    assert checkpoint.load(file) == {"epoch": 1}


def die() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    file = tmp_path / "last"
    checkpoint.save(file, {"epoch": 1})
    checkpoint.save(file, {"epoch": 2})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if place == "fsync" else (Path, "replace")), full)
        with pytest.raises(SemaugError, match=r"^cannot write .*last: No space left on device$"):
            checkpoint.save(file, {"epoch": 3})
    assert sorted(found.name for found in tmp_path.iterdir()) == ["last", "last.previous"]
    assert checkpoint.load(file) == {"epoch": 2}


def test_content_and_names_are_synced_before_and_after_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def seen_fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def seen_replace(self: Path, to: Path) -> Path:
        done.append(f"{self.suffix or self.name} → {to.name}")
        return replace(self, to)

    checkpoint.save(tmp_path / "last", {})
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "replace", seen_replace)
    checkpoint.save(tmp_path / "last", {})
    assert done == ["file", "last → last.previous", ".part → last", "folder"]


def test_older_versions_are_migrated_one_by_one_and_newer_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = torch_dump({"epoch": 4})
    digest = hashlib.sha256(payload).hexdigest().encode()
    (tmp_path / "last").write_bytes(b"semaug checkpoint 1\n" + digest + b"\n" + payload)
    assert checkpoint.load(tmp_path / "last") == {"epoch": 4, "within": None, "warned": False}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 3)
        patch.setitem(checkpoint.MIGRATIONS, 2, lambda state: {**state, "epoch": state["epoch"] + 1})
        assert checkpoint.load(tmp_path / "last") == {"epoch": 5, "within": None, "warned": False}
        checkpoint.save(tmp_path / "last", {"epoch": 6})
    with pytest.raises(SemaugError, match="newer semaug"):
        checkpoint.load(tmp_path / "last")


def test_a_flipped_version_is_damage(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "last", {"epoch": 1})
    checkpoint.save(tmp_path / "last", {"epoch": 2})
    content = (tmp_path / "last").read_bytes()
    for digit in b"139":
        (tmp_path / "last").write_bytes(content[:18] + bytes([digit]) + content[19:])
        assert content[18:20] == b"2\n"
        with pytest.warns(UserWarning, match="damaged"):
            assert checkpoint.load(tmp_path / "last") == {"epoch": 1}
