"""Damaged checkpoints, also with a right checksum, and any number as a setting: a result or one sentence."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples, mutated, outcome
from semaug.training import checkpoints
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.util.errors import SettingError
from semaug.util.ranges import ranges

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


SETTINGS = {name: TrainConfig for name in ranges(TrainConfig)} | {name: Augmentation for name in ranges(Augmentation)}


@examples(200)
@given(name=st.sampled_from(sorted(SETTINGS)), value=st.floats() | st.integers() | st.integers(-2, 2))
def test_numbers(name: str, value: float) -> None:
    kind = SETTINGS[name]
    settings = kind(**{name: value}, **{"crop": {"resize": 8192}, "resize": {"crop": 1}}.get(name, {}))
    config = settings if isinstance(settings, TrainConfig) else TrainConfig(augmentation=settings)
    if value in ranges(kind)[name]:
        assert config.resolve() is not None
    else:
        with pytest.raises(SettingError, match=f"^`{name}` must be {re.escape(str(ranges(kind)[name]))}, not "):
            config.resolve()
