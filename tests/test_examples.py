"""The examples run as they stand, with less data."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_several_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    specification = importlib.util.spec_from_file_location("several_losses", EXAMPLES / "several_losses.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    photos = module.photos
    monkeypatch.setattr(module, "photos", lambda split, per_class: photos(split, 6))
    monkeypatch.setattr(module, "EPOCHS", 2)
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]
