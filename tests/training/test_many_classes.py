"""A whole training with thousands of classes: from the image folder to the report and the predictions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from photos import quick_config
from semaug.inference.classifier import load_classifier
from semaug.inference.prediction import predict
from semaug.inference.runs import read_metrics
from semaug.report import write_report
from semaug.training.methods import Augmentation
from semaug.training.trainer import train
from semaug.util.untrusted import read_json

CLASSES = 2000


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of 8 pixels for each class."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / f"species {label:04}").mkdir()
        for i in range(2):
            pixels = rng.integers(256, size=(8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"species {label:04}" / f"{i}.png", compress_level=0)
    return folder


def test_training_evaluation_report_and_prediction_with_thousands_of_classes(images: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "resize": 10, "crop": 8, "batch_size": 250, "val_per_class": 1, "lr": 0.03}
    run = train(quick_config(images, tmp_path / "run", augmentation=Augmentation(order="pipelined"), **options))
    metrics = read_metrics(run)[0]
    assert metrics["train_loss"] == pytest.approx(np.log(CLASSES), abs=2)
    result = read_json(run / "evaluation.json")
    assert result["count"] == CLASSES
    assert [row["images"] for row in result["classes"]] == [1] * CLASSES
    assert sum(count for _, _, count in result["confusion"]) == CLASSES
    correct = sum(count for true, predicted, count in result["confusion"] if true == predicted)
    assert result["top1"] == pytest.approx(correct / CLASSES)
    write_report([run], run / "report.html")
    assert (run / "report.html").stat().st_size < 1_000_000
    (prediction,) = predict(load_classifier(run), [images / "species 0000" / "0.png"], top_k=CLASSES)
    assert sorted(prediction.labels) == [f"species {label:04}" for label in range(CLASSES)]
    assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-3)
