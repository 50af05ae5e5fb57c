"""Frozen blocks do not change, and a linear probe on cached features ends as an ordinary run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from forks import Fork, hold_lock
from photos import quick_config
from semaug.cli.main import main
from semaug.data.cache import entries
from semaug.inference.runs import read_metrics
from semaug.network.blocks import freeze_blocks
from semaug.network.models import build_model
from semaug.training import probing
from semaug.training.methods import METHODS, Augmentation
from semaug.training.probing import FeatureViews, Probe, whole_network
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SettingError
from semaug.util.untrusted import read_json


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small network, with statistics that are not the initial ones."""
    model = build_model("small", 3, 32)
    with torch.no_grad():
        for _ in range(20):
            model(torch.rand(16, 3, 32, 32))
        model.blocks[2][1].weight.mul_(30)  # features of a size that a head learns from in a few steps
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(model.state_dict(), file)
    return file


def changed(run: Path, weights: Path) -> set[str]:
    """The parts of the network that training has changed."""
    before, after = load_file(weights), load_file(run / "model.safetensors")
    assert before.keys() == after.keys()
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in names}


@pytest.mark.parametrize("method", ["basic", "learnable"])
def test_frozen_blocks_and_their_statistics_do_not_change(
    photos: Path, weights: Path, tmp_path: Path, method: str
) -> None:
    options = {"weights": weights, "method": method, "epochs": 1, "select": "last"}
    run = train(quick_config(photos, tmp_path / "run", freeze=2, **options))
    assert changed(run, weights) == {"blocks.2", "head"}


