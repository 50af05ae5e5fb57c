"""Answers for the page: classes, neighbours and directions, compared with plain formulas."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

from semaug.data.samples import load_image
from semaug.isda.covariance import Diagonal, Full
from semaug.report.serve.answers import NEIGHBOURS, Guide, open_guide, principal_directions
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import RunError, SettingError


@pytest.fixture(scope="module")
def guide(runs: dict[str, Path]) -> Guide:
    return open_guide(runs["learnable"])


@pytest.fixture(scope="module")
def photo(photos: Path) -> Image.Image:
    return load_image(next((photos / "test").rglob("*.png")))


def test_position_0_of_every_direction_shows_the_image_itself(guide: Guide, photo: Image.Image) -> None:
    answer = guide.answer(guide.view.classifier.preprocessing.pixels(photo))
    pixels = torch.tensor(guide.view.classifier.preprocessing.pixels(photo))[None]
    expected = guide.view.classifier.probabilities(pixels)[0]
    names = [guide.names[int(i)] for i in expected.argsort(descending=True)]
    assert [name for name, _ in answer["top"]] == names[:5]
    assert [share for _, share in answer["top"]] == pytest.approx(sorted(expected.tolist(), reverse=True)[:5], abs=1e-4)
    distances = (guide.gallery - guide.view.features(pixels)).norm(dim=1)
    assert answer["neighbours"] == distances.argsort(stable=True)[:NEIGHBOURS].tolist()
    middle = answer["positions"].index(0)
    for direction in answer["directions"]:
        assert direction["neighbours"][middle] == answer["neighbours"]
        assert [name for name, _ in direction["top"][middle]] == [name for name, _ in answer["top"]]
        assert len(direction["neighbours"]) == len(direction["top"]) == len(answer["positions"]) == 61
    used = {str(i) for direction in answer["directions"] for row in direction["neighbours"] for i in row}
    assert set(answer["images"]) == used | {str(i) for i in answer["neighbours"]}


def test_position_1_of_a_draw_is_a_draw_of_the_augmentation(guide: Guide, photo: Image.Image) -> None:
    pixels = torch.tensor(guide.view.classifier.preprocessing.pixels(photo))[None]
    feature = guide.view.features(pixels)
    answer = guide.answer(guide.view.classifier.preprocessing.pixels(photo))
    label = torch.tensor([int(guide.view.logits(feature).argmax())])
    draws = guide.view.draws(feature, label, 5, torch.Generator().manual_seed(0))[:, 0]
    at_one = answer["positions"].index(1)
    for draw, direction in zip(draws, answer["directions"], strict=False):
        nearest = (guide.gallery - draw).norm(dim=1).argsort(stable=True)[:NEIGHBOURS].tolist()
        assert direction["neighbours"][at_one] == nearest
        closest = (guide.gallery - feature).norm(dim=1).min()
        assert direction["length"] == pytest.approx(float((draw - feature).norm() / closest), rel=1e-4)
    assert guide.answer(guide.view.classifier.preprocessing.pixels(photo)) == answer


def test_principal_directions_are_eigenvectors() -> None:
    factors, variance, strength = torch.randn(2, 6), torch.rand(6) + 0.1, 0.25
    matrix = variance.diag() + factors.T @ factors
    for covariance in (Full(matrix[None]), Full(matrix[None], torch.tensor([0]))):
        directions = principal_directions(covariance, strength, 3)
        variances = [float(direction.offset.square().sum()) / strength for direction in directions]
        assert variances == sorted(variances, reverse=True)
        for value, direction in zip(variances, directions, strict=True):
            torch.testing.assert_close(matrix @ direction.offset, value * direction.offset, atol=1e-4, rtol=1e-4)
            assert f"{100 * value / float(matrix.trace()):.1f} % of the variance" in direction.note


def test_principal_directions_of_a_diagonal_are_dimensions() -> None:
    first, second = principal_directions(Diagonal(torch.tensor([[0.1, 9.0, 4.0]])), 1.0, 2)
    assert first.offset.tolist() == [0, 3, 0]
    assert second.offset.tolist() == [0, 0, 2]
    assert "dimension 1 of the feature" in first.note
    assert principal_directions(Diagonal(torch.full((1, 4), 0.5)), 1.0, 2) == []


@pytest.mark.parametrize("method", ["basic", "constant", "isda"])
def test_every_run_has_directions(runs: dict[str, Path], photo: Image.Image, method: str) -> None:
    guide = open_guide(runs[method])
    names = [
        direction["name"] for direction in guide.answer(guide.view.classifier.preprocessing.pixels(photo))["directions"]
    ]
    assert names[:5] == [f"draw {k}" for k in range(1, 6)]
    assert len(names) == (5 if method == "constant" else 8)
    assert bool(guide.view.notes) == (method == "basic")  # which has no Σ of its own


def test_a_p2p_net_is_one_sentence(runs: dict[str, Path]) -> None:
    with pytest.raises(RunError, match="holds a P2P-Net"):
        open_guide(runs["p2p"])


def test_an_onnx_file_is_for_the_api_alone(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="set `images` to 0 for the API alone"):
        open_guide(tmp_path / "model.onnx")


def test_images_that_training_skipped_are_left_out(photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    bad = sorted((folder / "train").rglob("*.png"))[0]
    bad.write_bytes(b"no image")
    run = train(
        TrainConfig(
            data=str(folder), output=tmp_path / "run", method="isda", on_bad_image="skip", model="small",
            pretrained=False, epochs=1, resize=40, crop=32, batch_size=6, val_per_class=1, workers=0, cache=None,
            augmentation=Augmentation(0.0),
        )
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guide = open_guide(run)
    assert (guide.view.strength, guide.view.notes) == (1.0, ("λ was 0 at the end of training",))
    classes = len(guide.names)
    assert len(guide.seen.names) == len(list((folder / "train").rglob("*.png"))) - 1 - classes  # validation: 1 of each
    assert not any(name.endswith(bad.name) and bad.parent.name in name for name in guide.seen.names)


def test_few_images_are_spread_over_the_classes(runs: dict[str, Path]) -> None:
    guide = open_guide(runs["learnable"], images=6)
    assert sorted(guide.seen.labels.tolist()) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(SettingError, match="`images` must be at least 1"):
        open_guide(runs["learnable"], images=0)
    for index in (-1, 6):
        with pytest.raises(IndexError):
            guide.thumbnail(index)
