"""Classes with different numbers of images: samplers, weights, and the accuracy that selects."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from photos import photo_folder, quick_config
from semaug.data.augmentation import PLAIN
from semaug.data.readers import read_data
from semaug.data.shards import write_shards
from semaug.inference.runs import read_metrics
from semaug.network.models import read_weights
from semaug.training import batches
from semaug.training.batches import Batches, PixelLoader, class_weights
from semaug.training.state import EpochState
from semaug.training.trainer import train
from semaug.util.errors import SettingError
from semaug.util.untrusted import read_json


@pytest.fixture(scope="module")
def long_tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes with 8, 4 and 1 training images, and 4 test images each."""
    root = photo_folder(tmp_path_factory.mktemp("tail"))
    for folder, count in zip(sorted((root / "train").iterdir()), (8, 4, 1), strict=True):
        for file in sorted(folder.iterdir())[count:]:
            file.unlink()
    return root


def plans(data: Path, sampler: str, state: EpochState | None = None, epoch: int = 3) -> Iterator[batches._Plan]:
    config = quick_config(data, Path("unused"), sampler=sampler, batch_size=2).resolve()
    samples, loader = read_data(str(data)).splits["train"], PixelLoader(config.preprocessing, torch.device("cpu"), 0)
    batch = Batches(samples, samples, PLAIN, config, loader)
    return batch._plans(epoch, state or EpochState(batch.images))


def test_weights_are_those_of_scikit_learn() -> None:
    labels = np.repeat([0, 1, 3], [60, 12, 3])
    weights = class_weights(torch.tensor(labels).bincount(), "balanced")
    expected = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    np.testing.assert_allclose(weights.numpy()[[0, 1, 3]], expected)
    root = class_weights(torch.tensor(labels).bincount(), "square-root")
    np.testing.assert_allclose(root[3] / root[0], 20**0.5)
    np.testing.assert_allclose(root[labels].mean(), 1)


@pytest.mark.parametrize(("sampler", "power"), [("balanced", 0.0), ("square-root", 0.5)])
def test_classes_are_drawn_in_the_proportions_of_the_sampler(long_tail: Path, sampler: str, power: float) -> None:
    labels = torch.tensor(read_data(str(long_tail)).splits["train"].labels)
    drawn = torch.cat([plan.indices for epoch in range(300) for plan in plans(long_tail, sampler, epoch=epoch)])
    expected = torch.tensor([8.0, 4.0, 1.0]) ** power
    shares = labels[drawn].bincount() / len(drawn)
    torch.testing.assert_close(shares, expected / expected.sum(), atol=0.04, rtol=0)
    within = drawn[labels[drawn] == 0].bincount(minlength=8)
    assert within.min() > 0.6 * within.max(), "the images of a class are drawn equally often"


def test_draws_depend_neither_on_ranks_nor_on_where_an_epoch_resumes(
    long_tail: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(plans(long_tail, "balanced"))
    rest = list(plans(long_tail, "balanced", EpochState(13, step=1, generator=whole[0].generator)))
    monkeypatch.setattr(batches.distributed, "shard", lambda rows: rows[1::2])
    of_a_rank = list(plans(long_tail, "balanced"))
    for one, other in [*zip(whole[1:], rest, strict=True), *zip(whole, of_a_rank, strict=True)]:
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.boxes, other.boxes)


def test_the_mean_of_classes_selects_and_a_class_of_one_image_is_counted_once(long_tail: Path, tmp_path: Path) -> None:
    settings = {"method": "isda", "select_by": "mean-of-classes", "class_weights": "balanced", "val_per_class": 2}
    run = train(quick_config(long_tail, tmp_path / "run", **settings))
    rows = read_metrics(run)
    best = max(rows, key=lambda row: row["val_mean_class_accuracy"])
    assert read_json(run / "evaluation.json")["best_epoch"] == best["epoch"]
    assert all("val_top1" in row for row in rows)
    count = read_weights(run / "source.safetensors")["count"]
    assert count.tolist() == [6 * best["epoch"], 2 * best["epoch"], 1]


def test_validation_and_evaluation_agree_on_the_mean_of_classes(long_tail: Path, tmp_path: Path) -> None:
    settings = {"method": "basic", "select": "last", "epochs": 1, "sampler": "square-root"}
    run = train(quick_config(long_tail, tmp_path / "run", **settings))
    [row], evaluation = read_metrics(run), read_json(run / "evaluation.json")
    assert row["val_mean_class_accuracy"] == pytest.approx(evaluation["mean_class_accuracy"], abs=1e-6)


def test_a_sampler_needs_images_in_any_order(long_tail: Path, tmp_path: Path) -> None:
    write_shards(read_data(str(long_tail)), tmp_path / "shards")
    config = quick_config(tmp_path / "shards", tmp_path / "run", sampler="balanced", images_on="stream")
    with pytest.raises(SettingError, match="`sampler` balanced draws images in any order"):
        train(config)