def test_the_stem_and_as_many_blocks_as_asked_for_are_frozen() -> None:
    model = build_model("torchvision/mobilenet_v2", 3, 32)
    freeze_blocks(model, 0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    freeze_blocks(model, 5)
    trained = {name.split(".")[1] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {str(i) for i in range(6, 19)} | {"1"}, "classifier.1, and the features after the fifth block"
    assert not any(parameter.requires_grad for parameter in model.features[:6].parameters())


def test_more_blocks_than_there_are_is_one_sentence(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="`freeze` must be at most 3, the blocks of SmallNet, not 4"):
        train(quick_config(photos, tmp_path / "run", freeze=4))


# --------------------------------------------------------------------------------------------------------------- probes

PROBE: dict[str, Any] = {"freeze": "all", "method": "isda", "augmentation": Augmentation(), "epochs": 30, "lr": 0.01}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def probe(photos: Path, weights: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("probe") / "run"
    return train(quick_config(photos, output, weights=weights, cache=cache, **PROBE))


def test_a_probe_trains_the_head_alone(probe: Path, weights: Path, cache: Path) -> None:
    assert changed(probe, weights) == {"head"}
    rows = read_metrics(probe)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert max(row["strength"] for row in rows) > 0, "the automatic strength acts"
    [entry] = entries(cache)
    assert entry.data.endswith(", features of small"), "no pixels, and one file for both splits"


def test_a_probe_is_an_ordinary_run(probe: Path, photos: Path, tmp_path: Path) -> None:
    best = read_metrics(probe)[read_json(probe / "evaluation.json")["best_epoch"] - 1]
    assert main(["evaluate", str(probe), "--split", "val", "--json", str(tmp_path / "scores.json")]) == 0
    scores = read_json(tmp_path / "scores.json")
    assert scores["cross_entropy"] == pytest.approx(best["val_loss"], abs=1e-5), "on images as on their features"
    assert scores["top1"] == pytest.approx(best["val_top1"], abs=1e-5)
    assert main(["predict", str(probe), str(photos / "test"), "--output", str(tmp_path / "answers.csv")]) == 0
    assert main(["export", str(probe), str(tmp_path / "exported"), "--no-onnx"]) == 0
    exported, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "exported", probe))
    assert all(torch.equal(exported[name], own[name]) for name in own)


def test_cached_features_are_used_by_other_seeds_and_methods(
    probe: Path, photos: Path, weights: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "run_batches", None)
    options = PROBE | {"method": "basic", "seed": 1, "weights": weights, "cache": cache, "val_per_class": 3}
    run = train(quick_config(photos, tmp_path / "run", **options))
    assert changed(run, weights) == {"head"}
    other = tmp_path / "other.safetensors"
    save_file({name: value + 0.01 for name, value in load_file(weights).items() if value.is_floating_point()}, other)
    with pytest.raises(TypeError):  # other weights, other features
        train(quick_config(photos, tmp_path / "again", **options | {"weights": other}))


def test_of_several_processes_one_process_computes_features(
    probe: Path, photos: Path, weights: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file appears while this process waits for the other one, and is then used."""
    [before] = cache.glob("*.npy")
    file = tmp_path / "cache" / before.name
    other = Fork(tmp_path / "log", hold_lock, file.parent, f"{file.stem}.lock", 1.0, before, file)
    other.wait_until(lambda: other.log.exists() and other.log.read_text() == "locked\n")
    monkeypatch.setattr(probing, "run_batches", None)  # nothing is computed here
    train(quick_config(photos, tmp_path / "run", **PROBE | {"weights": weights, "cache": file.parent, "epochs": 1}))
    assert other.wait()[0] == 0


def test_damaged_features_are_computed_again(photos: Path, weights: Path, tmp_path: Path) -> None:
    options = PROBE | {"weights": weights, "cache": tmp_path / "cache", "epochs": 1}
    run = train(quick_config(photos, tmp_path / "run", **options))
    [file] = (tmp_path / "cache").glob("*.npy")
    own = file.read_bytes()
    for name, damaged in (("cut", own[:-4]), ("changed", own[:200] + bytes(200) + own[400:])):
        file.write_bytes(damaged)
        with pytest.warns(UserWarning, match=f"^semaug: {file} was damaged; writing it again$"):
            again = train(quick_config(photos, tmp_path / name, **options))
        assert file.read_bytes() == own
        assert (again / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_an_averaged_probe_is_saved_with_its_averaged_head(photos: Path, weights: Path, tmp_path: Path) -> None:
    options = PROBE | {"weights": weights, "epochs": 1, "method": "learnable", "ema": 0.9, "select": "last"}
    run = train(quick_config(photos, tmp_path / "run", **options))
    assert changed(run, weights) == {"head"}
    assert "meta_loss" in read_metrics(run)[0]


def test_a_probe_shares_the_head_of_its_network() -> None:
    convolution = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 4, 1), nn.Flatten())
    for network in (build_model("small", 4, 32), convolution):
        probe = Probe(network)
        assert whole_network(probe) is network
        assert len(list(probe.parameters())) == 2
    features = torch.randn(3, 6)
    torch.testing.assert_close(probe(features), convolution(features[..., None, None]))


def test_training_draws_the_image_or_its_mirror_image() -> None:
    views, features = FeatureViews(40, 32), torch.arange(8.0).view(4, 2, 1)
    boxes, flipped = views.draw_crops(4, torch.Generator().manual_seed(0))
    drawn = views.normalised(views.cropped(features, boxes, flipped))
    assert drawn.flatten().tolist() == [2 * i + int(mirrored) for i, mirrored in enumerate(flipped)]
    assert flipped.any()
    assert not flipped.all()
    assert views.evaluation_input(features).flatten().tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_change_images_do_not_train_on_features(method: str) -> None:
    config = TrainConfig(data="photos", method=method, freeze="all", recipe="probe")
    if method in ("basic", "constant", "isda", "joint", "learnable"):
        assert config.resolve().freeze == "all"
    else:
        with pytest.raises(SettingError, match="its methods are basic, constant, isda, joint, learnable"):
            config.resolve()


@pytest.mark.parametrize("options", [{"padding": 4}, {"crop_scale": 0.5}, {"recipe": "fine-tune-vit"}])
def test_settings_of_images_do_not_go_with_a_probe(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="features of centre crops"):
        TrainConfig(data="photos", freeze="all", **options).resolve()
