"""The command line on real files, as a user would run it."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from PIL import Image

import forks
from commands import OPTIONS, semaug, semaug_process
from forks import Fork
from photos import photo_folder
from semaug.cli.common import command_line, with_flags
from semaug.cli.evaluate import Evaluate
from semaug.cli.main import COMMANDS, find_command, main
from semaug.cli.options import options
from semaug.cli.predict import Predict
from semaug.cli.train import Train
from semaug.util.errors import SettingError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    succeeds("train", "--data", photos, "--output", folder, "--epochs", 2, *OPTIONS)
    return folder


def succeeds(*arguments: object) -> None:
    assert main(list(map(str, arguments))) == 0


def test_a_trained_model_is_evaluated_used_and_exported(
    photos: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (run / "report.html").read_text().lower().startswith("<!doctype html>")
    succeeds("evaluate", run, "--json", tmp_path / "scores.json")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["split"] == "test"
    assert scores["top1"] == json.loads((run / "evaluation.json").read_text())["top1"]

    (tmp_path / "broken.png").write_bytes(b"nothing")
    output = tmp_path / "answers.csv"
    succeeds("predict", run, photos / "test", tmp_path / "broken.png", "--output", output, "--top-k", 2)
    assert "13 images, 1 could not be read" in capsys.readouterr().err
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    assert rows[-1]["error"]

    succeeds("export", run, tmp_path / "exported", "--no-onnx")
    succeeds("evaluate", tmp_path / "exported", "--data", photos, "--json", tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["top1"] == scores["top1"]


def test_without_a_test_split_the_images_held_out_in_training_are_measured(photos: Path, tmp_path: Path) -> None:
    """Never the images that were trained on, unless the user asks for them."""
    folder, scores = tmp_path / "run", tmp_path / "scores.json"
    succeeds("train", "--data", photos / "train", "--output", folder, "--epochs", 1, *OPTIONS)
    succeeds("evaluate", folder, "--json", scores)
    measured, trained = json.loads(scores.read_text()), json.loads((folder / "evaluation.json").read_text())
    assert measured["split"] == trained["split"] == "val"
    assert measured["count"] == trained["count"] == 2 * len(json.loads((folder / "classes.json").read_text()))
    assert measured["top1"] == pytest.approx(trained["top1"])
    succeeds("evaluate", folder, "--split", "train", "--json", scores)
    assert json.loads(scores.read_text())["split"] == "train"


def test_of_other_data_the_training_images_are_measured_last(photos: Path, run: Path, tmp_path: Path) -> None:
    others, scores = tmp_path / "others", tmp_path / "scores.json"
    shutil.copytree(photos / "train", others / "train")
    succeeds("evaluate", run, "--data", others, "--json", scores)
    assert json.loads(scores.read_text())["split"] == "train"
    shutil.copytree(photos / "test", others / "val")
    succeeds("evaluate", run, "--data", others, "--json", scores)
    assert json.loads(scores.read_text())["split"] == "val"


def test_predict_reads_paths_from_standard_input(
    photos: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((photos / "test").rglob("*.png"))[:3]
    paths = "".join(f"{file}\n" for file in files).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(paths)))
    succeeds("predict", run, "-", "--format", "jsonl")
    assert [json.loads(line)["path"] for line in capsys.readouterr().out.splitlines()] == [str(file) for file in files]


def test_a_missing_file_is_an_error_row_however_it_is_named(photos: Path, run: Path) -> None:
    files = [str(sorted((photos / "test").rglob("*.png"))[0]), "missing.jpg"]
    named = semaug("predict", run, *files, "--format", "jsonl")
    listed = semaug("predict", run, "-", "--format", "jsonl", stdin="\n".join(files))
    assert (named.returncode, named.stdout) == (listed.returncode, listed.stdout)
    first, second = map(json.loads, named.stdout.splitlines())
    assert (named.returncode, first["error"], second["predictions"]) == (0, None, [])
    assert second["error"] == "cannot read the image missing.jpg: No such file or directory"
    assert "2 images, 1 could not be read" in named.stderr


def test_the_same_command_again_reports_that_the_run_is_complete(
    photos: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeeds("train", "--data", photos, "--output", run, "--epochs", 2, *OPTIONS)
    assert "is complete" in capsys.readouterr().err


def test_a_killed_command_resumes_when_it_is_run_again(photos: Path, tmp_path: Path) -> None:
    """The killed one in a process of its own, started as a user would."""
    command = ["train", "--data", str(photos), "--output", str(tmp_path / "run"), "--epochs", "10", *OPTIONS]
    process = subprocess.Popen([sys.executable, "-m", "semaug", *command], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = semaug(*command)
    assert done.returncode == 0, done.stderr
    assert "resuming after epoch" in done.stderr
    assert [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()] == list(range(1, 11))


def test_data_check_reports(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeeds("data", "check", photos, "--json", tmp_path / "report.json", "--workers", 0)
    shown = capsys.readouterr().out
    assert "24 images of 3 classes" in shown
    assert "no problems found" in shown
    assert json.loads((tmp_path / "report.json").read_text())["classes"] == 3


@pytest.mark.parametrize("name", ["birds", "cars"])
def test_a_folder_called_like_a_data_set_is_never_confused_with_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo_folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for command in (["train", "--data", name], ["data", "check", name], ["compare", "--data", name]):
        assert main(command) == 2
        assert f"write ./{name} for the folder" in capsys.readouterr().err
    succeeds("data", "check", f"./{name}", "--workers", 0)
    assert f"{name}: 3 classes" in capsys.readouterr().out


def test_a_data_set_may_lie_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo_folder(tmp_path / "cars")
    monkeypatch.chdir(tmp_path)
    succeeds("data", "check", "cars", "--data-root", ".", "--workers", 0)
    assert "cars: 3 classes" in capsys.readouterr().out


def test_files_of_other_types_are_counted_in_training_and_in_the_check(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos")
    species = sorted((folder / "train").iterdir())[0]
    for name in ("a.HEIC", "b.heic", "c.raw", ".hidden", "Thumbs.db"):
        (species / name).write_bytes(b"something")
    phrase = "3 files of other types ignored (.heic, .raw); pip install pillow-heif to read .heic"
    checked = semaug("data", "check", folder, "--workers", 0)
    assert f"! {phrase}." in checked.stdout
    assert "no problems found" not in checked.stdout
    command = ["train", "--data", str(folder), "--output", str(tmp_path / "run"), "--epochs", "1", *OPTIONS]
    code, shown = Fork(tmp_path / "log", forks.semaug, command).wait()  # a process prints warnings as our sentences
    assert code == 0
    assert f"\nsemaug: photos: {phrase}\n" in f"\n{shown}"


def test_photos_in_avif_are_read_and_in_heic_where_the_package_is_installed(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos")
    for species in (folder / "train").iterdir():
        first, second, *_ = sorted(species.iterdir())
        Image.open(first).save(first.with_suffix(".avif"))
        first.unlink()
        second.rename(second.with_suffix(".heic"))
    without = semaug("data", "check", folder, "--workers", 0)
    assert "train: 21 images of 3 classes" in without.stdout
    assert "! 3 files of other types ignored (.heic)" in without.stdout
    package = tmp_path / "packages" / "pillow_heif.py"
    package.parent.mkdir()
    package.write_text(
        "from PIL import Image, PngImagePlugin\n"
        "def register_heif_opener():\n"
        "    Image.register_open('HEIF', PngImagePlugin.PngImageFile)\n"
    )
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    installed = semaug_process("data", "check", folder, "--workers", 0, PYTHONPATH=path)
    assert "train: 24 images of 3 classes" in installed.stdout
    assert "no problems found" in installed.stdout


def test_files_that_a_table_lists_and_that_are_missing_can_be_skipped(photos: Path, tmp_path: Path) -> None:
    files = sorted((photos / "train").rglob("*.png"))
    rows = [f"{file};{file.parent.name}" for file in files]
    rows += [f"gone-{i}.jpg;{files[0].parent.name}" for i in range(2)]
    (tmp_path / "list.csv").write_text("\n".join(["path;label", *rows]))
    command = ["train", "--data", "list.csv", "--output", "run", "--epochs", 1, *OPTIONS]
    stopped = semaug(*command, cwd=tmp_path)
    assert stopped.returncode == 2
    assert "2 of 26 images cannot be read" in stopped.stderr
    assert "gone-0.jpg (No such file or directory)" in stopped.stderr
    assert "--on-bad-image to skip" in stopped.stderr
    skipped = semaug(*command, "--on-bad-image", "skip", cwd=tmp_path)
    assert skipped.returncode == 0, skipped.stderr
    assert "2 of 26 images cannot be read" in skipped.stderr
    used = re.search(r"list: 3 classes, (\d+) train, (\d+) val images", skipped.stderr)
    assert used is not None
    assert int(used[1]) + int(used[2]) == 24
    assert "! 2 images are unreadable: train: gone-0.jpg" in semaug("data", "check", "list.csv", cwd=tmp_path).stdout


def test_a_message_about_a_table_names_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.csv").write_text("path;label\na.jpg;crow\n")
    assert main(["data", "check", "list.csv"]) == 2
    assert "none of the 1 images listed in list.csv exists" in capsys.readouterr().err


def test_a_strict_check_fails_where_there_is_a_problem(photos: Path, tmp_path: Path) -> None:
    sound = semaug("data", "check", photos, "--strict", "--workers", 0)
    assert (sound.returncode, sound.stderr) == (0, "")
    shutil.copytree(sorted((photos / "train").iterdir())[0], tmp_path / "one" / "crow")
    sorted((tmp_path / "one" / "crow").iterdir())[0].write_bytes(b"")
    checked = semaug("data", "check", tmp_path / "one", "--workers", 0)
    assert checked.returncode == 0
    assert "one: 1 class\n" in checked.stdout
    assert "! There is a single class; training needs at least two." in checked.stdout
    assert "! 1 image is unreadable: train: crow/" in checked.stdout
    strict = semaug("data", "check", tmp_path / "one", "--workers", 0, "--strict")
    assert (strict.returncode, strict.stdout) == (2, checked.stdout)
    assert strict.stderr.strip() == f"semaug: {tmp_path / 'one'} has 2 problems"


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
        (["demo", "--methods", "magic"], "unknown method 'magic'; the methods are basic, "),
        (["--modle", "small", "train"], "options follow the command, as in semaug train --modle"),
        (["trian"], "there is no command 'trian'; did you mean semaug train? semaug --help lists all commands"),
        (["train", "--quiet", "--verbose"], "--quiet and --verbose cannot be combined"),
        (["evaluate", "nowhere", "--device", "cuda"], "set --device to cpu, or leave it out"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(arguments) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("semaug: ")
    assert sentence in last


@pytest.mark.parametrize("command", [["export", "run", ""], ["demo", "--output", ""], ["train", "--output="]])
def test_an_empty_path_is_not_the_present_folder(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert "the path is empty; for this folder, use ." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["data", "check"], ["data", "shards"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: semaug{''.join(f' {word}' for word in command)}" in shown
    assert all(name in shown for name in COMMANDS) == (command == [])
    assert " object at " not in shown  # instead of a default


@pytest.mark.parametrize("name", ["train", "compare", "bench", "reproduce", "evaluate", "predict", "figures", "serve"])
def test_options_are_in_groups_with_their_defaults(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, kind, _ in options(find_command(name)):
        assert "group" in option.metadata or tyro.conf.Positional in kind.__metadata__, option.name
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "{None" not in shown
    assert "default: None" not in shown
    assert " hardware options " in shown


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["data", "--help"]])
def test_the_help_fits_its_width_in_a_pipe(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_ten_options_of_training_that_matter_most_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    first, *others = re.split(r"^\W*(\w+) options\W*$", capsys.readouterr().out, flags=re.MULTILINE)
    names = ["data", "model", "method", "epochs", "output", "resize", "crop", "batch-size", "lr", "config"]
    assert re.findall(r"^. --([a-z-]+)", first, re.MULTILINE) == names
    assert others[::2] == ["data", "model", "method", "schedule", "hardware", "output"]


def test_a_wrong_option_gets_one_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--modle", "resnet50"]) == 2
    assert re.findall(r"--[a-z]+", capsys.readouterr().err) == ["--modle", "--model", "--help"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--epochs", "a whole number"),
        ("--lr", "a number"),
        ("--strength", "auto or a number"),
        ("--frozen-blocks", "stem or auto or a whole number"),
    ],
)
def test_an_option_that_is_no_number_says_what_it_expects(
    option: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", option, "many"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"Error parsing {option}: expected {expected}, not many" in shown
    assert "Range" not in shown


def test_bash_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeeds("completion", "bash")
    script = capsys.readouterr().out
    assert "complete -o default -F _tyro_semaug semaug" in script
    (tmp_path / "semaug.bash").write_text(script)
    complete = "COMP_WORDS=({}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _tyro_semaug; echo ${{COMPREPLY[*]}}"
    lines = ["semaug tr", "semaug train --meth", "semaug train --method isda+cut", "semaug data ch"]
    commands = "\n".join(["source ./semaug.bash", *map(complete.format, lines)])
    answers = subprocess.run(["bash", "-c", commands], cwd=tmp_path, capture_output=True, text=True)
    assert answers.stdout.split() == ["train", "--method", "isda+cutmix", "check"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    succeeds("completion", shell)
    assert "isda+cutmix" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "resumable"),
    [("train", True), ("demo", True), ("reproduce", True), ("compare", True), ("bench", False), ("report", False)],
)
def test_only_an_interrupted_command_that_can_resume_says_so(
    command: str, resumable: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(find_command(command), "run", interrupt)
    assert main([command]) == 130
    assert ("run the same command again to resume" in capsys.readouterr().err) == resumable


def test_a_reader_that_closes_the_output_early_sees_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "semaug", "report", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    succeeds("--version")
    assert capsys.readouterr().out == f"semaug {version('semaug')}\n"
    succeeds("--help")
    assert "semaug --version" in capsys.readouterr().out


def test_a_run_whose_output_is_a_file_reports_progress(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("semaug.util.progress.LINE_EVERY", 0.0)
    succeeds("data", "check", photos, "--workers", 0)
    assert "reading images: 35 of 36, " in capsys.readouterr().err


def test_settings_come_from_a_file_and_options_override_them(photos: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(f"data: {photos}\nlr: 2e-2\ncompile: false\nepochs: 7\nstrength: auto\n")
    printed = semaug("train", "--epochs", 3, "--config", "settings.yaml", "--print-config", cwd=tmp_path)
    settings = yaml.safe_load(printed.stdout)
    assert (settings["data"], settings["lr"], settings["epochs"]) == (str(photos), 0.02, 3)
    assert (settings["model"], settings["augmentation"]["strength"]) == ("resnet50", "auto")
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    assert semaug("train", "--config=printed.yaml", "--print-config", cwd=tmp_path).stdout == printed.stdout
    before = json.loads((run / "config.json").read_text())
    again = yaml.safe_load(semaug("train", "--config", run / "config.json", "--print-config").stdout)
    assert again.pop("output") != before["output"]
    assert again == {name: before[name] for name in again}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("text", ["yes", "no", "on", "True", "null", "~", "", ".inf", "1_000", "0x10", "2024-01-01"])
def test_values_in_a_file_of_settings_are_those_of_the_command_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for written in (f"data: {text}\n", f'{{\n\t"data": "{text}"\n}}'):
        Path("settings.yaml").write_text(written)
        succeeds("train", "--config", "settings.yaml", "--print-config")
        assert yaml.safe_load(capsys.readouterr().out)["data"] == text


def test_a_file_of_settings_has_words_for_true_false_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text("resume: no\ngraphs: true\npretrained: off\ncache: ~\noutput: '~'\nepochs:\n")
    succeeds("train", "--config", "settings.yaml", "--print-config")
    settings = yaml.safe_load(capsys.readouterr().out)
    assert [settings[name] for name in ("resume", "graphs", "pretrained", "cache", "output", "epochs")] == [
        False, True, False, None, "~", 15,
    ]  # fmt: skip


def test_numbers_in_a_file_of_settings_are_those_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """YAML would read an octal number, a date, a number of base 60, and a folder as a number."""
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text("seed: 010\noutput: 2024-01-01\ndata: 1.10\nlr: 1e-3\n")
    succeeds("train", "--config", "settings.yaml", "--print-config")
    settings = yaml.safe_load(capsys.readouterr().out)
    assert [settings[name] for name in ("seed", "data", "lr")] == [10, "1.10", 0.001]
    Path("settings.yaml").write_text("data: birds\nlr: 1:30\n")
    assert main(["train", "--config", "settings.yaml"]) == 2
    assert "1:30" in capsys.readouterr().err


def test_the_settings_of_a_run_name_its_images_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "here" / "birds").mkdir()
    (tmp_path / "elsewhere").mkdir()
    stored = {"format": 1, "base": "../..", "data": "./birds", "weights": "nowhere.safetensors"}
    (tmp_path / "here" / "runs" / "a" / "config.json").write_text(json.dumps(stored))
    for folder, data in (("here", "./birds"), ("elsewhere", str(tmp_path / "here" / "birds"))):
        monkeypatch.chdir(tmp_path / folder)
        succeeds("train", "--config", "../here/runs/a/config.json", "--print-config")
        settings = yaml.safe_load(capsys.readouterr().out)
        assert (settings["data"], settings["weights"]) == (data, "nowhere.safetensors")
    (tmp_path / "here" / "📷").mkdir()  # which JSON writes as two characters
    (tmp_path / "here" / "runs" / "a" / "config.json").write_text(json.dumps(stored | {"data": "📷"}))
    succeeds("train", "--config", "../here/runs/a/config.json", "--print-config")
    assert yaml.safe_load(capsys.readouterr().out)["data"] == str(tmp_path / "here" / "📷")
    (tmp_path / "here" / "data").mkdir()
    stored |= {"data": "cub", "data_root": None}
    (tmp_path / "here" / "runs" / "a" / "config.json").write_text(json.dumps(stored))
    succeeds("train", "--config", "../here/runs/a/config.json", "--print-config")
    assert yaml.safe_load(capsys.readouterr().out)["data_root"] == str(tmp_path / "here" / "data")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("epoch: 3", "settings.yaml has an unknown setting 'epoch'; did you mean epochs?"),
        ("epochs: [1, 2]", "settings.yaml: the setting epochs has several values"),
        ("compile: maybe", "settings.yaml: the setting compile must be true or false"),
        ("batch-size: 4\nbatch_size: 8", "settings.yaml: the setting 'batch_size' has two values"),
        ("strength: 3\naugmentation: {strength: 5}", "settings.yaml: the setting 'strength' has two values"),
        ("a: b: c", "settings.yaml is neither YAML nor JSON (line 1)"),
        ('data: "C:\\photos"', "settings.yaml is neither YAML nor JSON (line 1): found unknown escape character 'p'"),
        ("\0", "settings.yaml is neither YAML nor JSON"),
        ('data: birds\noutput: "\\ud800"', "settings.yaml: line 2 has half a character (a lone surrogate)"),
        ("hello", "settings.yaml does not hold settings"),
        (None, "there is no file settings.yaml"),
    ],
)
def test_a_wrong_file_of_settings_is_one_sentence(
    content: str | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("settings.yaml").write_text(content)
    assert main(["train", "--config", "settings.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"semaug: {sentence}")


def test_a_dry_run_says_what_would_be_trained(photos: Path, tmp_path: Path) -> None:
    command = ["train", "--data", photos, "--epochs", 1, "--output", "run", *OPTIONS]
    done = semaug(*command, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"data: {photos.name}, 3 classes, 18 train, 6 val, 12 test images",
        "network: small, 0.1 million parameters, random weights, 32 px",
        "training: isda, 1 epoch, batches of 4",
        "output: run, a new run",
        "dry run: nothing was trained or written",
    ]
    assert list(tmp_path.iterdir()) == []
    wrong = semaug(*command, "--dry-run", "--model", "resnet5o", cwd=tmp_path)
    assert (wrong.returncode, "unknown model 'resnet5o'" in wrong.stderr) == (2, True)


def test_a_quiet_run_prints_the_result_and_errors(photos: Path, tmp_path: Path) -> None:
    command = ["train", "--data", photos, "--epochs", 1, "--output", "run", *OPTIONS, "--quiet"]
    done = semaug(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "run: model.safetensors, report.html\n"
    assert "quiet" not in json.loads((tmp_path / "run" / "config.json").read_text())
    failed = semaug(*command, "--lr", 1, cwd=tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.startswith("semaug: run holds a run with other settings (lr 0.01 → 1.0)")


def test_a_verbose_run_prints_settings_and_all_numbers_of_an_epoch(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    succeeds("train", "--data", photos, "--epochs", 1, "--output", run, *OPTIONS, "--verbose")
    shown = capsys.readouterr().err
    row = json.loads((run / "metrics.jsonl").read_text())
    assert all(f" {name} " in shown for name in [*row, "strength_power", "on_bad_image", "batch_size"])


def test_settings_in_messages_become_flags_of_the_command() -> None:
    assert with_flags("`batch_size` must be at least 1", Train()) == "--batch-size must be at least 1"
    assert with_flags("give a larger `strength_power`", Train()) == "give a larger --strength-power"  # a nested option
    assert with_flags("`device` and `lr`", Evaluate(Path("run"))) == "--device and `lr`"  # evaluate has no --lr
    assert with_flags("`model` and `images`", Predict(Path("run"), ())) == "`model` and `images`"  # positional
    for text in (
        "run `semaug report`",
        "a `batch size`",
        "`Batch_size`",
        "``batch_size``",
        "batch_size",
        "`batch_size",
    ):
        assert with_flags(text, Train()) == text
    assert with_flags("`batch_size`", None) == "`batch_size`"


def test_errors_of_the_library_are_printed_with_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Any) -> None:
        raise SettingError("choose another `data_root`, not `root`")

    monkeypatch.setattr(Evaluate, "run", fail)
    assert main(["evaluate", "run"]) == 2
    assert capsys.readouterr().err == "semaug: choose another --data-root, not `root`\n"


def test_a_command_line_lists_the_options_that_are_not_defaults() -> None:
    options = Predict(Path("my run"), ("a.jpg", "b.jpg"), top_k=3, device="cpu")
    assert command_line("predict", options) == "semaug predict 'my run' a.jpg b.jpg --top-k 3 --device cpu"
    assert command_line("train", Train(compile=True, resume=False)) == "semaug train --no-resume --compile"
