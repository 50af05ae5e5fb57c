"""The demonstration on the embedded birds."""

import json
from pathlib import Path

import pytest

from semaug.cli.main import main
from semaug.studies import demo
from semaug.training.settings import TrainConfig


def test_each_method_is_trained_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[Path] = []

    def train(config: TrainConfig) -> Path:
        assert (config.data, config.epochs, config.seed) == ("birds", 2, 7)
        folder = config.output
        assert folder is not None
        folder.mkdir(parents=True)
        scores = {"top1": 0.64, "count": 400, "mean_class_accuracy": 0.5, "calibration_error": 0.125}
        (folder / "evaluation.json").write_text(json.dumps(scores))
        (folder / "metrics.jsonl").write_text('{"seconds": 1.0}\n{"seconds": 2.0}\n')
        return folder

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "write_report", lambda runs, page: reported.extend(runs))
    words = ["demo", "--methods", "basic", "isda", "--epochs", "2", "--seed", "7", "--output", str(tmp_path)]
    assert main(words) == 0
    assert reported == [tmp_path / "basic", tmp_path / "isda"]
    shown = capsys.readouterr().out
    for text in (
        "basic",
        "isda",
        "64.0",
        "2.4",
        "50.0",
        "0.125",
        "1.5",
        "One seed on 400 test images: a difference below 7 points may be chance",
    ):
        assert text in shown
