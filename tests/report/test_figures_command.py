"""`semaug figures` as a user calls it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from semaug.cli.main import main
from semaug.inference.manifest import sign
from semaug.report.canvas import to_png
from semaug.report.charts import Series, rows
from semaug.report.figures import FIGURES, Figure, FigureKind, describe_figures, draw, write
from semaug.report.figures.figure import fragment
from semaug.report.html import chart
from semaug.util.files import write_json
from semaug.util.untrusted import read_json

Runs = dict[str, Path]
Train = Callable[..., Path]


def figures(*arguments: str | Path) -> int:
    return main(["figures", *map(str, arguments)])


@pytest.mark.parametrize(
    ("kind", "methods", "suffixes"),
    [
        ("neighbours", ("constant", "isda"), {".png", ".html"}),
        ("tsne", ("basic", "learnable"), {".png", ".svg", ".html"}),
        ("augmentations", ("basic", "learnable"), {".png", ".svg", ".html"}),
        ("diagnostics", ("isda", "learnable"), {".png", ".svg", ".html"}),
        ("confusions", ("basic",), {".png", ".html"}),
        ("parts", ("p2p",), {".png", ".html"}),
    ],
)
def test_files_and_a_caption(
    runs: Runs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    methods: tuple[str, ...],
    suffixes: set[str],
) -> None:
    assert figures(kind, *(runs[method] for method in methods), "--output", tmp_path / "out") == 0
    files = sorted((tmp_path / "out").iterdir())
    assert {file.stem for file in files} == {kind}
    assert {file.suffix for file in files} == suffixes
    printed = capsys.readouterr().out
    assert all(str(file) in printed for file in files)
    assert len(printed.splitlines()[0]) > 80  # the caption


def test_one_figure_of_each_run(runs: Runs, tmp_path: Path) -> None:
    assert figures("confusions", runs["basic"], runs["isda"], "--output", tmp_path) == 0
    assert {file.name for file in tmp_path.glob("*.png")} == {"confusions-basic.png", "confusions-isda.png"}


def test_a_picture_of_the_users_is_not_replaced(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("confusions", runs["basic"], "--output", tmp_path)
    assert figures(*command) == figures(*command) == 0
    before, picture = (tmp_path / "confusions.html").read_bytes(), tmp_path / "confusions.png"
    Image.new("RGB", (9, 9), "red").save(picture)
    mine = picture.read_bytes()
    assert figures(*command) == 2
    assert "confusions.png exists and is another kind of file, which would be lost" in capsys.readouterr().err
    assert (picture.read_bytes(), (tmp_path / "confusions.html").read_bytes()) == (mine, before)


def test_a_new_figure_needs_a_function_and_a_row_of_the_table(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accuracy(runs: dict[str, Path], *, seed: int = 0) -> Figure:
        """Bars of the accuracies of runs."""
        scores = [read_json(run / "evaluation.json")["top1"] for run in runs.values()]
        bars = rows(list(runs), [Series("top-1", 0, scores)])
        html = fragment("destruction.html", bars=chart(bars, "accuracy"), examples=[])
        return Figure("accuracy", "Accuracy", f"Seed {seed}.", {"top1": scores}, to_png(bars), None, html)

    monkeypatch.setitem(FIGURES, "accuracy", FigureKind(accuracy, "all", "the accuracy of runs"))
    [figure] = draw("accuracy", [str(runs["basic"]), f"ours={runs['learnable']}"], {"seed": 3, "group": "unused"})
    assert figure.caption == "Seed 3."
    assert len(figure.numbers["top1"]) == 2
    assert {file.name for file in write(figure, tmp_path)} == {"accuracy.png", "accuracy.html"}
    assert "accuracy: the accuracy of runs" in describe_figures()
    monkeypatch.setitem(FIGURES, "accuracy", FigureKind(lambda run: figure, "each", ""))
    names = [made.name for made in draw("accuracy", [str(runs["basic"]), f"our s={runs['learnable']}"])]
    assert names == ["accuracy-basic", "accuracy-our-s"]


def test_images_without_which_a_run_was_trained_are_left_out(
    photos: Path,
    train_small: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, cache = tmp_path / "photos", tmp_path / "cache"
    shutil.copytree(photos, folder)
    for split in ("train", "test"):
        for name in ("empty.png", "text.jpg"):
            (next((folder / split).iterdir()) / name).write_bytes(b"no image" if "text" in name else b"")
    run = train_small(folder, tmp_path / "run", method="isda", epochs=1, cache=cache, on_bad_image="skip")
    for file in cache.iterdir():
        file.write_bytes(b"damaged")  # a run of unknown origin could name any folder: nothing there is read or written
    listed = {file: file.read_bytes() for file in cache.iterdir()}
    capsys.readouterr()
    assert figures("confusions", run, "--output", tmp_path / "out") == 0
    message = capsys.readouterr().err
    assert message.startswith("2 of 32 images cannot be read: test/")
    assert message.strip().endswith("continuing without them")
    assert figures("neighbours", run, "--covariance", "classwise", "--output", tmp_path / "out") == 0
    assert "images cannot be read: train/" in capsys.readouterr().err, "of these it takes the statistics"
    assert {file: file.read_bytes() for file in cache.iterdir()} == listed
    settings = read_json(run / "config.json")
    write_json(run / "config.json", {**settings, "on_bad_image": "stop"})
    sign(run)
    assert figures("confusions", run, "--output", tmp_path / "out") == 2
    assert "cannot read the image" in capsys.readouterr().err


def test_runs_can_be_given_names(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "a=b"
    shutil.copytree(runs["isda"], odd)
    named = [f"class-wise={runs['isda']}", f"as in the paper={runs['learnable']}", odd]
    assert figures("diagnostics", *named, "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "as in the paper: mean variance" in printed
    assert "class-wise: mean variance" in printed
    assert "a=b: mean variance" in printed
    assert figures("diagnostics", f"x={runs['isda']}", f"x={odd}", "--output", tmp_path / "out") == 2
    assert "two runs have the same name: x, x" in capsys.readouterr().err


def test_mistakes_are_one_sentence_and_exit_code_2(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs["isda"], unfinished)
    (unfinished / "model.safetensors").unlink()
    table = tmp_path / "groups.csv"
    table.write_text("species,family\n")
    for arguments, expected in (
        (("tsne", unfinished), "has not finished"),
        (("neighbours", runs["basic"]), "has no Σ"),
        (("parts", runs["basic"]), "only the p2p methods have parts"),
        (("augmentations", runs["basic"]), "has no Σ"),
        (("tsne", runs["basic"], "--groups", table), "no column class"),
        (("tsne", runs["basic"], "--group", "owl"), "no group 'owl'"),
        (("tsne", runs["basic"], runs["basic"]), "appears twice"),
        (("tsne", tmp_path / "nowhere"), "there is no run directory"),
        (("tsne",), "at least one run"),
        (("diagnostics", runs["basic"]), "there is no Σ to show"),
        (("destruction", runs["basic"]), "takes no run"),
        (("neighbours", runs["isda"], "--strength", "-1"), "--strength must be above 0 and at most 1e+12, not -1.0"),
    ):
        assert figures(*arguments, "--output", tmp_path / "out") == 2
        message = capsys.readouterr().err.strip()
        assert expected in message
        assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()
