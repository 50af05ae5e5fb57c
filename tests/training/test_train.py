"""Training through its one function: every method, resuming, and what is written."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from photos import photo_folder
from semaug.inference.classifier import load_classifier
from semaug.inference.runs import read_metrics
from semaug.meta.learner import LearnableAugmentation
from semaug.training.methods import METHODS, Augmentation, on_p2p
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util import progress
from semaug.util.errors import SemaugError
from semaug.util.files import read_json


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


def config(photos: Path, output: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "method": "learnable",
        "model": "small",
        "pretrained": False,
        "epochs": 3,
        "resize": 40,
        "crop": 32,
        "batch_size": 4,
        "val_per_class": 2,
        "workers": 0,
        "cache": None,
        "lr": 0.02,
    }
    return TrainConfig(data=str(photos), output=output, **{**settings, **options})


@pytest.mark.parametrize("model", ["resnet18", "mobilenetv2_100", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("method", [method for method in METHODS if not on_p2p(method)])
def test_every_method_trains_every_kind_of_network(photos: Path, tmp_path: Path, method: Any, model: str) -> None:
    # BatchNorm over three images of one pixel, deep inside, has enormous gradients: hence the clipping.
    run = train(config(photos, tmp_path / "run", method=method, model=model, epochs=2, lr=0.001, clip_norm=1.0))
    rows = read_metrics(run)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 <= row["val_top1"] <= 1 and row["train_loss"] > 0 for row in rows)
    assert (rows[1]["strength"] > 0) == (method in ("constant", "isda", "joint", "learnable"))
    assert ("meta_loss" in rows[1]) == (method == "learnable")
    result = read_json(run / "evaluation.json")
    assert (result["split"], result["count"]) == ("test", 12)
    assert load_classifier(run).classes == tuple(read_json(run / "classes.json"))


@pytest.mark.parametrize("method", [method for method in METHODS if on_p2p(method)])
def test_p2p_trains_alone_and_with_both_augmentations(photos: Path, tmp_path: Path, method: Any) -> None:
    options: dict[str, Any] = {"method": method, "epochs": 2, "resize": 72, "crop": 64, "lr": 0.002}
    options["augmentation"] = Augmentation(interval=2)
    run = train(config(photos, tmp_path / "run", **options))
    rows = read_metrics(run)
    assert all(row["rest_loss"] > 0 and row["train_loss"] > 0 for row in rows)
    assert ("meta_loss" in rows[1]) == (method == "p2p+learnable")
    assert (rows[1]["strength"] > 0) == (method != "p2p")
    classifier = load_classifier(run)
    assert classifier.model(torch.zeros(2, 3, 64, 64)).shape == (2, len(classifier.classes))
    assert int(classifier.model.alignment.seen) > 0
    assert read_json(run / "evaluation.json")["count"] == 12


def test_p2p_of_a_network_without_stages_is_refused_in_one_sentence(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="stages"):
        train(config(photos, tmp_path / "run", method="p2p", model="vit_tiny_patch16_224"))


def test_the_run_directory_holds_what_it_promises(photos: Path, tmp_path: Path) -> None:
    run = train(config(photos, tmp_path / "run", method="learnable"))
    settings = read_json(run / "config.json")
    assert settings["model"] == "small"
    assert settings["augmentation"]["strength"] == 10.0
    assert settings["preprocessing"]["crop"] == 32
    with open(run / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    rows = read_metrics(run)
    assert [float(row["train_loss"]) for row in table] == [row["train_loss"] for row in rows]
    weights = load_file(run / "model.safetensors")
    assert set(weights) == set(load_classifier(run).model.state_dict()), "CovNet is no part of the model"
    assert {"image", "true", "predicted"} <= set(read_json(run / "samples.json")[0])


def test_the_same_seed_gives_the_same_run_and_another_seed_another(photos: Path, tmp_path: Path) -> None:
    runs = [train(config(photos, tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    weights = [load_file(run / "model.safetensors") for run in runs]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])


@pytest.mark.parametrize("options", [{}, {"augmentation": Augmentation(order="pipelined")}, {"ema": 0.9}])
def test_a_broken_off_run_goes_on_to_the_same_end(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    whole = train(config(photos, tmp_path / "whole", **options))
    broken = config(photos, tmp_path / "broken", **options)
    original = progress.Progress.epoch

    def stop_after_two(self: progress.Progress, row: dict[str, Any], epochs: int) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Progress, "epoch", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    monkeypatch.setattr(progress.Progress, "epoch", original)
    resumed = train(broken)
    torch.testing.assert_close(
        load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors"), rtol=0, atol=0
    )
    timed = ("seconds", "images_per_second")
    assert [{k: v for k, v in row.items() if k not in timed} for row in read_metrics(whole)] == [
        {k: v for k, v in row.items() if k not in timed} for row in read_metrics(resumed)
    ]


def test_a_complete_run_is_left_alone_and_other_settings_are_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = config(photos, tmp_path / "run", epochs=1)
    run = train(first)
    before = (run / "model.safetensors").read_bytes()
    train(first)
    assert "is complete" in capsys.readouterr().err
    with pytest.raises(SemaugError, match="other settings \\(seed 0 → 5\\)"):
        train(replace(first, seed=5))
    with pytest.raises(SemaugError, match="holds a run already"):
        train(replace(first, resume=False))
    assert (run / "model.safetensors").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(SemaugError, match="not empty and holds no run"):
        train(replace(first, output=tmp_path / "other"))


def test_a_mistake_before_the_first_epoch_does_not_spoil_the_folder(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="unknown model"):
        train(config(photos, tmp_path / "run", model="resnet5o", epochs=1))
    run = train(config(photos, tmp_path / "run", epochs=1))
    assert read_json(run / "config.json")["model"] == "small"


def test_the_test_split_is_used_for_selection_only_by_name(photos: Path, tmp_path: Path) -> None:
    run = train(config(photos, tmp_path / "run", epochs=1, select="test"))
    assert read_json(run / "config.json")["select"] == "test"
    assert read_json(run / "evaluation.json")["top1"] == pytest.approx(read_metrics(run)[0]["val_top1"], abs=1e-5)


def test_micro_batches_and_mixed_precision_train_too(photos: Path, tmp_path: Path) -> None:
    run = train(config(photos, tmp_path / "run", micro_batch=2, precision="bf16", label_smoothing=0.1, clip_norm=1.0))
    assert len(read_metrics(run)) == 3


def test_patience_stops_early(photos: Path, tmp_path: Path) -> None:
    run = train(config(photos, tmp_path / "run", epochs=30, patience=1, lr=1e-9))
    assert len(read_metrics(run)) < 30


def test_weights_from_a_file_are_loaded_and_the_head_adapted(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config(photos, tmp_path / "first", epochs=1))
    four = photo_folder(tmp_path / "four", species=4)
    train(config(four, tmp_path / "second", epochs=1, weights=run / "model.safetensors"))
    told = capsys.readouterr().err.replace("\n", " ")
    assert "tensors loaded" in told
    assert "head.weight" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet5O"}, "unknown model 'resnet5O'; did you mean"),
        ({"data": "nowhere/at/all"}, "neither an existing path nor the name of a data set"),
        ({"weights": Path("nowhere.pth")}, "no weights file"),
        ({"crop": 64}, "must not be larger than the resized image"),
        ({"epochs": 0}, "--epochs must be at least 1"),
        ({"lr": -1.0}, "--lr must be positive"),
        ({"micro_batch": 0}, "--micro-batch must be at least 1"),
        ({"val_fraction": 1.5}, "--val-fraction must lie between 0 and 1"),
        ({"augmentation": Augmentation(frozen_blocks=99)}, "frozen_blocks must lie in"),
    ],
)
def test_mistakes_are_told_in_one_sentence(photos: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SemaugError, match=message):
        train(replace(config(photos, tmp_path / "run"), **options))


@pytest.mark.parametrize("meta_images", ["randaugment", "held-out"])
def test_meta_images_are_others_than_those_trained_on(
    tmp_path: Path, meta_images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is of one colour, by which it is known in any crop."""
    from PIL import Image

    for i in range(24):
        file = tmp_path / "photos" / "train" / f"class{i % 3}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (10 * i, 255 - 10 * i, 5 * i)).save(file)
    seen: list[tuple[torch.Tensor, ...]] = []
    step = LearnableAugmentation.step

    def noted(self: Any, *inputs: torch.Tensor) -> Any:
        seen.append(inputs)
        return step(self, *inputs)

    monkeypatch.setattr(LearnableAugmentation, "step", noted)
    monkeypatch.setattr("semaug.training.batches.rand_augment", lambda images, *_: images)
    augmentation = Augmentation(meta_images=meta_images, meta_share=0.25)
    options: dict[str, Any] = {
        "method": "learnable",
        "augmentation": augmentation,
        "batch_size": 3,
        "epochs": 2,
        "val_per_class": 1,
    }
    train(config(tmp_path / "photos", tmp_path / "run", **options))

    def names(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, int]]:
        return [(round(float(image[0].mean()), 3), int(label)) for image, label in zip(images, labels, strict=True)]

    trained: set[tuple[float, int]] = set()
    meta: set[tuple[float, int]] = set()
    for images, labels, others, other_labels in seen:
        batch, meta_batch = names(images, labels), names(others, other_labels)
        trained |= set(batch)
        meta |= set(meta_batch)
        if meta_images == "randaugment":  # the halves have changed places
            middle = (len(batch) + 1) // 2
            assert meta_batch == batch[middle:] + batch[:middle]
    if meta_images == "held-out":
        assert not trained & meta
        assert len(trained) == 15  # of 7 images of each class for training, 2 are held out
        assert len({label for _, label in meta}) == 3
    options["augmentation"] = replace(augmentation, order="pipelined")
    with pytest.raises(SemaugError, match="needs --order paper"):
        train(config(tmp_path / "photos", tmp_path / "other", **options))


