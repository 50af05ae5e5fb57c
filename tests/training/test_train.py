"""Training through its one function: every method, resuming, and the files that it writes."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import soak
from photos import photo_folder, quick_config
from semaug.cli.main import main
from semaug.inference.classifier import load_classifier
from semaug.inference.runs import read_metrics
from semaug.meta.learner import LearnableAugmentation
from semaug.meta.mixing import _MixingLearner as Mixer
from semaug.report.reading import read_runs
from semaug.training.methods import METHODS, Augmentation
from semaug.training.run_directory import changed_settings
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util import progress
from semaug.util.errors import SemaugError, SettingError
from semaug.util.untrusted import read_json

Undisturbed = Callable[..., Path]


# The others are those on P2P-Net (below), and those that mix with the help of the network (test_rivals.py).
PLAIN_METHODS = [name for name, row in METHODS.items() if row.composite is None and not issubclass(row.learner, Mixer)]


@pytest.mark.parametrize("model", ["test_resnet", "test_efficientnet", "test_vit"])
@pytest.mark.parametrize("method", PLAIN_METHODS)
def test_every_method_trains_every_kind_of_network(photos: Path, tmp_path: Path, method: str, model: str) -> None:
    options: dict[str, Any] = {"method": method, "model": model, "epochs": 2, "lr": 0.001, "clip_norm": 1.0}
    run = train(quick_config(photos, tmp_path / "run", **options))
    rows = read_metrics(run)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 <= row["val_top1"] <= 1 and row["train_loss"] > 0 for row in rows)
    assert (rows[1]["strength"] > 0) == METHODS[method].augments
    assert ("meta_loss" in rows[1]) == (method == "learnable")
    result = read_json(run / "evaluation.json")
    assert (result["split"], result["count"]) == ("test", 12)
    assert load_classifier(run).classes == tuple(read_json(run / "classes.json"))


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.composite == "p2p"])
def test_p2p_trains_alone_and_with_both_augmentations(photos: Path, tmp_path: Path, method: str) -> None:
    options: dict[str, Any] = {"method": method, "epochs": 2, "resize": 72, "crop": 64, "lr": 0.002}
    run = train(quick_config(photos, tmp_path / "run", augmentation=Augmentation(10.0, interval=2), **options))
    rows = read_metrics(run)
    assert all(row["rest_loss"] > 0 and row["train_loss"] > 0 for row in rows)
    assert ("meta_loss" in rows[1]) == (method == "p2p+learnable")
    assert (rows[1]["strength"] > 0) == (method != "p2p")
    classifier = load_classifier(run)
    assert classifier.model(torch.zeros(2, 3, 64, 64)).shape == (2, len(classifier.classes))
    assert int(classifier.model.alignment.seen) > 0
    assert read_json(run / "evaluation.json")["count"] == 12


def test_p2p_on_a_network_without_stages_is_refused_in_one_sentence(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="stages"):
        train(quick_config(photos, tmp_path / "run", method="p2p", model="test_vit"))


def test_the_run_directory_holds_what_the_documentation_says(undisturbed: Undisturbed) -> None:
    run = undisturbed()
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
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert all(isinstance(value, int | float) for value in json.loads(line).values()), "metrics are plain JSON"


@pytest.mark.parametrize("options", [{}, {"augmentation": Augmentation(order="pipelined")}, {"ema": 0.9}])
def test_a_run_interrupted_after_an_epoch_ends_like_an_undisturbed_one(
    photos: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    reference, settings = undisturbed(**options), quick_config(photos, tmp_path / "run", **options)

    def stop_after_two(self: progress.Progress, row: dict[str, Any], epochs: int) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "epoch", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert soak.differences(train(settings), reference) == []


def test_a_complete_run_is_left_alone_and_other_settings_are_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = quick_config(photos, tmp_path / "run", epochs=1)
    run = train(first)
    before = (run / "model.safetensors").read_bytes()
    train(first)
    assert "is complete" in capsys.readouterr().err
    with pytest.raises(SemaugError, match="other settings \\(seed 0 → 5\\)"):
        train(replace(first, seed=5))
    stronger = replace(first, augmentation=replace(first.augmentation, strength=3.0))
    with pytest.raises(SemaugError, match=r"other settings \(strength \S+ → 3.0\)"):
        train(stronger)
    with pytest.raises(SemaugError, match="holds a run already"):
        train(replace(first, resume=False))
    train(replace(first, workers=1, on_bad_image="skip"))  # settings that do not identify a run
    assert (run / "model.safetensors").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(SemaugError, match="not empty and holds no run"):
        train(replace(first, output=tmp_path / "other"))


def test_a_setting_that_an_older_run_lacks_and_nobody_gives_is_no_other_setting(photos: Path, tmp_path: Path) -> None:
    config = quick_config(photos, tmp_path / "run").resolve()
    stored = config.to_json()
    assert stored["augmentation"].pop("fixed_trace") is None
    assert changed_settings(stored, config) == {}


def test_after_a_mistake_before_the_first_epoch_the_folder_can_be_used(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="unknown model"):
        train(quick_config(photos, tmp_path / "run", model="resnet5o", epochs=1))
    run = train(quick_config(photos, tmp_path / "run", epochs=1))
    assert read_json(run / "config.json")["model"] == "small"


def test_the_test_split_is_used_for_selection_only_on_request(photos: Path, tmp_path: Path) -> None:
    run = train(quick_config(photos, tmp_path / "run", epochs=1, select="test"))
    assert read_json(run / "config.json")["select"] == "test"
    assert read_json(run / "evaluation.json")["top1"] == pytest.approx(read_metrics(run)[0]["val_top1"], abs=1e-5)


def test_micro_batches_and_mixed_precision_train(photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"micro_batch": 2, "precision": "bf16", "label_smoothing": 0.1, "clip_norm": 1.0}
    assert len(read_metrics(train(quick_config(photos, tmp_path / "run", **options)))) == 3


def test_patience_stops_early(photos: Path, tmp_path: Path) -> None:
    run = train(quick_config(photos, tmp_path / "run", method="isda", epochs=30, patience=1, lr=1e-9))
    assert len(read_metrics(run)) < 30


def test_weights_from_a_file_are_loaded_except_a_head_for_other_classes(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, four = undisturbed() / "model.safetensors", photo_folder(tmp_path / "four", species=4)
    train(quick_config(four, tmp_path / "run", epochs=1, weights=weights))
    said = capsys.readouterr().err.replace("\n", " ")
    assert "tensors loaded" in said
    assert "head.weight" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet5O"}, "unknown model 'resnet5O'; did you mean"),
        ({"data": "nowhere/at/all"}, "neither an existing path nor the name of a data set"),
        ({"weights": Path("nowhere.pth")}, "no weights file"),
        ({"crop": 64}, "must not be larger than the resized image"),
        ({"resize": 1, "crop": 1}, r"small cannot process images of 1 px \(Given input .* too small\)"),
        ({"crop": 4}, r"small cannot process images of 4 px \(Given input .* too small\); choose another `crop`"),
        ({"epochs": 0}, "`epochs` must be from 1 to 1000000, not 0"),
        ({"batch_size": 0}, "`batch_size` must be from 1 to 1000000, not 0"),
        ({"lr": -1.0}, r"`lr` must be above 0 and at most 1e\+09, not -1.0"),
        ({"micro_batch": 0}, "`micro_batch` must be from 1 to 1000000, not 0"),
        ({"val_fraction": 1.5}, "`val_fraction` must be above 0 and below 1, not 1.5"),
        ({"ema": 1.0}, "`ema` must be at least 0 and below 1, not 1.0"),
        ({"augmentation": Augmentation(frozen_blocks=99)}, "frozen_blocks must be in 0 … 3"),
    ],
)
def test_a_mistake_is_explained_in_one_sentence(
    photos: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SemaugError, match=message):
        train(replace(quick_config(photos, tmp_path / "run"), **options))


def test_what_the_machine_lacks_is_a_mistake_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("foo", "meta", "cpu:5", "\x1b[2J"):
        with pytest.raises(SettingError, match="^`device` must be cpu, not '"):
            TrainConfig(device=device).resolve()
    with pytest.raises(SettingError, match="there is no CUDA device; set `device` to cpu"):
        TrainConfig(device="cuda").resolve()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SettingError, match=r"`compile` needs a C\+\+ compiler"):
        TrainConfig(compile=True).resolve()


def test_divergence_is_explained_with_advice(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="training diverged in epoch .* try a smaller `strength` or a smaller `lr`"):
        train(quick_config(photos, tmp_path / "run", lr=1e9, optimizer="sgd", epochs=10))


def test_the_default_method_is_isda_with_a_strength_that_sets_itself() -> None:
    assert TrainConfig().method == "isda"
    for data in ("birds", "photos"):
        for method in METHODS:
            assert TrainConfig(data=data, method=method).resolve().augmentation.strength == "auto"


@pytest.mark.parametrize(
    ("options", "lr"),
    [
        ({"data": "photos"}, 0.03),
        ({"data": "photos", "batch_size": 16}, 0.0075),
        ({"data": "photos", "batch_size": 256}, 0.12),
        ({"data": "photos", "batch_size": 16, "lr": 0.03}, 0.03),
        ({"data": "photos", "method": "p2p+isda"}, 0.002),  # at 16 images, as in its release
        ({"data": "photos", "method": "p2p", "batch_size": 64}, 0.008),
        ({"data": "photos", "optimizer": "adamw", "batch_size": 16}, 0.00005),
        ({"data": "photos", "optimizer": "adamw", "batch_size": 64}, 0.0001),
        ({}, 0.005),
        ({"batch_size": 4}, 0.0025),
    ],
)
def test_the_default_learning_rate_fits_the_batch(options: dict[str, Any], lr: float) -> None:
    assert TrainConfig(**options).resolve().lr == pytest.approx(lr, rel=1e-12)


def test_pretrained_weights_are_the_default_where_there_are_any() -> None:
    assert TrainConfig(data="photos").resolve().pretrained
    assert TrainConfig(data="photos", model="mobilenetv3_small_050").resolve().pretrained
    for config in (
        TrainConfig(data="photos", model="small"),
        TrainConfig(data="photos", weights=Path("weights.safetensors")),
        TrainConfig(data="birds", model="resnet18"),
    ):
        assert config.resolve().pretrained is False


def test_our_own_network_trains_on_a_folder_without_the_setting_pretrained(photos: Path, tmp_path: Path) -> None:
    settings = quick_config(photos, tmp_path / "run", method="isda", epochs=1, pretrained=None)
    assert settings.model == "small"
    train(settings)


def test_images_and_schedule_of_p2p_nets_release(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A black border, mean and deviation 0.5, no warm-up, and a rate that falls once an epoch."""
    seen: list[tuple[float, float]] = []
    original = LearnableAugmentation.step

    def step(self: LearnableAugmentation, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen.append((float(self.optimizer.param_groups[0]["lr"]), float(images.abs().max())))
        return original(self, images, labels)

    monkeypatch.setattr(LearnableAugmentation, "step", step)
    options = {"padding": 6, "normalize": "half", "warmup_epochs": 0.0, "lr_decay": "epoch"}
    run = train(quick_config(photos, tmp_path / "run", method="isda", **options))
    rates = [rate for rate, _ in seen]
    assert rates == pytest.approx([0.02] * 3 + [0.015] * 3 + [0.005] * 3)  # cosine at 0, 1/3 and 2/3 of training
    assert max(size for _, size in seen) == 1.0  # −1 is black
    assert load_classifier(run).preprocessing.mean == (0.5, 0.5, 0.5)


def test_best_of_test_is_reported_beside_the_last_epoch_and_chooses_nothing(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, asked = (
        train(quick_config(photos, tmp_path / f"run-{asked}", select="last", best_of_test=asked))
        for asked in (False, True)
    )
    rows, result = read_metrics(asked), read_json(asked / "evaluation.json")
    assert ["test_top1" in row for row in rows] == [True, True, False]
    accuracies = [row.get("test_top1", row.get("val_top1")) for row in rows]
    assert result.pop("best_of_test") == max(accuracies)
    assert f"best of test, which is too high: {100 * max(accuracies):.2f} %" in capsys.readouterr().err
    assert result == read_json(plain / "evaluation.json")  # of the last epoch, and of the same weights
    assert "best of test, chosen on the test split" in " ".join(read_runs([asked])[0].notes)
    with pytest.raises(SettingError, match="`best_of_test` needs `select` last"):
        quick_config(photos, tmp_path / "other", best_of_test=True).resolve()


def test_select_last_trains_on_all_images_and_evaluates_the_last_epoch_on_the_test_split(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(quick_config(photos, tmp_path / "run", select="last"))
    said = capsys.readouterr().err
    assert "24 train, 12 val, 12 test" in said
    assert "(epoch 3, the last)" in said
    rows = read_metrics(run)
    assert ["val_top1" in row for row in rows] == [False, False, True]
    result = read_json(run / "evaluation.json")
    assert (result["split"], result["best_epoch"], result["count"]) == ("test", 3, 12)
    assert result["top1"] == pytest.approx(rows[2]["val_top1"], abs=1e-6)
    assert main(["evaluate", str(run), "--split", "val"]) == 2
    assert "held out no validation images; its `select` is not val" in capsys.readouterr().err
    with pytest.raises(SettingError, match="`patience` needs a validation split"):
        quick_config(photos, tmp_path / "other", select="last", patience=2).resolve()
    with pytest.raises(SettingError, match="has no test split, which `select` last needs"):
        train(quick_config(photos / "train", tmp_path / "other", select="last"))
