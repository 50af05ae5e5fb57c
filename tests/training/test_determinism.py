"""The same seed on the same machine gives the same files, with any number of workers, with or without a cache."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from photos import photo_folder
from semaug.training.methods import METHODS, Augmentation, on_p2p
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.files import read_json

TIMES = ("seconds", "images_per_second")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=3, train=4, test=2, size=36)


def trained(photos: Path, output: Path, method: Any, **options: Any) -> dict[str, Any]:
    """The results of a run, in a process whose random numbers are anywhere."""
    size = {"resize": 72, "crop": 64, "lr": 0.002} if on_p2p(method) else {"resize": 36, "crop": 32, "lr": 0.01}
    settings: dict[str, Any] = {"model": "small", "pretrained": False, "epochs": 2, "batch_size": 3, "device": "cpu"}
    settings |= {"val_per_class": 1, "workers": 0, "cache": None, **size, **options}
    augmentation = Augmentation(interval=2 if on_p2p(method) else None)
    torch.manual_seed(len(str(output)))
    return results(
        train(TrainConfig(data=str(photos), output=output, method=method, augmentation=augmentation, **settings))
    )


def results(run: Path) -> dict[str, Any]:
    """What a run writes: metrics but for the times, weights, Σ and evaluation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with open(run / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    return {
        "metrics": [json.dumps({name: value for name, value in row.items() if name not in TIMES}) for row in rows],
        "table": [{name: value for name, value in row.items() if name not in TIMES} for row in table],
        "evaluation": read_json(run / "evaluation.json"),
        **{file.name: file.read_bytes() for file in run.glob("*.safetensors")},
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_the_same_with_0_and_with_2_workers(photos: Path, tmp_path: Path, method: str) -> None:
    alone = trained(photos, tmp_path / "alone", method)
    with_workers = trained(photos, tmp_path / "with workers", method, workers=2)
    assert len(alone["metrics"]) == 2
    assert "model.safetensors" in alone
    assert alone == with_workers


def test_a_cache_changes_nothing(photos: Path, tmp_path: Path) -> None:
    without = trained(photos, tmp_path / "without", "learnable")
    cache = tmp_path / "cache"
    assert trained(photos, tmp_path / "filled", "learnable", cache=cache, workers=2) == without
    assert any(cache.iterdir())
    assert trained(photos, tmp_path / "used again", "learnable", cache=cache) == without


def test_another_seed_gives_other_files(photos: Path, tmp_path: Path) -> None:
    first, other = (trained(photos, tmp_path / str(seed), "learnable", seed=seed) for seed in (0, 1))
    assert first["metrics"] != other["metrics"]
    assert first["model.safetensors"] != other["model.safetensors"]


def test_processes_that_hash_otherwise_write_the_same(photos: Path, tmp_path: Path) -> None:
    found = []
    for seed, workers in (("1", "0"), ("2", "2")):
        output = tmp_path / seed
        options = "--model small --pretrained False --epochs 2 --batch-size 3 --val-per-class 1 --resize 36 --crop 32"
        command = ["train", "--data", str(photos), "--output", str(output), "--workers", workers, "--cache", "None"]
        subprocess.run(
            [sys.executable, "-m", "semaug", *command, *options.split(), "--device", "cpu"],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
        found.append(results(output))
    assert found[0] == found[1]
