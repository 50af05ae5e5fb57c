"""The real command line on real files, as a user would run it."""

import csv
import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from commands import OPTIONS, semaug
from photos import photo_folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = semaug("train", "--data", photos, "--output", folder, "--epochs", "2", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert "epoch 2/2" in done.stderr
    return folder


def test_a_trained_model_is_evaluated_used_and_exported(photos: Path, run: Path, tmp_path: Path) -> None:
    assert (run / "report.html").read_text().lower().startswith("<!doctype html>")
    evaluated = semaug("evaluate", run, "--json", tmp_path / "scores.json")
    assert evaluated.returncode == 0, evaluated.stderr
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["split"] == "test"
    assert scores["top1"] == json.loads((run / "evaluation.json").read_text())["top1"]

    (tmp_path / "broken.png").write_bytes(b"nothing")
    output = tmp_path / "answers.csv"
    predicted = semaug("predict", run, photos / "test", tmp_path / "broken.png", "--output", output, "--top-k", "2")
    assert predicted.returncode == 0, predicted.stderr
    assert "13 images, 1 could not be read" in predicted.stderr
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    assert rows[-1]["error"]

    exported = semaug("export", run, tmp_path / "exported", "--no-onnx")
    assert exported.returncode == 0, exported.stderr
    again = semaug("evaluate", tmp_path / "exported", "--data", photos, "--json", tmp_path / "again.json")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again.json").read_text())["top1"] == scores["top1"]


def test_without_a_test_split_what_training_held_out_is_measured(photos: Path, tmp_path: Path) -> None:
    """Never the images that were trained on, unless they are asked for."""
    folder, scores = tmp_path / "run", tmp_path / "scores.json"
    done = semaug("train", "--data", photos / "train", "--output", folder, "--epochs", "1", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert semaug("evaluate", folder, "--json", scores).returncode == 0
    measured, trained = json.loads(scores.read_text()), json.loads((folder / "evaluation.json").read_text())
    assert measured["split"] == trained["split"] == "val"
    assert measured["count"] == trained["count"] == 2 * len(json.loads((folder / "classes.json").read_text()))
    assert measured["top1"] == pytest.approx(trained["top1"])
    assert semaug("evaluate", folder, "--split", "train", "--json", scores).returncode == 0
    assert json.loads(scores.read_text())["split"] == "train"


def test_paths_come_from_standard_input_too(photos: Path, run: Path) -> None:
    files = sorted((photos / "test").rglob("*.png"))[:3]
    done = semaug("predict", run, "-", "--format", "jsonl", stdin="".join(f"{file}\n" for file in files))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["path"] for line in done.stdout.splitlines()] == [str(file) for file in files]


def test_the_same_command_again_says_that_it_is_complete(photos: Path, run: Path) -> None:
    done = semaug("train", "--data", photos, "--output", run, "--epochs", "2", *OPTIONS)
    assert done.returncode == 0
    assert "is complete" in done.stderr


def test_killed_and_run_again_it_goes_on(photos: Path, tmp_path: Path) -> None:
    command = ["train", "--data", str(photos), "--output", str(tmp_path / "run"), "--epochs", "40", *OPTIONS]
    process = subprocess.Popen([sys.executable, "-m", "semaug", *command], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = semaug(*command)
    assert done.returncode == 0, done.stderr
    assert "going on after epoch" in done.stderr
    epochs = [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()]
    assert epochs == list(range(1, 41))


def test_data_check_reports(photos: Path, tmp_path: Path) -> None:
    done = semaug("data", "check", photos, "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert "24 images of 3 classes" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["classes"] == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--data", "nowhere"], "neither an existing path nor the name of a data set"),
        (["train", "--model", "resnet5o", "--output", "x"], "unknown model 'resnet5o'"),
        (["train", "--data", "cub"], "CUB"),
        (["evaluate", "nowhere"], "there is no run directory nowhere"),
        (["evaluate", "."], "is not a run directory"),
        (["predict", "nowhere", "a.jpg"], "there is no run directory nowhere"),
        (["export", "nowhere", "out"], "there is no run directory nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["data", "check", "nowhere"], "neither an existing path"),
        (["demo", "--methods", "magic"], "unknown method 'magic'"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = semaug(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [[], ["train"], ["evaluate"], ["predict"], ["export"], ["report"], ["data", "check"], ["demo"]]
)
def test_every_command_explains_itself(command: list[str]) -> None:
    done = semaug(*command, "--help")
    assert done.returncode == 0
    assert "usage: semaug" in done.stdout


def test_a_reader_that_closes_the_output_early_sees_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "semaug", "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_the_version_is_that_of_the_package() -> None:
    done = semaug("--version")
    assert (done.returncode, done.stdout) == (0, f"semaug {version('semaug')}\n")
