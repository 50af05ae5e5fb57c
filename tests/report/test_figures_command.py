"""`semaug figures` as a user calls it."""

import shutil
from pathlib import Path

import pytest

from semaug.cli.main import main
from semaug.util.files import read_json, write_json

Runs = dict[str, Path]


def figures(*arguments: str | Path) -> int:
    return main(["figures", *map(str, arguments)])


@pytest.mark.parametrize(
    ("kind", "methods", "suffixes"),
    [
        ("neighbours", ("constant", "isda"), {".png", ".html"}),
        ("tsne", ("basic", "learnable"), {".png", ".svg", ".html"}),
        ("augmentations", ("learnable",), {".png", ".svg", ".html"}),
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
    told = capsys.readouterr().out
    assert all(str(file) in told for file in files)
    assert len(told.splitlines()[0]) > 80  # the caption


def test_one_figure_of_each_run(runs: Runs, tmp_path: Path) -> None:
    assert figures("confusions", runs["basic"], runs["isda"], "--output", tmp_path) == 0
    assert {file.name for file in tmp_path.glob("*.png")} == {"confusions-basic.png", "confusions-isda.png"}


@pytest.mark.parametrize("cache", [None, "cache", "removed"])
def test_images_without_which_a_run_was_trained_are_left_out(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: str | None
) -> None:
    folder, kept = tmp_path / "photos", None if cache is None else tmp_path / cache
    shutil.copytree(photos, folder)
    for split in ("train", "test"):
        for name in ("empty.png", "text.jpg"):
            (next((folder / split).iterdir()) / name).write_bytes(b"no image" if "text" in name else b"")
    run, sizes = tmp_path / "run", ["--resize", "40", "--crop", "32", "--batch-size", "6", "--val-per-class", "1"]
    options = ["--method", "isda", "--model", "small", "--pretrained", "False", "--epochs", "1", "--workers", "0"]
    options += ["--data", str(folder), "--output", str(run), "--cache", str(kept), "--on-bad-image", "skip"]
    assert main(["train", *sizes, *options]) == 0
    if cache == "removed":
        shutil.rmtree(tmp_path / cache)
    capsys.readouterr()
    assert figures("confusions", run, "--output", tmp_path / "out") == 0
    told = capsys.readouterr().err
    assert told.startswith("2 of 32 images cannot be read: test/")
    assert told.strip().endswith("continuing without them")
    assert figures("neighbours", run, "--covariance", "classwise", "--output", tmp_path / "out") == 0
    assert "images cannot be read: train/" in capsys.readouterr().err, "of these it takes the statistics"
    settings = read_json(run / "config.json")
    write_json(run / "config.json", {**settings, "on_bad_image": "stop"})
    assert figures("confusions", run, "--output", tmp_path / "out") == 2
    assert "cannot read the image" in capsys.readouterr().err


def test_runs_can_be_given_names(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "a=b"
    shutil.copytree(runs["isda"], odd)
    named = [f"class-wise={runs['isda']}", f"as in the paper={runs['learnable']}", odd]
    assert figures("diagnostics", *named, "--output", tmp_path / "out") == 0
    told = capsys.readouterr().out
    assert "as in the paper: mean variance" in told
    assert "class-wise: mean variance" in told
    assert "a=b: mean variance" in told
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
    for arguments, told in (
        (("tsne", unfinished), "has not finished"),
        (("neighbours", runs["basic"]), "has no Σ"),
        (("parts", runs["basic"]), "only the p2p methods have parts"),
        (("augmentations", runs["basic"]), "has no Σ"),
        (("tsne", runs["basic"], "--groups", table), "no column class"),
        (("tsne", runs["basic"], "--group", "owl"), "no group 'owl'"),
        (("tsne", runs["basic"], runs["basic"]), "named twice"),
        (("tsne", tmp_path / "nowhere"), "there is no run directory"),
        (("tsne",), "at least one run"),
        (("diagnostics", runs["basic"]), "nothing to say about Σ"),
        (("destruction", runs["basic"]), "takes no run"),
        (("neighbours", runs["isda"], "--strength", "-1"), "must be positive"),
    ):
        assert figures(*arguments, "--output", tmp_path / "out") == 2
        message = capsys.readouterr().err.strip()
        assert told in message
        assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()
