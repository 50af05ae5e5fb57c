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

from photos import photo_folder, quick_config
from semaug.training.methods import METHODS, Augmentation
from semaug.training.trainer import train
from semaug.util.untrusted import read_json

TIMES = ("seconds", "validation_seconds", "saving_seconds", "images_per_second")
SIZES: dict[str, Any] = {"epochs": 2, "batch_size": 3, "val_per_class": 1}


@pytest.fixture(scope="module")
def few_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("few"), species=3, train=4, test=2, size=36)


def trained(photos: Path, output: Path, method: str, **options: Any) -> dict[str, Any]:
    """The results of a run, in a process whose random generator may be in any state."""
    on_p2p = METHODS[method].composite == "p2p"
    size = {"resize": 72, "crop": 64, "lr": 0.002} if on_p2p else {"resize": 36, "crop": 32, "lr": 0.01}
    augmentation = Augmentation(interval=2 if on_p2p else None)
    torch.manual_seed(len(str(output)))
    settings = {**SIZES, **size, "method": method, "augmentation": augmentation, **options}
    return results(train(quick_config(photos, output, **settings)))


def results(run: Path) -> dict[str, Any]:
    """What a run writes: metrics without times, weights, Σ and evaluation."""
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
def test_every_method_writes_the_same_files_with_0_and_with_2_workers(
    few_photos: Path, tmp_path: Path, method: str
) -> None:
    alone = trained(few_photos, tmp_path / "alone", method)
    with_workers = trained(few_photos, tmp_path / "with workers", method, workers=2)
    assert len(alone["metrics"]) == 2
    assert "model.safetensors" in alone
    assert alone == with_workers


def test_neither_a_cache_nor_another_hash_seed_changes_anything_but_another_seed_does(
    few_photos: Path, tmp_path: Path
) -> None:
    reference = trained(few_photos, tmp_path / "reference", "learnable")
    cache = tmp_path / "cache"
    assert trained(few_photos, tmp_path / "fills the cache", "learnable", cache=cache, workers=2) == reference
    assert any(cache.iterdir())
    assert trained(few_photos, tmp_path / "uses the cache", "learnable", cache=cache) == reference

    # This process has a hash seed of its own.
    sizes = "--epochs 2 --batch-size 3 --val-per-class 1 --resize 36 --crop 32 --lr 0.01 --workers 0 --cache None"
    options = f"--method learnable --model small --pretrained False --device cpu {sizes}"
    output = tmp_path / "another process"
    subprocess.run(
        [sys.executable, "-m", "semaug", "train", "--data", few_photos, "--output", output, *options.split()],
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    assert results(output) == reference

    other = trained(few_photos, tmp_path / "seed 1", "learnable", seed=1)
    assert other["metrics"] != reference["metrics"]
    assert other["model.safetensors"] != reference["model.safetensors"]
