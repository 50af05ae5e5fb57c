"""What the page is told: classes, neighbours and directions, against plain formulas."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from photos import photo_folder
from semaug.data.samples import load_image
from semaug.isda.covariance import Diagonal, Full, LowRank
from semaug.report.serve.answers import NEIGHBOURS, Guide, open_guide, principal
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SemaugError


def train_on(photos: Path, output: Path, **options: Any) -> Path:
    settings: dict[str, Any] = {
        "model": "small", "pretrained": False, "epochs": 2, "resize": 40, "crop": 32, "batch_size": 6,
        "method": "learnable", "val_per_class": 1, "workers": 0, "cache": None, "lr": 0.01,
    }  # fmt: skip
    return train(TrainConfig(data=str(photos), output=output, **{**settings, **options}))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on(photos, tmp_path_factory.mktemp("runs") / "learnable", method="learnable")


@pytest.fixture(scope="module")
def guide(run: Path) -> Guide:
    return open_guide(run)


@pytest.fixture(scope="module")
def photo(photos: Path) -> Image.Image:
    return load_image(next((photos / "test").rglob("*.png")))


def test_at_zero_every_direction_shows_the_nearest_images_and_the_classes(guide: Guide, photo: Image.Image) -> None:
    answer = guide.answer(photo)
    pixels = torch.tensor(guide.view.classifier.preprocessing.pixels(photo))[None]
    expected = guide.view.classifier.probabilities(pixels)[0]
    names = [guide.name(int(i)) for i in expected.argsort(descending=True)]
    assert [name for name, _ in answer["top"]] == names[:5]
    assert [share for _, share in answer["top"]] == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-4)
    distances = (guide.gallery - guide.view.features(pixels)).norm(dim=1)
    assert answer["neighbours"] == distances.argsort(stable=True)[:NEIGHBOURS].tolist()
    middle = answer["positions"].index(0)
    for way in answer["directions"]:
        assert way["neighbours"][middle] == answer["neighbours"]
        assert [name for name, _ in way["top"][middle]] == [name for name, _ in answer["top"]]
        assert len(way["neighbours"]) == len(way["top"]) == len(answer["positions"]) == 61
    used = {str(i) for way in answer["directions"] for row in way["neighbours"] for i in row}
    assert set(answer["images"]) == used | {str(i) for i in answer["neighbours"]}


def test_a_draw_at_one_is_a_draw_of_the_augmentation(guide: Guide, photo: Image.Image) -> None:
    pixels = torch.tensor(guide.view.classifier.preprocessing.pixels(photo))[None]
    feature = guide.view.features(pixels)
    answer = guide.answer(photo)
    label = torch.tensor([int(guide.view.logits(feature).argmax())])
    draws = guide.view.draws(feature, label, 5, torch.Generator().manual_seed(0))[:, 0]
    at_one = answer["positions"].index(1)
    for draw, way in zip(draws, answer["directions"], strict=False):
        nearest = (guide.gallery - draw).norm(dim=1).argsort(stable=True)[:NEIGHBOURS].tolist()
        assert way["neighbours"][at_one] == nearest
        closest = (guide.gallery - feature).norm(dim=1).min()
        assert way["length"] == pytest.approx(float((draw - feature).norm() / closest), rel=1e-4)
    assert guide.answer(photo) == answer


def test_principal_directions_are_eigenvectors() -> None:
    factors, variance = torch.randn(2, 6), torch.rand(6) + 0.1
    matrix = variance.diag() + factors.T @ factors
    for covariance in (
        LowRank(variance[None], factors[None]),
        Full(matrix[None]),
        Full(matrix[None], torch.tensor([0])),
    ):
        values, axes, _ = principal(covariance, 3)
        assert values == sorted(values, reverse=True)
        for value, axis in zip(values, axes, strict=True):
            torch.testing.assert_close(matrix @ axis, value * axis, atol=1e-4, rtol=1e-4)
    values, axes, names = principal(Diagonal(torch.tensor([[0.1, 3.0, 2.0]])), 2)
    assert values == [3.0, 2.0]
    assert axes.tolist() == [[0, 1, 0], [0, 0, 1]]
    assert names == ["dimension 1 of the feature", "dimension 2 of the feature"]
    assert principal(Diagonal(torch.full((1, 4), 0.5)), 2)[0] == []


@pytest.mark.parametrize(
    ("method", "options"),
    [("basic", {}), ("constant", {}), ("learnable", {"augmentation": Augmentation(rank=2)})],
)
def test_every_run_has_directions(
    photos: Path, photo: Image.Image, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    guide = open_guide(train_on(photos, tmp_path / "run", method=method, **options))
    names = [way["name"] for way in guide.answer(photo)["directions"]]
    assert names[:5] == [f"draw {k}" for k in range(1, 6)]
    assert len(names) == (5 if method == "constant" else 8)
    assert bool(guide.view.notes) == (method == "basic")  # which has no Σ of its own


def test_a_p2p_net_is_told_in_one_sentence(photos: Path, tmp_path: Path) -> None:
    run = train_on(photos, tmp_path / "run", method="p2p", epochs=1)
    with pytest.raises(SemaugError, match="holds a P2P-Net"):
        open_guide(run)


def test_bad_images_that_training_left_out_are_left_out_here(photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    bad = sorted((folder / "train").rglob("*.png"))[0]
    bad.write_bytes(b"no image")
    run = train_on(folder, tmp_path / "run", method="isda", on_bad_image="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guide = open_guide(run)
    assert len(guide.seen.names) == len(list((folder / "train").rglob("*.png"))) - 1 - 3  # three are for validation
    assert not any(name.endswith(bad.name) and bad.parent.name in name for name in guide.seen.names)


def test_few_images_are_spread_over_the_classes(run: Path) -> None:
    guide = open_guide(run, limit=3)
    assert sorted(guide.seen.labels.tolist()) == [0, 1, 2]
    with pytest.raises(SemaugError, match="at least 1"):
        open_guide(run, limit=0)
    with pytest.raises(IndexError):
        guide.thumbnail(3)
    with pytest.raises(IndexError):
        guide.thumbnail(-1)
