"""Calibration, refused answers, test-time augmentation and ensembles, on the files of a run."""

import csv
import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from semaug.cli.main import main
from semaug.data.readers import read_data
from semaug.inference import Classifier, load_classifier, open_classifier
from semaug.inference.calibration import _rounded, choose_threshold, fit_temperature
from semaug.inference.ensemble import ensemble
from semaug.inference.evaluation import evaluate
from semaug.inference.manifest import add
from semaug.inference.runs import read_calibration, splits_of_run
from semaug.util.errors import ModelError, RunError, SettingError
from semaug.util.untrusted import read_json


@pytest.fixture(scope="module")
def calibrated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, calibrated by the command."""
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(run, folder)
    assert main(["evaluate", str(folder), "--calibrate"]) == 0
    return folder


def pixels(classifier: Classifier, count: int = 5) -> torch.Tensor:
    size = classifier.preprocessing.resize
    return torch.randint(256, (count, size, size, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_the_temperature_has_the_smallest_cross_entropy() -> None:
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3000, 8, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]  # calibrated by construction
    assert fit_temperature(logits, labels) == pytest.approx(1, abs=0.05)
    temperature = fit_temperature(3 * logits, labels)
    grid = np.linspace(2, 4, 2001)
    losses = [float(torch.nn.functional.cross_entropy(3 * logits.double() / t, labels)) for t in grid]
    assert temperature == pytest.approx(grid[np.argmin(losses)], abs=2e-3)


def test_without_mistakes_probabilities_stay_as_they_are() -> None:
    """The cross-entropy falls as long as T does; every probability would become 1."""
    for scale in (0.1, 1.0, 100.0):
        logits = scale * torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
        assert fit_temperature(logits, logits.argmax(1)) == 1


def test_a_calibrated_run_divides_its_logits(run: Path, calibrated: Path) -> None:
    plain, classifier, content = load_classifier(run), load_classifier(calibrated), read_calibration(calibrated)
    assert content is not None
    assert content["images"] == len(content["right"]) + len(content["wrong"]) == 6
    assert plain.temperature == 1
    assert classifier.temperature == content["temperature"] != 1
    batch = pixels(plain)
    expected = (plain.logits(batch) / content["temperature"]).softmax(1)
    torch.testing.assert_close(classifier.probabilities(batch), expected)
    assert content["after"]["cross_entropy"] <= content["before"]["cross_entropy"]
    assert sum(count for count, _, _ in content["after"]["bins"]) == 6
    data = read_data(classifier.config["data"])
    samples = splits_of_run(calibrated, classifier.config, data)["val"]
    scores = evaluate(classifier, samples).scores
    assert scores.cross_entropy == pytest.approx(content["after"]["cross_entropy"], abs=1e-5)
    assert scores.calibration_error == pytest.approx(content["after"]["calibration_error"], abs=1e-5)
    assert 'id="calibration"' in (calibrated / "report.html").read_text()


def test_exports_are_calibrated_too(calibrated: Path, exported: Path, tmp_path: Path) -> None:
    assert main(["export", str(calibrated), str(tmp_path / "exported"), "--no-onnx"]) == 0
    shutil.copytree(exported, tmp_path / "onnx")
    shutil.copy(tmp_path / "exported" / "calibration.json", tmp_path / "onnx")
    add(tmp_path / "onnx", "calibration.json")
    classifier, batch = load_classifier(calibrated), pixels(load_classifier(calibrated))
    for model in (tmp_path / "exported", tmp_path / "onnx" / "model.onnx"):
        other = open_classifier(model)
        assert other.temperature == classifier.temperature
        torch.testing.assert_close(other.probabilities(batch), classifier.probabilities(batch), atol=1e-5, rtol=1e-4)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"/ {classifier.temperature:.6g}).softmax(1)" in card
    assert "| top-1 accuracy | " in card
    before = read_json(calibrated / "evaluation.json")
    assert f"| cross-entropy, before calibration | {before['cross_entropy']:.4f} |" in card
    assert f"| expected calibration error, before calibration | {before['calibration_error']:.4f} |" in card


def test_a_changed_temperature_is_refused(calibrated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(calibrated, folder)
    (folder / "calibration.json").write_text('{"temperature": 2.0, "images": 1, "right": [], "wrong": []}')
    with pytest.raises(RunError, match="was changed"):
        load_classifier(folder)


def test_unsure_answers_are_refused(
    calibrated: Path, run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = read_calibration(calibrated)
    assert content is not None
    error = len(content["wrong"]) / content["images"]  # which all answers together reach
    command = ["predict", str(calibrated), str(photos / "test"), "--reject", repr(error), "--top-k", "1"]
    assert main(command) == 0
    output = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(output.out)))
    lowest = min(content["right"] + content["wrong"])
    assert {row["accepted"] for row in rows} <= {"yes", "no"}
    for row in rows:
        assert (row["accepted"] == "yes") == (float(row["probability"]) >= lowest)
    assert "of the 6 validation images 100.0 % are" in output.err
    assert f"{sum(row['accepted'] == 'yes' for row in rows)} answers accepted" in output.err
    assert main(["predict", str(run), str(photos / "test"), "--reject", "0.1"]) == 2
    assert "is not calibrated; run semaug evaluate RUN --calibrate first" in capsys.readouterr().err


def test_every_answer_reaches_its_own_confidence_as_threshold() -> None:
    sure = torch.tensor([1.0, 1 - 2**-24, 0.9999996, 0.8765437, 0.5, 1e-5 / 3])
    for own, stored in zip(sure, _rounded(sure), strict=True):
        assert 0 <= float(own) - stored < 1e-6


def test_the_threshold_accepts_as_many_as_the_error_allows() -> None:
    random = np.random.default_rng(0)
    confidence = random.integers(1, 40, size=300) / 40  # with ties
    is_right = random.random(300) < confidence
    right, wrong = confidence[is_right].tolist(), confidence[~is_right].tolist()
    content = {"temperature": 1.0, "images": 300, "right": right, "wrong": wrong}
    for error in (0.0, 0.05, 0.2, 0.9):
        allowed = [t for t in np.unique(confidence) if (~is_right[confidence >= t]).mean() <= error]
        if not allowed:
            with pytest.raises(SettingError, match="even the most confident"):
                choose_threshold(content, error)
            continue
        chosen = choose_threshold(content, error)
        assert chosen.threshold == min(allowed)
        assert chosen.accepted == (confidence >= chosen.threshold).sum()
        assert chosen.wrong == (~is_right[confidence >= chosen.threshold]).sum()
    with pytest.raises(SettingError, match="`reject`"):
        choose_threshold(content, 1.5)


def test_augmented_answers_are_means_over_torchvisions_crops(run: Path) -> None:
    classifier = load_classifier(run)
    batch, crop = pixels(classifier), classifier.preprocessing.crop
    own = replace(classifier, preprocessing=replace(classifier.preprocessing, resize=crop))

    def mean(views: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([own.probabilities(view.permute(0, 2, 3, 1)) for view in views]).mean(0)

    ten = F.ten_crop(batch.permute(0, 3, 1, 2), [crop, crop])
    expected = {"flip": mean([ten[4], ten[9]]), "multi-crop": mean(list(ten))}
    for tta, probabilities in expected.items():
        torch.testing.assert_close(replace(classifier, tta=tta).probabilities(batch), probabilities)
    with pytest.raises(SettingError, match="`tta` multi-crop needs images that are larger"):
        replace(own, tta="multi-crop").probabilities(batch[:, :crop, :crop])
    assert main(["evaluate", str(run), "--tta", "flip"]) == 0


def test_an_ensemble_averages_probabilities(
    run: Path, calibrated: Path, classifier: Classifier, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [load_classifier(run), load_classifier(calibrated)]
    batch = pixels(members[0])
    expected = (members[0].probabilities(batch) + members[1].probabilities(batch)) / 2
    torch.testing.assert_close(ensemble(members).probabilities(batch), expected)
    assert main(["evaluate", str(run), str(calibrated), "--tta", "flip"]) == 0
    assert f"{run}, {calibrated} on " in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    with pytest.raises(ModelError, match="do not have the same classes"):
        ensemble([members[0], classifier])
    resized = replace(members[1], preprocessing=replace(members[1].preprocessing, resize=50))
    with pytest.raises(ModelError, match="do not resize images alike"):
        ensemble([members[0], resized])


def test_what_excludes_calibration_is_said(run: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--tta", "flip"], ["--data", str(photos)], [str(run)]):
        assert main(["evaluate", str(run), *options, "--calibrate"]) == 2
        assert "--calibrate is for one run on its own data" in capsys.readouterr().err
    assert read_json(run / "manifest.json")["files"].keys().isdisjoint({"calibration.json"})


def test_an_exported_folder_is_not_calibrated(
    exported: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder that has its images, among which the validation images are not known."""
    monkeypatch.chdir(photos.parent)
    for model in (exported, exported / "model.onnx"):
        assert main(["evaluate", str(model), "--calibrate"]) == 2
        assert "is not a run directory; calibrate the run, and export it again" in capsys.readouterr().err
