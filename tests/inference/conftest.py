"""Shared by the tests of inference: photos, a trained run, its export, and a classifier with random weights."""

from pathlib import Path

import pytest

from classifiers import tiny_classifier
from photos import photo_folder
from semaug.inference import Classifier, export, load_classifier
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.untrusted import read_json


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    return tiny_classifier(tmp_path_factory.mktemp("random") / "run")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch with a network of timm."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    sizes = {"resize": 40, "crop": 32, "batch_size": 4, "val_per_class": 2, "epochs": 1}
    options = {"model": "test_resnet", "pretrained": False, "method": "isda", "workers": 0, "cache": None, "lr": 0.01}
    return train(TrainConfig(data=str(photos), output=folder, **sizes, **options))


@pytest.fixture(scope="session")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub folder of the run, with ONNX."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("exported") / "hub"
    export(load_classifier(run), folder, hub=True, evaluation=read_json(run / "evaluation.json"))
    return folder
