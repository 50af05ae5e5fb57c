"""`semaug compare` as a user runs it, on a few drawn birds."""

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from photos import photo_folder
from semaug.cli.main import Compare, main
from semaug.studies import workers
from semaug.studies.compare import Measured, Row, Split, collect, conclusions, notes, rich_table
from semaug.studies.grid import Cell, CompareConfig, command
from semaug.studies.paired import Difference, p_value, paired
from semaug.util.errors import SemaugError

TINY = "--pretrained False --epochs 2 --resize 32 --crop 24 --batch-size 6 --val-per-class 2 --workers 0 --cache None"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=2, train=6, test=2, size=32)


def semaug(photos: Path, output: Path, *arguments: object) -> int:
    shared = ["--data", photos, "--output", output, "--lr", 0.01, *TINY.split()]
    return main(["compare", *map(str, [*arguments, *shared])])


def result(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "comparison.json").read_text())
    return found


@pytest.fixture(scope="module")
def first(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real comparison of two methods over two seeds."""
    output = tmp_path_factory.mktemp("output")
    assert semaug(photos, output, "--model", "small", "--method", "basic", "isda", "--seeds", 0, 1, "--jobs", 1) == 0
    return output


def test_every_method_is_trained_with_every_seed_and_the_figures_are_the_runs_own(first: Path) -> None:
    basic, isda = result(first)["cells"]
    assert [basic["method"], basic["strength"], isda["method"], isda["strength"]] == ["basic", None, "isda", 20.0]
    for cell in (basic, isda):
        assert [run["seed"] for run in cell["runs"]] == [0, 1]
        best = []
        for run in cell["runs"]:
            lines = (first / "runs" / run["run"] / "metrics.jsonl").read_text().splitlines()
            best.append(max(100 * json.loads(line)["val_top1"] for line in lines))
        assert cell["top1"] == pytest.approx(np.mean(best))
        assert cell["standard_deviation"] == pytest.approx(np.std(best, ddof=1))
    assert isda["difference"]["count"] == 2
    assert isda["difference"]["mean"] == pytest.approx(isda["top1"] - basic["top1"])
    assert basic["difference"] is None
    assert basic["relative_time"] == 1.0
    assert isda["relative_time"] > 0
    found = result(first)
    assert found["split"] == {"images": 4, "drawn": True, "test": True}
    assert "torch" in found["versions"]
    assert found["settings"]["training"]["epochs"] == 2
    assert "| small | isda | 20 |" in (first / "comparison.md").read_text()
    assert (first / "report.html").stat().st_size > 10_000


def test_the_methods_of_a_seed_share_their_settings_and_their_split(first: Path) -> None:
    configs = [json.loads(file.read_text()) for file in sorted((first / "runs").glob("*-s1/config.json"))]
    differing = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert differing <= {"method", "output", "started", "augmentation"}
    assert configs[0]["seed"] == 1


def test_only_what_is_missing_is_run(photos: Path, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in (first / "runs").glob("*/model.safetensors")}
    assert len(before) == 4
    grid = ["--model", "small", "--method", "basic", "isda", "--jobs", "2", "--seeds", "0", "1"]
    assert semaug(photos, first, *grid) == 0
    told = capsys.readouterr()
    assert "0 runs to make, 4 made before" in told.err
    assert "Time is that of an epoch" in told.out  # they were made alone, whatever this call says
    assert semaug(photos, first, *grid, "2") == 0
    told = capsys.readouterr()
    assert "2 runs to make, 4 made before" in told.err
    assert "[2/2]" in told.err
    assert "Times are left out" in told.out
    assert {file: file.stat().st_mtime_ns for file in before} == before
    cells = result(first)["cells"]
    assert [len(cell["runs"]) for cell in cells] == [3, 3]
    assert [cell["relative_time"] for cell in cells] == [None, None]
    assert cells[1]["difference"]["count"] == 3
    assert any(line in told.out for line in ("over 3 seeds (", "nothing separates these methods"))


def test_a_run_that_fails_is_named_and_the_others_finish(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert semaug(photos, tmp_path, "--model", "no_such_net", "small", "--method", "basic", "--seeds", 0) == 2
    told = capsys.readouterr()
    assert "1 of the runs failed" in told.err
    assert "Failed: photos" in told.out
    failed, finished = result(tmp_path)["cells"]
    assert failed["top1"] is None
    assert finished["top1"] is not None
    ((name, reason),) = result(tmp_path)["failed"].items()
    assert "no_such_net-basic" in name
    assert "no_such_net" in reason
    assert "No run of the baseline, basic, has finished" in result(tmp_path)["conclusions"][0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--method magic", "unknown method 'magic'; the methods are basic, "),
        ("--method", "--method needs at least one value"),
        ("--seeds", "--seeds needs at least one value"),
        ("--model", "--model needs at least one value"),
        ("--strength", "--strength needs at least one value"),
        ("--method basic isda basic", "--method names basic twice"),
        ("--seeds 1 1", "--seeds names 1 twice"),
        ("--model small small", "--model names small twice"),
        ("--strength 5 5.0", "--strength names 5.0 twice"),
        ("--strength -1", "--strength must be at least 0, not -1"),
        ("--method basic mixup --strength 5", "--strength is for methods that augment features"),
        ("--jobs 0", "--jobs must be at least 1, not 0"),
        ("--weights resnet18=weights.pth", "--weights is given for resnet18, which is not among the networks: small"),
        ("--weights small=nowhere.pth", "--weights: there is no file nowhere.pth"),
        ("--model small resnet18 --weights weights.pth", "with several networks each needs its own weights"),
        ("--frozen-blocks few", "--frozen-blocks takes N or MODEL=N with a whole number N, not 'few'"),
        ("--frozen-blocks resnet18=2", "--frozen-blocks is given for resnet18"),
        ("--frozen-blocks small=1 small=2", "--frozen-blocks names small twice"),
        ("--frozen-blocks 1 2", "--frozen-blocks names a value for every network twice"),
        ("--epochs 0", "--epochs must be at least 1"),
        ("--data nowhere", "nowhere"),
        ("--val-per-class 0", "leaves no images to validate on"),
    ],
)
def test_mistakes_give_one_sentence_before_anything_is_trained(
    photos: Path, tmp_path: Path, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    given = ["--data", str(photos), "--output", str(output)]
    given += [] if "--model" in arguments else ["--model", "small"]
    assert main(["compare", *given, *arguments.split()]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert sentence in told[0]
    assert not output.exists()


# -------------------------------------------------------------------------------------- without a command line


def grid(**options: Any) -> CompareConfig:
    return CompareConfig(**{"model": ("small",), **options})


def test_strengths_are_for_methods_that_augment() -> None:
    cells = list(grid(method=("basic", "isda", "p2p", "p2p+isda"), strength=(5.0, 20.0)).cells())
    found = [(cell.method, cell.strength) for cell in cells]
    assert found == [
        ("basic", None), ("isda", 5.0), ("isda", 20.0), ("p2p", None), ("p2p+isda", 5.0), ("p2p+isda", 20.0),
    ]  # fmt: skip
    for data, strengths in {"photos": [20.0, 10.0, 5.0], "birds": [3.0, 3.0, 5.0]}.items():
        config = grid(method=("isda", "learnable", "p2p+isda"))
        config = replace(config, training=replace(config.training, data=data))
        assert [cell.strength for cell in config.cells()] == strengths
    config = grid(strength=(5.0, 20.0)).settings(Cell("small", "p2p+isda", 20.0), 3)
    assert (config.augmentation.strength, config.seed, config.method) == (20.0, 3, "p2p+isda")


def folder(chosen: str = "learnable", options: dict[str, Any] | None = None, **training: Any) -> Path | None:
    config = grid(method=("basic", "joint", "learnable"), **(options or {}))
    augmentation = replace(config.training.augmentation, meta_lr=training.pop("meta_lr", 0.001))
    config = replace(config, training=replace(config.training, augmentation=augmentation, **training))
    return config.settings(next(cell for cell in config.cells() if cell.method == chosen), 0).output


def test_the_same_settings_give_the_same_directory_and_others_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(folder()).startswith("runs/compare/runs/birds-small-learnable-3-")
    assert folder() == folder(epochs=15)  # the default on the embedded birds
    assert folder() == folder(options={"jobs": 3, "seeds": (0, 7)}, workers=7)
    assert folder() != folder(epochs=16)
    assert folder() != folder(meta_lr=0.5)
    assert folder() != folder(options={"frozen_blocks": ("1",)})
    assert folder("joint") != folder("joint", meta_lr=0.5)
    assert folder("basic") == folder("basic", meta_lr=0.5)  # which it does not look at
    (tmp_path / "photos").mkdir()
    absolute = folder(data=str(tmp_path / "photos"))
    monkeypatch.chdir(tmp_path)
    assert folder(data="photos") == absolute


def test_each_network_has_its_own_weights_and_frozen_blocks(tmp_path: Path) -> None:
    file = tmp_path / "a=b.pth"
    file.write_bytes(b"")
    config = grid(
        model=("small", "resnet18"),
        method=("learnable",),
        frozen_blocks=("2", "resnet18=4"),
        weights=(f"small={file}",),
    )
    config.check()
    small, resnet = (config.settings(cell, 0) for cell in config.cells())
    assert (small.augmentation.frozen_blocks, resnet.augmentation.frozen_blocks) == (2, 4)
    assert (small.weights, resnet.weights) == (file, None)


def test_the_command_gives_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "compare --method basic isda --model small --strength 5.0 --seeds 4 5 --frozen-blocks small=2 --epochs 3"
    given += " --compile --pretrained False --cache None --order pipelined --data 'my photos'"
    seen: list[Compare] = []
    monkeypatch.setattr("semaug.studies.compare.compare", lambda config: seen.append(config) or {})
    assert main(shlex.split(given)) == 0
    assert main(shlex.split(command(seen[0]))[1:]) == 0
    assert seen[0] == seen[1]
    assert seen[0].training.augmentation.order == "pipelined"


def test_p_is_that_of_a_paired_t_test() -> None:
    random = np.random.default_rng(0)
    for count in range(3, 12):
        own, base = random.normal(80, 2, count), random.normal(79, 2, count)
        found = paired(dict(enumerate(own)), dict(enumerate(base)))
        assert found is not None
        expected = stats.ttest_rel(own, base)
        assert found.mean == pytest.approx((own - base).mean())
        assert found.error == pytest.approx((own - base).std(ddof=1) / count**0.5)
        assert found.p == pytest.approx(float(expected.pvalue), abs=1e-6)
    assert p_value(4.303, 2) == pytest.approx(0.05, abs=1e-4)  # as tables have it
    assert p_value(0.0, 5) == 1.0


def test_only_seeds_that_both_have_are_compared() -> None:
    assert paired({0: 80.0, 1: 82.0, 7: 0.0}, {0: 79.0, 1: 80.0, 9: 100.0}) == Difference(1.5, 0.5, None, 2)
    assert paired({0: 80.0}, {0: 79.0}) == Difference(1.0, None, None, 1)
    assert paired({0: 80.0}, {1: 79.0}) is None
    alike = paired({0: 80.1, 1: 70.1, 2: 60.1}, {0: 80.0, 1: 70.0, 2: 60.0})
    assert alike is not None
    assert (alike.error, alike.p) == (0.0, None)


def row(method: str, values: list[float], base: list[float] | None = None, network: str = "small") -> Row:
    runs = tuple(Measured(seed, value, value, 1, 1.0, "run") for seed, value in enumerate(values))
    difference = None if base is None else paired(dict(enumerate(values)), dict(enumerate(base)))
    strength = None if method == "basic" else 10.0
    return Row(Cell(network, method, strength), runs, difference, 1.0, base is None)


@pytest.mark.parametrize(
    ("own", "base", "sentence"),
    [
        (
            [82.0, 83.1, 81.9, 84.3],
            [80.0, 81.0, 80.1, 82.1],
            "isda (λ0 10) is above basic by 2.0 ± 0.1 points over 4 seeds (p < 0.001).",
        ),
        (
            [78.0, 79.0, 78.0],
            [80.0, 81.0, 80.1],
            "isda (λ0 10) is below basic by 2.0 ± 0.0 points over 3 seeds (p < 0.001).",
        ),
        ([81.0, 83.0, 80.1], [80.0, 80.0, 79.0], "(p = 0.12, so few seeds can agree by chance)"),
        ([81.0, 82.0], [80.0, 80.0], "over 2 seeds (so few seeds can agree by chance)"),
        ([81.0, 79.0, 80.0], [80.0, 80.0, 80.0], "nothing separates these methods"),
        ([99.0], [1.0], "A single seed shows nothing"),
        ([], [80.0], "No other run has finished"),
        ([80.0], [], "No run of the baseline, basic, has finished"),
    ],
)
def test_what_can_be_concluded(own: list[float], base: list[float], sentence: str) -> None:
    (told,) = conclusions([row("basic", base), row("isda", own, base)])
    assert sentence in told
    assert ("agree by chance" in told) == ("agree by chance" in sentence)


def test_the_table_fits_a_terminal_and_cuts_nothing() -> None:
    base, own = [80.0, 81.5, 79.0], [78.5, 88.0, 83.0]
    name = "torchvision/mobilenet_v2"
    rows = [
        row(method, values, None if method == "basic" else base, network)
        for network in (name, "resnet50")
        for method, values in (("basic", base), ("p2p+learnable", own))
    ]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(rich_table(rows, "Methods on photos"))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for text in ("p2p+learnable", "80.2 ± 1.3", "+3.0 ± 2.4", "baseline", "1.00", "resnet50"):
        assert text in shown
    assert name in "".join(line.split()[0] for line in shown.splitlines() if line.strip())  # it goes on in a new line


def test_times_are_compared_where_runs_were_alone(tmp_path: Path) -> None:
    config = grid(method=("basic", "isda"), seeds=(0,), output=tmp_path)
    cells = list(config.cells())
    for cell, seconds in zip(cells, (2.0, 3.0), strict=True):
        run = config.settings(cell, 0).output
        assert run is not None
        run.mkdir(parents=True)
        (run / "model.safetensors").write_bytes(b"")
        (run / "evaluation.json").write_text(json.dumps({"best_epoch": 2, "split": "test", "top1": 0.1}))
        times = [(0.4, 50.0), (0.8, seconds), (0.6, seconds), (0.5, seconds + 9)]
        lines = [json.dumps({"val_top1": top1, "seconds": time}) for top1, time in times]
        (run / "metrics.jsonl").write_text("\n".join(lines))
    rows = collect(config, cells, alone=True)
    assert [r.time for r in rows] == [1.0, pytest.approx((3.0 + 4.5) / (2.0 + 4.5))]
    assert [r.runs[0].top1 for r in rows] == [80.0, 80.0]  # of the validation split, not of the test split
    assert [r.runs[0].last_top1 for r in rows] == [50.0, 50.0]
    assert [r.time for r in collect(config, cells, alone=False)] == [None, None]


def test_the_notes_warn_of_what_flatters_and_of_what_differs() -> None:
    config = grid(method=("basic", "p2p", "isda"), strength=(5.0, 10.0))
    plan = [config.settings(cell, 0) for cell in config.cells()]
    rows = [row("basic", [80.0])]
    told = "\n".join(notes(config, rows, Split(50, True, False), False, plan))
    assert "one image is 2 points" in told
    assert "each seed draws its own" in told
    assert "2 strengths were tried" in told
    assert "its figure is optimistic" in told
    assert "Times are left out" in told
    assert "test split" not in told
    assert "P2P-Net has defaults" not in told  # on the embedded birds it has not
    elsewhere = replace(config, training=replace(config.training, data="photos", select="test"))
    plan = [elsewhere.settings(cell, 0) for cell in config.cells()]
    told = "\n".join(notes(elsewhere, rows, Split(50, False, True), True, plan))
    assert "the runs differ in --epochs (100, 300), --lr (0.002, 0.03), --weight-decay (0, 0.0005)" in told
    assert "the accuracies are too good" in told


def test_jobs_of_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_gpus", lambda: [])
    assert workers.default_jobs("full") == 1


def test_a_method_may_have_options_of_its_own() -> None:
    config = grid(
        method=(
            "basic --label-smoothing 0.1",
            "learnable",
            "learnable --fixed-trace 0.5 --meta-lr 1e-4",
            "isda --strength 7",
        ),
        strength=(5.0, 20.0),
    )
    config.check()
    cells = list(config.cells())
    assert [cell.title for cell in cells] == [
        "basic --label-smoothing 0.1",
        "learnable (λ0 5)",
        "learnable (λ0 20)",
        "learnable --fixed-trace 0.5 --meta-lr 1e-4 (λ0 5)",
        "learnable --fixed-trace 0.5 --meta-lr 1e-4 (λ0 20)",
        "isda --strength 7 (λ0 7)",
    ]
    runs = [config.settings(cell, 0) for cell in cells]
    assert [run.label_smoothing for run in runs] == [0.1, 0, 0, 0, 0, 0]
    assert [run.augmentation.fixed_trace for run in runs] == [None, None, None, 0.5, 0.5, None]
    assert runs[4].augmentation.strength == 20.0
    assert runs[5].augmentation.strength == 7.0
    assert len({run.output for run in runs}) == len(runs)
    same = grid(method=("learnable",), strength=(20.0,))
    augmentation = replace(same.training.augmentation, fixed_trace=0.5, meta_lr=1e-4)
    same = replace(same, training=replace(same.training, augmentation=augmentation))
    assert same.settings(Cell("small", "learnable", 20.0), 0).output == runs[4].output


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("learnable --fixed-tracks 3", "'--fixed-tracks 3' are not options that semaug train would take"),
        ("learnable --fixed-trace much", "'--fixed-trace much' are not options that semaug train would take"),
        ("isda --fixed-trace 0.5", "isda does not look at all of these options"),
        ("isda --seed 3", "--seed cannot be an option of one method"),
        ("isda --data=x", "--data=x cannot be an option of one method"),
        ("isda 'x", "no closing quotation"),
        ("", "unknown method ''"),
    ],
)
def test_own_options_that_make_no_sense_are_refused(method: str, sentence: str) -> None:
    with pytest.raises(SemaugError, match=re.escape(sentence)):
        grid(method=("basic", method)).check()
