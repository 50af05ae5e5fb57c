"""Damaged checkpoints are refused in one sentence, also if their checksum is right."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples, mutated, outcome
from semaug.training import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:semaug:UserWarning")


@examples(100)
@given(data=st.data(), signed=st.booleans())
def test_checkpoints(tmp_path: Path, data: st.DataObject, signed: bool) -> None:
    path = tmp_path / "last"
    path.unlink(missing_ok=True)
    checkpoints.previous(path).unlink(missing_ok=True)
    checkpoints.save(path, {"epoch": 3, "model": {"weight": torch.arange(4.0)}, "metrics": [{"loss": 0.5}]})
    title, _, payload = path.read_bytes().split(b"\n", 2)
    if signed:
        payload = data.draw(mutated(payload))
        digest = hashlib.sha256(title + b"\n" + payload).hexdigest().encode()
        path.write_bytes(b"\n".join([title, digest, payload]))
    else:
        path.write_bytes(data.draw(mutated(path.read_bytes(), near=100)))
    state, _ = outcome(checkpoints.load, path)
    assert state is None or isinstance(state, dict)
