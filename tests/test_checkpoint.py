"""Checkpoints survive what happens to files, and no code in them runs."""

import pickle
from pathlib import Path

import pytest
import torch

from semaug import checkpoint
from semaug.errors import UserError


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
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.load(file)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    import hashlib

    evil = pickle.dumps(Malicious(tmp_path / "owned"))
    digest = hashlib.sha256(evil).hexdigest().encode()
    (tmp_path / "last").write_bytes(checkpoint.MAGIC + digest + b"\n" + evil)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError):
        checkpoint.load(tmp_path / "last")
    assert not (tmp_path / "owned").exists()
