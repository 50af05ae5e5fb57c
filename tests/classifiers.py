"""Classifiers with random weights, loaded from run directories as training writes them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from semaug.data import birds
from semaug.data.images import Preprocessing
from semaug.inference.classifier import Classifier, as_composite, load_classifier
from semaug.inference.manifest import sign
from semaug.inference.runs import FORMAT
from semaug.network.models import build_model
from semaug.training.methods import METHODS

CLASSES = [kind.name for kind in birds.species(4)]


def tiny_classifier(
    run: Path, name: str = "test_resnet", method: str = "learnable", **preprocessing: Any
) -> Classifier:
    """Write a run directory with random weights and load its classifier."""
    torch.manual_seed(1)
    settings = Preprocessing(**{"resize": 40, "crop": 32, **preprocessing})
    composite = METHODS[method].composite
    config = {
        "format": FORMAT,
        "version": "0.1.0",
        "model": name,
        "preprocessing": asdict(settings),
        "data": "/srv/someone/private/warblers",
        "method": method,
        "composite": composite,
        "output": "/srv/someone/private/run",
        "select": "val",
    }
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(config))
    (run / "classes.json").write_text(json.dumps(CLASSES))
    model = as_composite(composite, build_model(name, len(CLASSES), settings.crop), len(CLASSES))
    save_file(model.state_dict(), run / "model.safetensors")
    sign(run)
    return load_classifier(run)
