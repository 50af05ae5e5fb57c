"""A run knows its settings, data and files: what is not its own is refused, and nothing is overwritten."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import OPTIONS
from forks import Fork, hold_lock
from photos import photo_folder
from semaug.cli.main import main
from semaug.training import checkpoints, run_directory, trainer
from semaug.training.run_directory import RunDirectory
from semaug.util import locks
from semaug.util.errors import DataError, SemaugError
from semaug.util.locks import LOCK

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def semaug(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; returns its exit code, and its sentence if it has failed, else its output."""

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        shown = capsys.readouterr()
        if code == 0:
            return 0, shown.out + shown.err
        (sentence,) = [line for line in shown.err.splitlines() if line.startswith("semaug: ")]
        assert "Traceback" not in shown.err
        return code, sentence

    return run


def arguments(data: Path, output: Path, epochs: int = 2) -> list[object]:
    return ["train", "--data", data, *OPTIONS, "--epochs", epochs, "--output", output, "--keep-checkpoints"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images without splits, of which training draws its validation images."""
    return photo_folder(tmp_path_factory.mktemp("data")) / "train"


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(list(map(str, arguments(data, run)))) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def own_data(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "photos"))


def interrupted(data: Path, run: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    """Train one epoch of two, as if the process had then been killed."""
    save = RunDirectory._save

    def once(self: RunDirectory, last: object, best: object) -> None:
        save(self, last, best)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_save", once)
        assert main(list(map(str, [*arguments(data, run), *options]))) == 130
    assert (run / "checkpoints" / "last").exists()
    assert not (run / "model.safetensors").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# -- the output folder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"config.json": "{}", "model.safetensors": "mine"}, "is not empty and holds no run"),
        ({"config.json": '{"format": 1}', "model.safetensors": "mine"}, "is not empty and holds an exported model"),
        ({"config.json": "mine"}, "cannot read"),
        ({"notes.txt": "mine"}, "is not empty and holds no run"),
    ],
)
def test_what_is_not_a_run_is_not_overwritten(
    data: Path, tmp_path: Path, semaug: Command, files: dict[str, str], sentence: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = contents(folder)
    code, shown = semaug(*arguments(data, folder))
    assert code == 2
    assert sentence in shown
    assert contents(folder) == before


def test_an_exported_folder_is_not_overwritten_and_an_export_overwrites_nothing_else(
    run: Path, data: Path, tmp_path: Path, semaug: Command
) -> None:
    assert semaug("export", run, tmp_path / "exported", "--no-onnx")[0] == 0
    before = contents(tmp_path / "exported")
    code, shown = semaug(*arguments(data, tmp_path / "exported"))
    assert (code, "holds an exported model; choose another --output" in shown) == (2, True)
    assert contents(tmp_path / "exported") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    code, shown = semaug("export", run, tmp_path / "mine", "--no-onnx")
    assert (code, "holds 'config.json', not from an export" in shown) == (2, True)
    assert contents(tmp_path / "mine") == {"config.json": b"mine"}


def test_a_finished_run_without_its_checkpoints_is_kept(run: Path, data: Path, semaug: Command) -> None:
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    code, shown = semaug(*arguments(data, run), "--no-resume")
    assert (code, "holds a run already" in shown) == (2, True)
    code, shown = semaug(*arguments(data, run, epochs=3))
    assert (code, "holds a run with other settings (epochs 2 → 3)" in shown) == (2, True)
    assert contents(run) == before
    assert "is complete" in semaug(*arguments(data, run))[1]
    (run / "model.safetensors").write_bytes(before["model.safetensors"][:1000])
    code, shown = semaug(*arguments(data, run))
    assert (code, "holds a run without its checkpoints" in shown) == (2, True)


@pytest.mark.parametrize("name", ["model.safetensors", "evaluation.json", "metrics.jsonl"])
def test_damaged_results_are_restored_from_the_checkpoints(run: Path, data: Path, semaug: Command, name: str) -> None:
    before = (run / name).read_bytes()
    (run / name).write_bytes(before[: len(before) // 2])
    code, shown = semaug(*arguments(data, run))
    shown = " ".join(shown.split())
    assert code == 0
    assert f"{name} is damaged or was changed" in shown
    assert "writing the results again from the checkpoints" in shown
    assert (run / name).read_bytes() == before


CALIBRATION = {"temperature": 9.0, "images": 1, "right": [0.5], "wrong": []}


def test_the_calibration_of_another_model_is_not_signed(
    data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(data, tmp_path / "run", monkeypatch)
    (tmp_path / "run" / "calibration.json").write_text(json.dumps(CALIBRATION))
    before = contents(tmp_path / "run")
    code, shown = semaug(*arguments(data, tmp_path / "run"))
    assert (code, "manifest.json has no checksum for calibration.json" in shown) == (2, True)
    assert contents(tmp_path / "run") == before


def test_a_damaged_calibration_is_deleted_and_fitted_again(run: Path, data: Path, semaug: Command) -> None:
    assert semaug("evaluate", run, "--calibrate")[0] == 0
    fitted = (run / "calibration.json").read_bytes()
    (run / "calibration.json").write_text(json.dumps(CALIBRATION))
    for command in (["predict", run, data], ["evaluate", run, "--calibrate"], ["export", run, run.parent / "exported"]):
        code, shown = semaug(*command)
        assert (code, shown.endswith("the one in manifest.json; delete it, and calibrate the run again")) == (2, True)
    (run / "calibration.json").unlink()
    assert semaug("evaluate", run, "--calibrate")[0] == 0
    assert (run / "calibration.json").read_bytes() == fitted


def test_a_calibration_without_its_model_is_not_that_of_the_next(run: Path, data: Path, semaug: Command) -> None:
    assert semaug("evaluate", run, "--calibrate")[0] == 0
    shutil.rmtree(run / "checkpoints")
    for file in (*run.glob("*.safetensors"), run / "metrics.jsonl", run / "evaluation.json"):
        file.unlink()
    code, shown = semaug(*arguments(data, run))
    assert (code, "holds a run without its checkpoints" in shown) == (2, True)


def test_edited_scores_are_not_signed_if_the_run_is_killed_before_it_has_measured_them_again(
    run: Path, data: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").write_text(json.dumps(scores | {"top1": 0.123}))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", killed)
        assert main(list(map(str, arguments(data, run)))) == 130
    code, shown = semaug(*arguments(data, run))
    assert (code, "is complete" in shown) == (0, False)
    assert json.loads((run / "evaluation.json").read_text()) == scores


def test_only_checkpoints_are_deleted_at_the_end(run: Path, data: Path, semaug: Command) -> None:
    (run / "checkpoints" / "last.damaged").write_text("that of an earlier resume")
    (run / "checkpoints" / "notes.txt").write_text("mine")
    again = [option for option in arguments(data, run) if option != "--keep-checkpoints"]
    assert semaug(*again)[0] == 0
    assert [file.name for file in (run / "checkpoints").iterdir()] == ["notes.txt"]


def test_a_finished_run_is_not_trained_again_if_its_metrics_are_gone(run: Path, data: Path, semaug: Command) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    before = contents(run)
    code, shown = semaug(*arguments(data, run))
    assert (code, "holds a run without its checkpoints" in shown) == (2, True)
    assert contents(run) == before


@pytest.mark.parametrize("option", [("--data", "no/such/photos"), ("--model", "no_such_network"), ("--resize", "20")])
def test_a_run_that_fails_before_its_first_step_leaves_nothing(
    data: Path, tmp_path: Path, semaug: Command, option: tuple[str, str]
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("new", "empty", "above/new"):
        assert semaug(*arguments(data, tmp_path / folder), *option)[0] == 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


@pytest.mark.parametrize("content", ["{}", "no JSON"])
def test_a_run_that_fails_removes_no_description_but_its_own(
    data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    def replaced(*_: object) -> None:
        (tmp_path / "run" / "config.json").write_text(content)
        raise DataError("the images are gone")

    monkeypatch.setattr(trainer, "load_run_data", replaced)
    assert semaug(*arguments(data, tmp_path / "run")) == (2, "semaug: the images are gone")
    assert (tmp_path / "run" / "config.json").read_text() == content


def test_a_run_that_fails_after_it_has_written_a_log_begins_again(
    data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(track: object, folder: Path, *_: object) -> None:
        (folder / "tracking.json").write_text("{}")
        raise SemaugError("wandb does not start")

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "make_tracker", fails)
        assert semaug(*arguments(data, tmp_path / "run", 1))[0] == 2
    assert semaug(*arguments(data, tmp_path / "run", 1))[0] == 0


BEGINNING = ("config.json", "classes.json", "split.json", "manifest.json")


@pytest.mark.parametrize(
    ("files", "options", "sentence"),
    [
        ({"report.html": None, "samples.json": None}, [], "holds 'report.html', 'samples.json' of an earlier run;"),
        ({}, ["--lr", 0.02], "holds a run with other settings (lr 0.01 → 0.02)"),
        ({"split.json": "mine"}, [], "split.json exists and is another kind of file, which would be lost"),
        ({"bad_images.json": '{"mine": 1}'}, [], "bad_images.json exists and is another kind of file"),
    ],
)
def test_the_record_of_a_run_without_results_is_not_overwritten(
    finished: Path, data: Path, tmp_path: Path, semaug: Command, files: dict[str, str | None],
    options: list[object], sentence: str,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    for name in {*BEGINNING, *files}:
        text = files.get(name)
        (folder / name).write_text((finished / name).read_text() if text is None else text)
    before = contents(folder)
    for dry in ([], ["--dry-run"]):
        code, shown = semaug(*arguments(data, folder), *options, *dry)
        assert (code, sentence in shown) == (2, True)
        assert contents(folder) == before


def test_a_run_that_was_killed_before_its_first_step_begins_again(
    finished: Path, data: Path, tmp_path: Path, semaug: Command
) -> None:
    for count in range(1, len(BEGINNING) + 1):
        folder = tmp_path / f"run-{count}"
        folder.mkdir()
        for name in BEGINNING[:count]:
            shutil.copy(finished / name, folder)
        (folder / "tensorboard").mkdir()
        (folder / "notes.txt").write_text("mine")
        assert "a new run" in semaug(*arguments(data, folder), "--dry-run")[1]
        assert semaug(*arguments(data, folder))[0] == 0
        assert (folder / "notes.txt").read_text() == "mine"
        assert "holds a run already" in semaug(*arguments(data, folder), "--dry-run")[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("CUDA out of memory")])
def test_other_settings_may_follow_if_nothing_was_trained(
    data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns(LOCK))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "load_run_data", fails)
        assert main(list(map(str, arguments(data, tmp_path / "run")))) == (2 if isinstance(error, Exception) else 130)
    assert not (tmp_path / "run").exists()
    assert {file.name for file in (tmp_path / "killed").iterdir()} == set(BEGINNING)
    for name in ("run", "killed"):
        assert semaug(*arguments(data, tmp_path / name, epochs=1), "--lr", 0.02)[0] == 0


def test_unreadable_images_leave_their_list_and_any_settings_may_follow(
    own_data: Path, tmp_path: Path, semaug: Command
) -> None:
    bad = min(own_data.rglob("*.png"))
    content = bad.read_bytes()
    bad.write_text("no image")
    code, shown = semaug(*arguments(own_data, tmp_path / "run"))
    assert (code, "all listed in" in shown) == (2, True)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["bad_images.json"]
    bad.write_bytes(content)
    assert semaug(*arguments(own_data, tmp_path / "run", epochs=1))[0] == 0


def test_a_dry_run_refuses_a_folder_that_training_refuses(data: Path, tmp_path: Path, semaug: Command) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for dry in ([], ["--dry-run"]):
        code, shown = semaug(*arguments(data, tmp_path), *dry)
        assert (code, "is not empty and holds no run; choose another --output" in shown) == (2, True)


def test_an_output_inside_the_data_is_one_sentence(own_data: Path, semaug: Command) -> None:
    code, shown = semaug(*arguments(own_data, own_data / "runs" / "first"))
    assert code == 2
    assert f"{own_data}/runs/first is inside the data: choose another --output" in shown
    assert not (own_data / "runs").exists()  # it would be a class without images for the next run


def test_data_without_a_name_do_not_have_the_output_inside(
    tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, shown = semaug(*arguments(tmp_path, Path("run")), "--data", "")
    assert (code, "delete" in shown) == (2, False)
    assert shown.startswith("semaug: '' is neither an existing path nor the name of a data set")


def test_data_without_validation_images_are_one_sentence(own_data: Path, tmp_path: Path, semaug: Command) -> None:
    code, shown = semaug(*arguments(own_data, tmp_path / "run"), "--val-per-class", 0)
    assert (code, "photos leaves no images to validate on: --val-per-class is 0" in shown) == (2, True)
    for folder in own_data.iterdir():
        for file in sorted(folder.iterdir())[1:]:
            file.unlink()
    code, shown = semaug(*arguments(own_data, tmp_path / "run"))
    assert (code, "leaves no images to validate on: no class has two training images" in shown) == (2, True)


def test_an_output_folder_that_is_deleted_is_noticed_at_the_next_save(
    data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, save = tmp_path / "run", RunDirectory._save

    def delete(self: RunDirectory, last: dict[str, object], best: dict[str, object] | None) -> None:
        if last["epoch"] == 2:
            shutil.rmtree(folder)
        save(self, last, best)

    monkeypatch.setattr(RunDirectory, "_save", delete)
    code, shown = semaug(*arguments(data, folder, epochs=40))
    assert (code, "was deleted, moved or replaced during training" in shown) == (2, True)
    assert not folder.exists()


# -- checkpoints and data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_checkpoint_of_another_run_is_refused(
    finished: Path, data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    interrupted(data, tmp_path / "run", monkeypatch)
    shutil.copy(finished / "checkpoints" / name, tmp_path / "run" / "checkpoints" / name)
    before = contents(tmp_path / "run")
    code, shown = semaug(*arguments(data, tmp_path / "run"))
    assert (code, f"checkpoints/{name} is a checkpoint of another run" in shown) == (2, True)
    assert contents(tmp_path / "run") == before


def test_a_best_checkpoint_that_is_missing_is_one_sentence(run: Path, data: Path, semaug: Command) -> None:
    for file in (run / "checkpoints" / "best", checkpoints.previous(run / "checkpoints" / "best")):
        file.unlink(missing_ok=True)
    (run / "model.safetensors").unlink()
    code, shown = semaug(*arguments(data, run))
    assert (code, "has no intact checkpoint of its best epoch" in shown) == (2, True)


def rename(data: Path) -> None:
    first = min(data.iterdir())
    first.rename(first.with_name("Zebra"))


def swap(data: Path) -> None:
    first, second = sorted(data.iterdir())[:2]
    first.rename(data / "between")
    second.rename(first)
    (data / "between").rename(second)


def remove_half(data: Path) -> None:
    for folder in data.iterdir():
        for file in sorted(folder.iterdir())[::2]:
            file.unlink()


@pytest.mark.parametrize(("change", "what"), [(rename, "classes"), (swap, "images"), (remove_half, "images")])
def test_a_run_does_not_resume_on_other_data(
    own_data: Path,
    tmp_path: Path,
    semaug: Command,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    what: str,
) -> None:
    interrupted(own_data, tmp_path / "run", monkeypatch)
    before = contents(tmp_path / "run")
    change(own_data)
    code, shown = semaug(*arguments(own_data, tmp_path / "run"))
    assert code == 2
    assert f"the {what}" in shown
    assert "are not those that the run in" in shown
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("probe", [False, True])
def test_a_run_does_not_resume_from_other_weights(
    finished: Path, data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch, probe: bool
) -> None:
    weights = tmp_path / "weights.safetensors"
    shutil.copy(finished / "model.safetensors", weights)
    options = ["--weights", weights, *(["--freeze", "all"] if probe else [])]
    interrupted(data, tmp_path / "run", monkeypatch, *options)
    before = contents(tmp_path / "run")
    flip(weights)
    code, shown = semaug(*arguments(data, tmp_path / "run"), *options)
    assert (code, "does not hold the weights that the run in" in shown) == (2, True)
    assert contents(tmp_path / "run") == before
    shutil.copy(finished / "model.safetensors", weights)
    assert semaug(*arguments(data, tmp_path / "run"), *options)[0] == 0


def test_weights_of_a_damaged_run_are_refused(run: Path, data: Path, tmp_path: Path, semaug: Command) -> None:
    flip(run / "model.safetensors")
    code, shown = semaug(*arguments(data, tmp_path / "further"), "--weights", run)
    assert (code, "model.safetensors is damaged or was changed" in shown) == (2, True)


def test_the_same_images_with_other_dates_are_the_same_data(
    own_data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(own_data, tmp_path / "run", monkeypatch)
    for file in own_data.rglob("*.png"):
        file.touch()
    assert semaug(*arguments(own_data, tmp_path / "run"))[0] == 0


def test_images_that_are_added_later_do_not_change_the_validation_split(
    own_data: Path, tmp_path: Path, semaug: Command
) -> None:
    run, numbers = tmp_path / "run", tmp_path / "numbers.json"
    assert semaug(*arguments(own_data, run))[0] == 0
    assert semaug("evaluate", run, "--split", "val", "--json", numbers)[0] == 0
    before = json.loads(numbers.read_text())
    for folder in own_data.iterdir():
        for i, file in enumerate(sorted(folder.iterdir())):
            shutil.copy(file, file.with_name(f"added-{i}.png"))
    assert semaug("evaluate", run, "--split", "val", "--json", numbers)[0] == 0
    assert json.loads(numbers.read_text()) == before
    code, shown = semaug("evaluate", run)
    assert (code, f"warning: {CHANGED.format('photos', run)}" in " ".join(shown.split())) == (0, True)
    held_out = json.loads((run / "split.json").read_text())
    removed = held_out[min(held_out)][0]
    (own_data / removed).unlink()
    code, shown = semaug("evaluate", run, "--split", "val")
    assert (code, f"are missing or have another label in photos: {removed!r}" in shown) == (2, True)


CHANGED = "the images of {} are not those that {} was trained on (names, sizes or labels)"


def test_a_run_that_reaches_other_images_says_so_and_is_not_calibrated(
    own_data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of the same name, which relative paths in a moved, copied or exported run reach."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        shutil.copytree(own_data, place / "photos")
    changed = min((there / "photos").rglob("*.png"))
    changed.write_bytes(changed.read_bytes() + b" ")
    monkeypatch.chdir(here)
    assert semaug(*arguments(Path("photos"), Path("run")))[0] == 0
    assert semaug("export", "run", "exported", "--no-onnx")[0] == 0
    for name in ("run", "exported"):
        code, shown = semaug("evaluate", name, "--split", "train")
        assert (code, "warning" in shown) == (0, False)
        shutil.copytree(name, there / name)
    monkeypatch.chdir(there)
    for name in ("run", "exported"):
        code, shown = semaug("evaluate", name, "--split", "train")
        assert (code, " ".join(shown.split()).count(f"warning: {CHANGED.format('photos', name)}")) == (0, 1)
    before = contents(there / "run")
    code, shown = semaug("evaluate", "run", "--calibrate")
    assert (code, shown) == (
        2,
        f"semaug: {CHANGED.format('photos', 'run')}; to calibrate it, restore them, or train it again on these",
    )
    assert contents(there / "run") == before


def test_runs_on_the_same_images_are_recognised_by_these_and_not_by_their_path(
    own_data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(own_data, tmp_path / "other" / "photos"))
    changed = min(other.rglob("*.png"))
    changed.write_bytes(changed.read_bytes() + b" ")
    runs = [tmp_path / name for name in ("absolute", "relative", "elsewhere")]
    places = [(tmp_path, own_data), (tmp_path, "photos"), (other.parent, "photos")]
    for run, (place, images) in zip(runs, places, strict=True):
        monkeypatch.chdir(place)
        assert semaug(*arguments(Path(images), run, 1))[0] == 0
    absolute, relative, elsewhere = runs
    assert semaug("evaluate", absolute, relative)[0] == 0
    code, shown = semaug("evaluate", relative, elsewhere)
    assert (code, "were trained on different data; name the images with --data" in shown) == (2, True)


# -- checksums -----------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.unlink()  # it may be mapped into memory
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "classes.json", "config.json", "split.json"])
def test_a_flipped_bit_is_one_sentence(run: Path, data: Path, tmp_path: Path, semaug: Command, name: str) -> None:
    flip(run / name)
    commands: list[list[object]] = [["evaluate", run, "--split", "val"]]
    if name != "split.json":
        commands += [["predict", run, data], ["export", run, tmp_path / "exported", "--no-onnx"], ["serve", run]]
    for command in commands:
        code, shown = semaug(*command)
        assert code == 2
        assert "is damaged or was changed" in shown or f"cannot read {run / name}" in shown
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda content: {**content, "preprocessing": {**content["preprocessing"], "resize": 64}}),
        ("classes.json", lambda content: content[::-1]),
        ("split.json", lambda content: {label: files[1:] for label, files in content.items()}),
    ],
)
def test_a_value_that_was_changed_is_one_sentence(
    run: Path, semaug: Command, name: str, change: Callable[[Any], Any]
) -> None:
    (run / name).write_text(json.dumps(change(json.loads((run / name).read_text()))))
    code, shown = semaug("evaluate", run, "--split", "val")
    assert (code, f"{name} is damaged or was changed" in shown) == (2, True)


def test_a_split_that_was_removed_is_not_drawn_again(run: Path, semaug: Command) -> None:
    (run / "split.json").unlink()
    code, shown = semaug("evaluate", run, "--split", "val")
    assert (code, f"there is no file {run / 'split.json'}" in shown) == (2, True)


def test_scores_that_were_changed_are_not_exported(run: Path, tmp_path: Path, semaug: Command) -> None:
    content = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").write_text(json.dumps({**content, "top1": 1.0}))
    code, shown = semaug("export", run, tmp_path / "exported", "--no-onnx")
    assert (code, "evaluation.json is damaged or was changed" in shown) == (2, True)
    assert not (tmp_path / "exported").exists()


def test_metrics_that_were_changed_are_not_drawn(run: Path, tmp_path: Path, semaug: Command) -> None:
    content = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(content.replace('"strength": ', '"strength": 9'))
    code, shown = semaug("figures", "augmentations", run, "--output", tmp_path / "figures")
    assert (code, "metrics.jsonl is damaged or was changed" in shown) == (2, True)


@pytest.mark.parametrize("name", ["classes.json", "evaluation.json", "config.json", "metrics.jsonl", "samples.json"])
def test_a_report_names_results_that_were_changed(run: Path, tmp_path: Path, semaug: Command, name: str) -> None:
    if name == "metrics.jsonl":
        (run / name).write_text((run / name).read_text().replace('"val_top1": 0.', '"val_top1": 0.9'))
    else:
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(content[::-1] if isinstance(content, list) else {**content, "top1": 1.0}))
    assert semaug("report", run, "--output", tmp_path / "report.html")[0] == 0
    assert f"{name} is damaged or was changed" in (tmp_path / "report.html").read_text()


COMPARE = "compare --data DATA --method basic --model small --epochs 1 --resize 40 --crop 32 --output OUT"
REPRODUCE = "reproduce theorem --scale small --output OUT"
MINE = "<!doctype html>\n<p>mine"


@pytest.mark.parametrize(
    ("command", "file", "mine"),
    [
        ("report RUN --output OUT/report.html", "report.html", MINE),
        ("demo --epochs 1 --output OUT", "report.html", MINE),
        ("demo --epochs 1 --output OUT", "isda/notes.txt", "mine"),
        ("bench --model small --pixels 32 --half 4 --seconds 1 --output OUT", "bench.json", '{"date": 1}'),
        ("bench --model small --pixels 32 --half 4 --seconds 1 --output OUT", "bench.svg", "<svg></svg>"),
        (REPRODUCE, "results.json", '{"scale": 1}'),
        (REPRODUCE, "results.md", "mine"),
        (REPRODUCE, "report.html", MINE),
        (COMPARE, "comparison.json", '{"mine": 1}'),
        (COMPARE, "comparison.md", "mine"),
        (COMPARE, "report.html", MINE),
        (COMPARE, "jobs.json", '{\n  "mine": 1\n}'),
        ("figures confusions RUN --output OUT", "confusions.html", MINE),
        ("figures confusions RUN --output OUT", "confusions.png", "mine"),
        ("export RUN OUT --no-onnx", "README.md", "mine"),
        ("soup RUN RUN --output OUT", "notes.txt", "mine"),
        ("data split DATA --output OUT/split.csv", "split.csv", "path,label,split,group\n"),
        ("data shards DATA OUT", "notes.txt", "mine"),
        ("data check DATA --json OUT/check.json", "check.json", "[]"),
        ("evaluate RUN --split val --json OUT/scores.json", "scores.json", '{"data": []}'),
        ("predict RUN DATA --output OUT/answers.csv", "answers.csv", "name,price\n"),
        ("predict RUN DATA --output OUT/labels.csv", "labels.csv", "path,label,split\n1.png,a,train\n"),
        ("predict RUN DATA --output OUT/l.jsonl", "l.jsonl", '{"path": "1.png", "label": "predictions"}\n'),
    ],
)
def test_no_command_replaces_a_file_that_is_not_its_own(
    finished: Path, data: Path, tmp_path: Path, semaug: Command, command: str, file: str, mine: str
) -> None:
    places = {"RUN": str(finished), "DATA": str(data), "OUT": str(tmp_path / "out")}
    (tmp_path / "out" / file).parent.mkdir(parents=True)
    (tmp_path / "out" / file).write_text(mine)
    for name, place in places.items():
        command = command.replace(name, place)
    code, shown = semaug(*command.split())
    assert code == 2
    assert any(words in shown for words in ("exists and is", "not from an export", "is not empty"))
    assert contents(tmp_path / "out") == {file: mine.encode()}


def test_the_same_command_replaces_its_own_files(finished: Path, data: Path, tmp_path: Path, semaug: Command) -> None:
    for command in (["report", finished, "--output", tmp_path / "report.html"],
                    ["figures", "confusions", finished, "--output", tmp_path],
                    ["predict", finished, data, "--output", tmp_path / "answers.csv"],
                    ["predict", finished, data, "--output", tmp_path / "answers.jsonl", "--format", "jsonl"],
                    ["data", "split", data, "--output", tmp_path / "split.csv"]):  # fmt: skip
        assert semaug(*command)[0] == semaug(*command)[0] == 0
    code, shown = semaug("data", "split", data, "--output", tmp_path / "split.csv", "--seed", 1)
    assert (code, "split.csv exists and is another table or file" in shown) == (2, True)


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx"])
def test_exported_files_have_checksums(run: Path, data: Path, tmp_path: Path, semaug: Command, name: str) -> None:
    onnx = name == "model.onnx"
    if onnx:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    folder = tmp_path / "exported"
    assert semaug("export", run, folder, "--onnx" if onnx else "--no-onnx")[0] == 0
    model = folder / name if onnx else folder
    assert semaug("evaluate", model, "--data", data)[0] == 0
    flip(folder / name)
    for command in (["evaluate", model, "--data", data], ["predict", model, data]):
        code, shown = semaug(*command)
        assert (code, f"{name} is damaged or was changed" in shown) == (2, True)


def test_a_model_card_that_was_edited_is_not_replaced(run: Path, data: Path, tmp_path: Path, semaug: Command) -> None:
    folder = tmp_path / "exported"
    for _ in range(2):  # the second export replaces the first
        assert semaug("export", run, folder, "--no-onnx")[0] == 0
    (folder / "README.md").write_text((folder / "README.md").read_text() + "My notes.\n")
    assert semaug("predict", folder, data)[0] == 0
    before = contents(folder)
    code, shown = semaug("export", run, folder, "--no-onnx")
    assert (code, "README.md was edited and would be replaced; move it, or choose another" in shown) == (2, True)
    assert contents(folder) == before
    (folder / "README.md").unlink()
    assert semaug("export", run, folder, "--no-onnx")[0] == 0


def test_an_export_deletes_and_replaces_no_file_that_was_added(run: Path, tmp_path: Path, semaug: Command) -> None:
    folder = tmp_path / "exported"
    assert semaug("export", run, folder, "--no-onnx")[0] == 0
    (folder / "model.onnx").write_text("a smaller one of my own")
    before = contents(folder)
    code, shown = semaug("export", run, folder, "--no-onnx")
    assert (code, "holds 'model.onnx', not from an export" in shown) == (2, True)
    assert contents(folder) == before


def test_an_exported_folder_does_not_guess_which_images_were_held_out(
    run: Path, data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)  # where the name of the data, which is all that it has, is a folder
    assert semaug("export", run, tmp_path / "exported", "--no-onnx")[0] == 0
    code, shown = semaug("evaluate", tmp_path / "exported")
    assert (code, "does not record which images of train it held out" in shown) == (2, True)
    assert semaug("evaluate", tmp_path / "exported", "--split", "train")[0] == 0
    code, shown = semaug("figures", "confusions", tmp_path / "exported", "--output", tmp_path / "figures")
    assert (code, "does not record which images it held out" in shown) == (2, True)


@pytest.mark.parametrize("command", ["report RUN --output RUN/report.html", "evaluate RUN --calibrate"])
def test_a_page_of_another_version_in_a_run_directory_is_renamed(run: Path, semaug: Command, command: str) -> None:
    words = command.replace("RUN", str(run)).split()
    (run / "report.html").write_text(MINE)
    code, shown = semaug(*words)
    assert (code, "is now report.previous.html" in " ".join(shown.split())) == (0, True)
    assert (run / "report.previous.html").read_text() == MINE
    assert semaug(*words)[0] == 0
    (run / "report.html").write_text("mine too")
    code, shown = semaug(*words)
    assert (code, "report.html exists and is another kind of file" in shown) == (2, True)
    assert (run / "report.html").read_text() == "mine too"
    assert (run / "report.previous.html").read_text() == MINE


@pytest.mark.parametrize("name", ["report.html", "scores.json"])
def test_a_run_is_not_calibrated_if_the_result_cannot_be_written(run: Path, semaug: Command, name: str) -> None:
    (run / name).write_text("mine")
    (run / "report.previous.html").write_text("mine, too")
    before = contents(run)
    code, shown = semaug("evaluate", run, "--calibrate", "--json", run / "scores.json")
    assert (code, f"{name} exists and is another kind of file, which would be lost" in shown) == (2, True)
    assert contents(run) == before


# -- one writer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "compare", "reproduce", "export"])
def test_a_folder_has_one_writer(
    finished: Path, data: Path, tmp_path: Path, semaug: Command, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock ends with its process, also if that is killed."""
    folder = tmp_path / "output"
    monkeypatch.setattr(locks, "GRACE_SECONDS", 0.3)
    other = Fork(tmp_path / "log", hold_lock, folder, LOCK, 300.0)
    try:
        other.wait_until(lambda: other.log.exists() and other.log.read_text() == "locked\n")
        options: dict[str, list[object]] = {
            "train": arguments(data, folder),
            "compare": ["compare", "--output", folder, "--data", data, "--model", "small"],
            "reproduce": ["reproduce", "theorem", "--scale", "small", "--output", folder],
            "export": ["export", finished, folder, "--no-onnx"],
        }
        code, shown = semaug(*options[command])
        assert code == 2
        assert f"process {other.pid} on " in shown
        assert f"is writing to {folder}; wait until it has ended, or choose another folder" in shown
        assert [file.name for file in folder.iterdir()] == [".lock"]
    finally:
        other.send(signal.SIGKILL)
        other.wait()
    if command == "train":
        assert semaug(*arguments(data, folder, epochs=1))[0] == 0
        assert not (folder / ".lock").exists()


def test_no_run_is_validated_on_images_that_its_weights_were_trained_on(
    finished: Path, data: Path, tmp_path: Path, semaug: Command
) -> None:
    new = [*arguments(data, tmp_path / "new", 1), "--weights"]
    for weights in (finished, finished / "model.safetensors"):
        code, shown = semaug(*new, weights, "--seed", 1)
        assert (code, "that this run would hold out for validation; use the seed" in shown) == (2, True)
        assert not (tmp_path / "new").exists()
    assert semaug(*new, finished, "--seed", 0)[0] == 0
    compared = ["compare", "--data", data, *OPTIONS, "--epochs", 1, "--output", tmp_path / "all"]
    code, shown = semaug(*compared, "--weights", finished, "--seeds", 0, 1)
    assert code == 2
    assert "that this run would hold out for validation; use the seed" in shown
    assert not (tmp_path / "all").exists()


def test_weights_of_unknown_training_images_are_a_warning(
    finished: Path, own_data: Path, data: Path, tmp_path: Path, semaug: Command
) -> None:
    """Images were added after the run that the weights come from, or it was exported; others have other images."""
    assert semaug("export", finished, tmp_path / "exported", "--no-onnx")[0] == 0
    photo = next(own_data.rglob("*.png"))
    shutil.copy(photo, photo.with_name("added.png"))
    grown = Path(shutil.copytree(own_data, tmp_path / "grown" / data.name))
    others = Path(shutil.copytree(own_data, tmp_path / "others"))
    for file in others.rglob("*.png"):
        file.rename(file.with_name(f"other-{file.name}"))
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    warning = "warning: it is unknown on which images of "
    for weights, images, warned in (
        (finished, grown, True),
        (tmp_path / "exported", data, True),
        (tmp_path / "exported", moved, True),
        (finished, own_data, True),
        (finished, others, False),
        (tmp_path / "exported", others, False),
    ):
        command = [*arguments(images, tmp_path / f"from-{weights.name}-{images.name}", 1), "--weights", weights]
        code, shown = semaug(*command)
        assert (code, f"{warning}{images.name} " in " ".join(shown.split())) == (0, warned)
    compared = ["compare", "--data", grown, *OPTIONS, "--epochs", 1, "--method", "isda", "--seeds", 0, "--jobs", 1]
    code, shown = semaug(*compared, "--weights", finished, "--output", tmp_path / "all")
    assert (code, " ".join(shown.split()).count(warning)) == (0, 1)


def test_the_manifest_of_another_program_beside_weights_is_ignored(
    finished: Path, data: Path, tmp_path: Path, semaug: Command
) -> None:
    (tmp_path / "downloaded").mkdir()
    shutil.copy(finished / "model.safetensors", tmp_path / "downloaded")
    (tmp_path / "downloaded" / "manifest.json").write_text('{"version": 1}')
    weights = tmp_path / "downloaded" / "model.safetensors"
    assert semaug(*arguments(data, tmp_path / "new", 1), "--weights", weights)[0] == 0


def test_a_sparse_file_of_weights_is_not_read_to_its_end(
    data: Path, tmp_path: Path, semaug: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(10**9)
    monkeypatch.setattr(run_directory, "checksum", lambda file: pytest.fail(f"{file} is read"))
    code, shown = semaug(*arguments(data, tmp_path / "new"), "--weights", tmp_path / "sparse.safetensors")
    assert (code, "cannot read weights from" in shown) == (2, True)


def take_in_turn(folder: Path, times: int) -> None:
    """In a fork: lock a folder again and again, without a pause."""
    locks.POLL_SECONDS = 0.0
    for _ in range(times):
        with locks.locked(folder, wait=True):
            pass


def test_a_lock_that_its_owner_removes_is_not_taken_for_a_file_of_the_users(tmp_path: Path) -> None:
    processes = [Fork(tmp_path / f"log-{i}", take_in_turn, tmp_path / "folder", 3000) for i in range(2)]
    assert [process.wait() for process in processes] == [(0, ""), (0, "")]


@pytest.mark.parametrize("command", ["train", "evaluate", "export"])
@pytest.mark.parametrize("kind", ["text", "link", "pipe"])
def test_a_file_of_the_users_that_is_called_like_a_lock_is_kept(
    run: Path, data: Path, tmp_path: Path, semaug: Command, command: str, kind: str
) -> None:
    folder = run if command == "evaluate" else tmp_path / "output"
    folder.mkdir(exist_ok=True)
    if kind == "link":  # in a run of unknown origin, one to any file
        (folder / LOCK).symlink_to(tmp_path / "absent")
    elif kind == "pipe":
        os.mkfifo(folder / LOCK)
    else:
        (folder / LOCK).write_text("mine")
    options: dict[str, list[object]] = {
        "train": arguments(data, folder),
        "evaluate": ["evaluate", run, "--split", "val", "--calibrate"],
        "export": ["export", run, folder, "--no-onnx"],
    }
    code, shown = semaug(*options[command])
    assert (code, f"{LOCK} exists and is not a lock file of semaug; move it, or choose another folder" in shown) == (
        2,
        True,
    )
    assert {"text": Path.is_file, "link": Path.is_symlink, "pipe": Path.is_fifo}[kind](folder / LOCK)
    assert kind != "text" or (folder / LOCK).read_text() == "mine"
    assert not (tmp_path / "absent").exists()
