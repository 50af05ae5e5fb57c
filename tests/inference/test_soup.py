"""Averages of weights, on the files of runs."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from photos import quick_config
from semaug.cli.main import main
from semaug.data.readers import read_data
from semaug.inference import load_classifier
from semaug.inference import soup as module
from semaug.inference.manifest import read_manifest, sign
from semaug.inference.runs import splits_of_run
from semaug.inference.soup import _average, soup
from semaug.training.trainer import train
from semaug.util.errors import FileError, RunError
from semaug.util.untrusted import read_json


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three classes that the smallest network can tell apart."""
    root, random = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 2)):
        for label, name in enumerate(("red", "green", "blue")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(120, size=(40, 40, 3), dtype=np.uint8)
                pixels[:, :, label] += 120
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def good(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that recognises its images."""
    options = {"method": "basic", "epochs": 8, "optimizer": "adamw", "lr": 0.005}
    run = train(quick_config(colours, tmp_path_factory.mktemp("good") / "run", **options))
    assert read_json(run / "evaluation.json")["top1"] == 1
    return run


def biased(run: Path, folder: Path, bias: float) -> Path:
    """A copy of a run that answers with the first class more or less often."""
    shutil.copytree(run, folder)
    weights = load_file(folder / "model.safetensors")
    [name] = [name for name, value in weights.items() if value.shape == (3,) and name.endswith("bias")]
    weights[name][0] += bias
    save_file(weights, folder / "model.safetensors")
    manifest = read_manifest(run)
    sign(folder, run=manifest["run"], data=manifest["data"])
    return folder


def test_the_average_of_two_runs_is_a_run(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [biased(good, tmp_path / name, bias) for name, bias in (("more", 1e3), ("less", -1e3))]
    output = tmp_path / "soup"
    assert main(["soup", *map(str, runs), "--output", str(output)]) == 0
    assert "the average of 2 runs" in capsys.readouterr().out
    weights, original = load_file(output / "model.safetensors"), load_file(good / "model.safetensors")
    for name, value in original.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(weights[name], value, atol=1e-3, rtol=0)
    assert len(read_json(output / "config.json")["soup"]) == 2
    evaluation = read_json(output / "evaluation.json")
    assert evaluation["split"] == "test"
    for options in ([], ["--calibrate"]):
        assert main(["evaluate", str(output), *options]) == 0
    assert 'id="calibration"' in (output / "report.html").read_text()
    with pytest.raises(FileError, match="is not empty"):
        soup(runs, output)


def test_a_run_that_was_written_meanwhile_is_not_overwritten(good: Path, tmp_path: Path) -> None:
    runs = [biased(good, tmp_path / name, bias) for name, bias in (("more", 1e3), ("less", -1e3))]
    output = tmp_path / "soup"

    def write(message: str) -> None:
        output.mkdir(exist_ok=True)
        (output / "config.json").write_text("of another run")

    with pytest.raises(FileError, match="is not empty"):
        soup(runs, output, say=write)
    assert {file.name: file.read_text() for file in output.iterdir()} == {"config.json": "of another run"}


def test_a_soup_that_was_killed_is_written_again(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [biased(good, tmp_path / name, bias) for name, bias in (("more", 1e3), ("less", -1e3))]

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "sign", killed)
        with pytest.raises(KeyboardInterrupt):
            soup(runs, tmp_path / "soup")
    assert soup(runs, tmp_path / "soup").accuracy == 1
    assert load_classifier(tmp_path / "soup").classes


def test_a_soup_of_runs_that_skipped_images_skips_them(
    colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = Path(shutil.copytree(colours, tmp_path / "photos"))
    for split in ("train", "test"):
        (photos / split / "red" / "0.png").write_text("no image")
    runs = []
    for name, lr in (("a", 0.005), ("b", 0.004)):
        options = {"method": "basic", "epochs": 2, "optimizer": "adamw", "lr": lr, "on_bad_image": "skip"}
        runs.append(train(quick_config(photos, tmp_path / name, **options)))
    capsys.readouterr()
    assert main(["soup", *map(str, runs), "--output", str(tmp_path / "soup")]) == 0
    assert "cannot be read" in " ".join(capsys.readouterr().err.split())


def test_an_average_that_is_no_better_is_not_written(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = biased(good, tmp_path / "other", 1e3)
    assert main(["soup", str(good), str(other), "--output", str(tmp_path / "soup")]) == 0
    assert "no average validates better than" in capsys.readouterr().out
    assert not (tmp_path / "soup").exists()


def test_a_soup_on_other_images_says_so(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [biased(good, tmp_path / name, bias) for name, bias in (("more", 1e3), ("less", -1e3))]
    for run in runs:
        sign(run, run=read_manifest(run)["run"], data="of other images")
    assert main(["soup", *map(str, runs), "--output", str(tmp_path / "soup")]) == 0
    assert f"are not those that {runs[0]} was trained on (names, sizes or labels)" in capsys.readouterr().err


def test_statistics_of_batch_norm_are_computed_again(run: Path) -> None:
    classifier = load_classifier(run)
    samples = splits_of_run(run, classifier.config, read_data(classifier.config["data"]))["train"]
    average = _average([classifier, classifier], samples, 64)
    pixels = np.stack([classifier.preprocessing.pixels(samples.load(i)) for i in range(len(samples))])
    inputs, seen = classifier.preprocessing.evaluation_input(torch.from_numpy(pixels)), []
    first = next(module for module in average.model.modules() if isinstance(module, nn.BatchNorm2d))
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        average.model(inputs)
    torch.testing.assert_close(first.running_mean, seen[0].mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first.running_var, seen[0].var((0, 2, 3)), atol=1e-5, rtol=1e-4)


def test_runs_that_do_not_go_together_are_refused(good: Path, run: Path, colours: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds a test_resnet and .* a small, whose weights cannot be averaged"):
        soup([good, run], tmp_path / "soup")
    seed = train(quick_config(colours, tmp_path / "seed", method="basic", epochs=1, seed=1))
    with pytest.raises(RunError, match="held out for validation; train runs with the same `seed`"):
        soup([good, seed], tmp_path / "soup")
    for split, code in (("val", 2), ("test", 0)):  # an ensemble may have held out different images if it is tested
        assert main(["evaluate", str(good), str(seed), "--split", split]) == code
    last = train(quick_config(colours, tmp_path / "last", method="basic", epochs=1, select="last"))
    with pytest.raises(RunError, match="held out no validation images"):
        soup([good, last], tmp_path / "soup")
    assert main(["soup", str(good), "--output", str(tmp_path / "soup")]) == 2


def test_a_run_that_is_named_twice_is_refused(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(good)
    assert main(["soup", str(good), str(tmp_path / "link"), "--output", str(tmp_path / "soup")]) == 2
    assert capsys.readouterr().err == f"semaug: the run {good} is named twice\n"
