"""Classifiers of random weights, through run directories as training leaves them."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from semaug.data import birds
from semaug.data.images import Preprocessing
from semaug.inference.runs import FORMAT, load_classifier
from semaug.network.models import build_model
from semaug.training.methods import dressed

CLASSES = [kind.name for kind in birds.species(4)]


def tiny_classifier(run: Path, name="test_resnet", method: str = "learnable", **preprocessing):
    """A classifier of random weights, through a run directory as training would leave it."""
    torch.manual_seed(1)
    settings = Preprocessing(**{"resize": 40, "crop": 32, **preprocessing})
    config = {
        "format": FORMAT,
        "version": "0.1.0",
        "model": name,
        "preprocessing": asdict(settings),
        "data": "/srv/someone/private/warblers",
        "method": method,
        "output": "/srv/someone/private/run",
        "select": "val",
    }
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(config))
    (run / "classes.json").write_text(json.dumps(CLASSES))
    model = dressed(method, build_model(name, len(CLASSES), settings.crop), len(CLASSES))
    save_file(model.state_dict(), run / "model.safetensors")
    return load_classifier(run)
