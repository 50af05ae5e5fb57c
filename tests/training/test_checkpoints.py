"""Checkpoint files survive damage and full disks, and no code in them is run."""

import errno
import hashlib
import io
import os
import pickle
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from semaug.training import checkpoints
from semaug.util.errors import FileError, RunError, SemaugError


def test_the_newest_state_is_read(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "last"
    assert checkpoints.load(file) is None
    for epoch in (1, 2):
        checkpoints.save(file, {"epoch": epoch, "weights": torch.arange(3.0), "nested": {"list": [1, 2.5, None, "a"]}})
    state = checkpoints.load(file)
    assert state is not None
    assert state["epoch"] == 2
    assert state["nested"] == {"list": [1, 2.5, None, "a"]}
    assert not list(file.parent.glob("*.part"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_after_damage_the_checkpoint_before_is_read(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "last"
    checkpoints.save(file, {"epoch": 1})
    checkpoints.save(file, {"epoch": 2})
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    assert checkpoints.load(file) == {"epoch": 1}
    sentence = f"the checkpoint {file} is damaged; trying the one before it\n"
    assert capsys.readouterr().err == ("" if damage == "missing" else sentence)


def test_two_damaged_checkpoints_are_an_error_not_a_new_start(tmp_path: Path) -> None:
    file = tmp_path / "last"
    for _ in range(2):
        checkpoints.save(file, {"epoch": 1})
    file.write_bytes(b"")
    checkpoints.previous(file).write_bytes(b"garbage")
    with pytest.raises(SemaugError, match="no checkpoint in"):
        checkpoints.load(file)


@pytest.mark.parametrize("header", [b"", b"intact"])
def test_a_sparse_checkpoint_takes_no_memory(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "last"
    for epoch in (1, 2):
        checkpoints.save(file, {"epoch": epoch})
    if not header:
        file.write_bytes(b"")
    os.truncate(file, 2**28)
    tracemalloc.start()
    try:
        assert checkpoints.load(file) == {"epoch": 1}
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_pipes_and_devices_are_no_checkpoints(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(FileError, match=f"cannot read .*{name}: it is not a regular file"):
            checkpoints.load(tmp_path / name)


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
    title = b"semaug checkpoint %d \n" % checkpoints.VERSION
    (tmp_path / "last").write_bytes(title + hashlib.sha256(title + evil).hexdigest().encode() + b"\n" + evil)
    with pytest.raises(SemaugError):
        checkpoints.load(tmp_path / "last")
    assert not (tmp_path / "owned").exists()


def test_a_damaged_checkpoint_does_not_replace_the_intact_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "last"
    checkpoints.save(file, {"epoch": 1})
    checkpoints.save(file, {"epoch": 2})
    file.write_bytes(b"")
    assert checkpoints.load(file) == {"epoch": 1}
    original = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: die() if self.name.endswith(".part") else original(self, to))
    with pytest.raises(KeyboardInterrupt):  # as if killed just before the rename
        checkpoints.save(file, {"epoch": 2})
    assert checkpoints.load(file) == {"epoch": 1}


def die() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    file = tmp_path / "last"
    checkpoints.save(file, {"epoch": 1})
    checkpoints.save(file, {"epoch": 2})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if place == "fsync" else (Path, "replace")), full)
        with pytest.raises(SemaugError, match=r"^cannot write .*last: No space left on device$"):
            checkpoints.save(file, {"epoch": 3})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last", "last.previous"]
    assert checkpoints.load(file) == {"epoch": 2}


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

    checkpoints.save(tmp_path / "last", {})
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "replace", seen_replace)
    checkpoints.save(tmp_path / "last", {})
    assert done == ["file", "last → last.previous", ".part → last", "folder"]


@pytest.mark.parametrize("version", [1, 4])
def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "VERSION", version)
        checkpoints.save(tmp_path / "last", {"epoch": 6})
    message = f"another version of semaug wrote .*last .checkpoint version {version}; this one reads 3"
    with pytest.raises(RunError, match=message):
        checkpoints.load(tmp_path / "last")


def test_a_flipped_version_is_damage(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "last", {"epoch": 1})
    checkpoints.save(tmp_path / "last", {"epoch": 2})
    content = (tmp_path / "last").read_bytes()
    for digit in b"149":
        (tmp_path / "last").write_bytes(content[:18] + bytes([digit]) + content[19:])
        assert content[18:20] == b"3 "
        assert checkpoints.load(tmp_path / "last") == {"epoch": 1}


def test_a_snapshot_keeps_values_strides_and_shared_memory(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    state = {"weight": weight, "row": weight[1], "expanded": torch.ones(1).expand(1_000_000), "none": [None, 2, ()]}
    state |= {"empty": torch.empty(0), "parameter": torch.nn.Parameter(torch.zeros(2)), "again": {"weight": weight}}
    copy = checkpoints.snapshot(state)
    expected = weight.clone()
    weight.zero_()
    assert copy["none"] == [None, 2, ()]
    assert torch.equal(copy["weight"], expected)
    assert torch.equal(copy["row"], expected[1])
    assert copy["weight"].stride() == weight.stride()
    assert copy["weight"].data_ptr() == copy["again"]["weight"].data_ptr() != weight.data_ptr()
    assert copy["expanded"].shape == (1_000_000,)
    assert copy["parameter"].shape == (2,)
    checkpoints.save(tmp_path / "copy", copy)
    assert (tmp_path / "copy").stat().st_size < 10_000, "expanded memory is stored once, not a million times"
    loaded = checkpoints.load(tmp_path / "copy")
    assert loaded is not None
    assert torch.equal(loaded["weight"], expected)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_no_damage(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    file = tmp_path / "last"
    for epoch in (1, 2):
        checkpoints.save(file, {"epoch": epoch})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        with pytest.raises(type(error)):
            checkpoints.load(file)
    assert checkpoints.load(file) == {"epoch": 2}
