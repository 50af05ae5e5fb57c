"""Training at the largest strength, with batches of one image, and with a single class."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from photos import photo_folder, quick_config
from semaug.inference.runs import read_metrics
from semaug.isda.precision import LARGEST_STRENGTH
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SemaugError


@pytest.fixture(scope="module")
def few_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("few"), species=3, train=4, test=1, size=36)


def config(photos: Path, output: Path, **options: Any) -> TrainConfig:
    sizes: dict[str, Any] = {"epochs": 2, "lr": 0.01, "resize": 36, "val_per_class": 1}
    return quick_config(photos, output, **{**sizes, **options})


def test_half_batches_of_one_image_with_one_image_left_over(few_photos: Path, tmp_path: Path) -> None:
    rows = read_metrics(train(config(few_photos, tmp_path / "run", batch_size=1)))  # 9 images: 2, 2, 2 and 3
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 < row["train_loss"] < 1e3 for row in rows)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 4, "micro_batch": 1}])
def test_batch_norm_with_one_value_per_channel_raises_a_clear_error(
    few_photos: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(SemaugError, match=r"BatchNorm .*batch.size"):
        train(config(few_photos, tmp_path / "run", model="resnet18", **options))


def test_a_single_class_raises_an_error_before_training(few_photos: Path, tmp_path: Path) -> None:
    first = min((few_photos / "train").iterdir())
    shutil.copytree(first, tmp_path / "photos" / first.name)
    with pytest.raises(SemaugError, match="single class"):
        train(config(tmp_path / "photos", tmp_path / "run", batch_size=2))


def test_a_strength_out_of_range_raises_a_clear_error(few_photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match=r"`strength` must be from 0 to 1e\+12, not 1"):
        train(config(few_photos, tmp_path / "run", batch_size=4, augmentation=Augmentation(strength=1e13)))


@pytest.mark.parametrize("method", ["constant", "isda", "learnable"])
def test_training_at_the_largest_strength_is_finite(few_photos: Path, tmp_path: Path, method: Any) -> None:
    augmentation = Augmentation(strength=LARGEST_STRENGTH)
    rows = read_metrics(
        train(
            config(few_photos, tmp_path / "run", method=method, batch_size=4, augmentation=augmentation, clip_norm=1.0)
        )
    )
    assert rows[1]["strength"] == LARGEST_STRENGTH / 2
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in rows)