def test_divergence_is_told_with_advice(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="training broke down in epoch .* try a smaller --lr"):
        train(config(photos, tmp_path / "run", lr=1e30, optimizer="sgd", epochs=10))


def test_metrics_are_plain_json(photos: Path, tmp_path: Path) -> None:
    run = train(config(photos, tmp_path / "run", epochs=1))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert all(isinstance(value, int | float) for value in json.loads(line).values())


def test_without_a_name_the_method_is_isda_and_each_method_has_its_strength() -> None:
    assert TrainConfig().method == "isda"
    assert TrainConfig().filled().augmentation.strength == 3  # on the embedded birds, from scratch
    assert TrainConfig(data="photos").filled().augmentation.strength == 20
    of_paper = {"constant": 10, "learnable": 10, "joint": 10, "p2p+isda": 5, "p2p+learnable": 5}
    for method, strength in of_paper.items():
        assert TrainConfig(data="photos", method=method).filled().augmentation.strength == strength  # type: ignore[arg-type]


def test_pretrained_weights_are_the_default_where_there_are_any() -> None:
    assert TrainConfig(data="photos").filled().pretrained
    assert TrainConfig(data="photos", model="mobilenetv3_small_050").filled().pretrained
    for config in (
        TrainConfig(data="photos", model="small"),
        TrainConfig(data="photos", weights=Path("weights.safetensors")),
        TrainConfig(data="birds", model="resnet18"),
    ):
        assert config.filled().pretrained is False


def test_our_own_network_trains_on_a_folder_without_a_word_on_pretrained(photos: Path, tmp_path: Path) -> None:
    assert config(photos, tmp_path / "run", epochs=1, pretrained=None).model == "small"
    train(config(photos, tmp_path / "run", epochs=1, pretrained=None))


@pytest.mark.parametrize("options", [{"rank": 2}, {"fixed_trace": 0.5}])
def test_settings_of_covnet_are_refused_where_another_source_is_learned(
    photos: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    augmentation = Augmentation(source="reshaped", **options)
    with pytest.raises(SemaugError, match="are CovNet's, and not for --source reshaped"):
        train(config(photos, tmp_path / "run", augmentation=augmentation))
