"""Comparisons of methods: the runs, the statistics, and what is concluded from them."""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import save_file
from scipy import stats

from photos import photo_folder, quick_config
from semaug.cli.main import main
from semaug.data.readers import read_data, training_splits
from semaug.inference.manifest import add, sign
from semaug.inference.runs import split_settings
from semaug.network.models import build_model
from semaug.studies.compare import (
    ArmResult,
    Comparison,
    FinishedRun,
    ValidationSplit,
    read_results,
)
from semaug.studies.grid import Arm, Candidate, CompareConfig
from semaug.studies.inputs import refuse_other_inputs
from semaug.studies.paired import Difference, paired
from semaug.training.trainer import train
from semaug.util.errors import DataError, RunError, SettingError
from semaug.util.files import write_json

pytestmark = pytest.mark.usefixtures("inline_workers")

TINY = "--pretrained False --epochs 2 --resize 32 --crop 24 --batch-size 6 --val-per-class 2 --workers 0 --cache None"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=2, train=6, test=2, size=32)


def semaug(photos: Path, output: Path, *arguments: object) -> int:
    shared = ["--data", photos, "--output", output, "--lr", 0.01, "--keep-checkpoints", *TINY.split()]
    return main(["compare", *map(str, [*arguments, *shared])])


def content(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((output / "comparison.json").read_text())
    return result


@pytest.fixture(scope="module")
def first(photos: Path, tmp_path_factory: pytest.TempPathFactory, inline_workers: None) -> Path:
    """A real comparison of two methods over two seeds."""
    output = tmp_path_factory.mktemp("output")
    assert semaug(photos, output, "--model", "small", "--method", "basic", "isda", "--seeds", 0, 1, "--jobs", 1) == 0
    return output


def test_every_method_is_trained_with_every_seed_and_the_numbers_are_those_of_the_runs(first: Path) -> None:
    basic, isda = content(first)["cells"]
    assert [basic["method"], basic["strength"], isda["method"], isda["strength"]] == ["basic", None, "isda", "auto"]
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
    whole = content(first)
    assert whole["split"] == {"images": 4, "drawn": True, "test": True, "most_images": None}
    assert "torch" in whole["versions"]
    assert whole["settings"]["training"]["epochs"] == 2
    assert whole["command"].startswith("semaug compare --method basic isda --model small --seeds 0 1 --jobs 1 ")
    assert "| small | isda | auto |" in (first / "comparison.md").read_text()
    assert (first / "report.html").stat().st_size > 10_000


def test_the_methods_of_a_seed_share_their_settings_and_their_split(first: Path) -> None:
    configs = [json.loads(file.read_text()) for file in sorted((first / "runs").glob("*-s1/config.json"))]
    differing = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert differing <= {"method", "output", "run", "started", "augmentation"}
    assert configs[0]["seed"] == 1


def test_only_missing_runs_are_trained(photos: Path, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in (first / "runs").glob("*/model.safetensors")}
    assert len(before) == 4
    options = ["--model", "small", "--method", "basic", "isda", "--jobs", "2", "--seeds", "0", "1"]
    assert semaug(photos, first, *options) == 0
    shown = capsys.readouterr()
    assert "0 runs to train, 4 finished already" in shown.err
    assert "Time is that of an epoch" in shown.out  # they were trained alone, although this call allows two at a time
    assert semaug(photos, first, *options, "2") == 0
    shown = capsys.readouterr()
    assert "2 runs to train, 4 finished already" in shown.err
    assert "[2/2]" in shown.err
    assert "Times are left out: not all of these runs were trained alone (--jobs 1)" in shown.out
    assert {file: file.stat().st_mtime_ns for file in before} == before
    cells = content(first)["cells"]
    assert [len(cell["runs"]) for cell in cells] == [3, 3]
    assert [cell["relative_time"] for cell in cells] == [None, None]
    assert cells[1]["difference"]["count"] == 3
    assert any(line in shown.out for line in ("over 3 seeds (", "do not separate these methods"))


def test_a_damaged_run_is_repeated_or_named(
    photos: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(shutil.copytree(first, tmp_path / "output"))
    options = ["--model", "small", "--method", "basic", "isda", "--seeds", "0", "1"]
    run = min((output / "runs").glob("*-basic-*-s0"))
    before = content(first)["cells"][0]["runs"][0]
    for name in ("metrics.jsonl", "evaluation.json"):
        (run / name).write_text((run / name).read_text().replace('top1": ', 'top1": 7'))
        assert semaug(photos, output, *options) == 0
        assert "1 run to train, 3 finished already" in capsys.readouterr().err
        assert content(output)["cells"][0]["runs"][0] == before
    shutil.rmtree(run / "checkpoints")
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(metrics.replace('val_top1": ', 'val_top1": 7'))
    assert semaug(photos, output, *options) == 2
    shown = capsys.readouterr()
    assert f"Failed: {run.name}: " in shown.out
    assert "metrics.jsonl is damaged or was changed" in shown.out
    add(run, "metrics.jsonl")
    assert semaug(photos, output, *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("semaug: ")]
    assert line.endswith("metrics.jsonl line 1: val_top1 should be from 0 to 1")


@pytest.mark.parametrize("name", ["comparison.json", "comparison.md", "report.html"])
def test_a_file_of_the_users_in_the_output_folder_is_not_replaced(
    photos: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.json").write_text("{}")
    (tmp_path / name).write_text("my notes")
    assert semaug(photos, tmp_path, "--model", "small", "--method", "basic") == 2
    assert f"{name} exists and is another kind of file, which would be lost" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "my notes"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["comparison.md", "report.html"])
def test_notes_in_a_page_of_an_earlier_comparison_are_not_lost(
    photos: Path, first: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(shutil.copytree(first, tmp_path / "output"))
    (output / name).write_text((output / name).read_text() + "My notes.\n")
    before = {file: file.read_bytes() for file in output.glob("*.*")}
    options = ["--model", "small", "--method", "basic", "isda", "--seeds", "0", "1"]
    assert semaug(photos, output, *options) == 2
    assert f"{name} was edited, and the notes in it would be lost; move it" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in output.glob("*.*")} == before
    (output / name).rename(tmp_path / name)
    assert semaug(photos, output, *options) == 0


def test_runs_on_other_images_or_with_other_weights_or_settings_are_not_compared(photos: Path, tmp_path: Path) -> None:
    data, weights = Path(shutil.copytree(photos, tmp_path / "photos")), tmp_path / "start.safetensors"
    save_file(build_model("small", 2, 32).state_dict(), weights)
    config = quick_config(data, tmp_path / "run", method="basic", epochs=1, weights=weights)
    train(config)
    refuse_other_inputs([config], read_data(str(data)))
    for name, value in {"seed": 1, "method": "isda"}.items():  # the folder of one run was renamed to that of another
        with pytest.raises(RunError, match=f"holds a run with other settings .*{name} .* → {value}"):
            refuse_other_inputs([replace(config, **{name: value})], read_data(str(data)))
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    write_json(tmp_path / "run" / "config.json", {**written, "precision": "bf16"})  # as if trained on a GPU
    refuse_other_inputs([config], read_data(str(data)))
    with pytest.raises(RunError, match="precision bf16 → fp32"):
        refuse_other_inputs([replace(config, precision="fp32")], read_data(str(data)))
    write_json(tmp_path / "run" / "config.json", written)
    other = replace(config, output=Path(shutil.copytree(tmp_path / "run", tmp_path / "other")))
    write_json(tmp_path / "other" / "manifest.json", {"files": {}, "data": "of other images"})
    with pytest.raises(DataError, match=r"other and .*run were trained on different classes or images"):
        refuse_other_inputs([config, other], None)
    save_file(build_model("small", 2, 32).state_dict(), weights)  # other random numbers
    with pytest.raises(DataError, match=r"start.safetensors changed since .*run was trained"):
        refuse_other_inputs([config], read_data(str(data)))
    min((data / "train").rglob("*.png")).unlink()
    with pytest.raises(DataError, match="the classes or images of photos changed since"):
        refuse_other_inputs([config], read_data(str(data)))


def test_unreadable_images_are_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seed 0 holds out both of them, and seed 1 none."""
    data = photo_folder(tmp_path / "photos", species=2, train=8, test=2, size=32)
    config = quick_config(data, tmp_path / "run", seed=0)
    held_out = training_splits(read_data(str(data)), **split_settings(vars(config)))["val"]
    for i in (0, len(held_out) - 1):
        (data / held_out.name(i)).write_text("no image")
    options = ["--model", "small", "--method", "basic", "--on-bad-image", "skip", "--jobs", 1]
    for seeds, numbers, text in (
        (["0"], (2, None), "2 validation images (one image is 50 points)"),
        (["0", "1"], (2, 4), "2 to 4 validation images (one image is 25 to 50 points)"),
    ):
        assert semaug(data, tmp_path / "output", *options, "--seeds", *seeds) == 0
        split = content(tmp_path / "output")["split"]
        assert (split["images"], split["most_images"]) == numbers
        assert text in " ".join(capsys.readouterr().out.split())


def test_a_run_that_fails_is_named_and_the_others_finish(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert semaug(photos, tmp_path, "--model", "no_such_net", "small", "--method", "basic", "--seeds", 0) == 2
    shown = capsys.readouterr()
    assert "1 of the runs failed" in shown.err
    assert "Failed: photos" in shown.out
    failed, finished = content(tmp_path)["cells"]
    assert failed["top1"] is None
    assert finished["top1"] is not None
    ((name, reason),) = content(tmp_path)["failed"].items()
    assert "no_such_net-basic" in name
    assert "no_such_net" in reason
    assert "No run of the baseline, basic, has finished" in content(tmp_path)["conclusions"][0]


# The grid


def grid(methods: Sequence[str | Candidate], **options: Any) -> CompareConfig:
    candidates = tuple(method if isinstance(method, Candidate) else Candidate(method) for method in methods)
    return CompareConfig(candidates, **{"model": ("small",), **options})


def test_strengths_are_for_methods_that_augment() -> None:
    arms = grid(("basic", "isda", "p2p", "p2p+isda"), strength=(5.0, 20.0)).arms()
    assert [(arm.candidate.method, arm.strength) for arm in arms] == [
        ("basic", None), ("isda", 5.0), ("isda", 20.0), ("p2p", None), ("p2p+isda", 5.0), ("p2p+isda", 20.0),
    ]  # fmt: skip
    arms = grid(("isda", "basic", "p2p+isda"), strength=("auto", 3.0)).arms()
    assert [arm.title for arm in arms] == [
        "isda (λ0 auto)", "isda (λ0 3)", "basic", "p2p+isda (λ0 auto)", "p2p+isda (λ0 3)",
    ]  # fmt: skip
    assert {arm.strength for arm in grid(("isda", "learnable", "p2p+isda")).arms()} == {"auto"}
    config = grid(("p2p+isda",), strength=(5.0, 20.0))
    run = config.settings(list(config.arms())[1], 3)
    assert (run.augmentation.strength, run.seed, run.method) == (20.0, 3, "p2p+isda")


def folder(chosen: str = "learnable", options: dict[str, Any] | None = None, **training: Any) -> Path | None:
    config = grid(("basic", "joint", "learnable"), **(options or {}))
    augmentation = replace(config.training.augmentation, meta_lr=training.pop("meta_lr", 0.001))
    config = replace(config, training=replace(config.training, augmentation=augmentation, **training))
    return config.settings(next(arm for arm in config.arms() if arm.candidate.method == chosen), 0).output


def test_the_same_settings_give_the_same_directory_and_others_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(folder()).startswith("runs/compare/runs/birds-small-learnable-auto-")
    assert folder() == folder(epochs=15)  # the default on the embedded birds
    assert folder() == folder(options={"jobs": 3, "seeds": (0, 7)}, workers=7)
    assert folder() != folder(epochs=16)
    assert folder() != folder(meta_lr=0.5)
    assert folder() != folder(options={"frozen_blocks": {"small": 1}})
    assert folder("joint") != folder("joint", meta_lr=0.5)
    assert folder("basic") == folder("basic", meta_lr=0.5)  # which it does not use
    (tmp_path / "photos").mkdir()
    absolute = folder(data=str(tmp_path / "photos"))
    monkeypatch.chdir(tmp_path)
    assert folder(data="photos") == absolute


def test_a_method_may_have_settings_of_its_own() -> None:
    shaped = {"fixed_trace": 0.5, "meta_lr": 1e-4}
    methods = (
        Candidate("basic", {"label_smoothing": 0.1}),
        Candidate("learnable"),
        Candidate("learnable", shaped, options="--fixed-trace 0.5"),
        Candidate("isda", {"strength": 7.0}),
    )
    config = grid(methods, strength=(5.0, 20.0))
    config.check()
    arms = list(config.arms())
    assert [arm.title for arm in arms] == [
        "basic label_smoothing=0.1",
        "learnable (λ0 5)",
        "learnable (λ0 20)",
        "learnable --fixed-trace 0.5 (λ0 5)",
        "learnable --fixed-trace 0.5 (λ0 20)",
        "isda strength=7.0 (λ0 7)",
    ]
    runs = [config.settings(arm, 0) for arm in arms]
    assert [run.label_smoothing for run in runs] == [0.1, 0, 0, 0, 0, 0]
    assert [run.augmentation.fixed_trace for run in runs] == [None, None, None, 0.5, 0.5, None]
    assert runs[4].augmentation.strength == 20.0
    assert runs[5].augmentation.strength == 7.0
    assert len({run.output for run in runs}) == len(runs)
    same = grid(("learnable",), strength=(20.0,))
    augmentation = replace(same.training.augmentation, **shaped)
    same = replace(same, training=replace(same.training, augmentation=augmentation))
    assert same.runs()[0].output == runs[4].output


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        ("magic", {}, "unknown method 'magic'; the methods are basic, mixup, "),
        ("isda", {"fixed_trace": 0.5}, "isda does not use `fixed_trace`"),
        ("learnable", {"fixed_tracks": 0.5}, "learnable does not use `fixed_tracks`"),
        ("isda", {"seed": 3}, "`seed` cannot differ between methods"),
        ("isda", {"select": "test"}, "`select` cannot differ between methods"),
        ("isda", {"val_per_class": 3}, "`val_per_class` cannot differ between methods"),
        ("isda", {"val_fraction": 0.3}, "`val_fraction` cannot differ between methods"),
    ],
)
def test_own_settings_that_make_no_sense_are_refused(method: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as error:
        grid(("basic", Candidate(method, settings))).check()
    assert sentence in str(error.value)


# Statistics and sentences


def test_p_is_that_of_a_paired_t_test() -> None:
    random = np.random.default_rng(0)
    for count in range(3, 12):
        own, base = random.normal(80, 2, count), random.normal(79, 2, count)
        difference = paired(dict(enumerate(own)), dict(enumerate(base)))
        assert difference is not None
        assert difference.mean == pytest.approx((own - base).mean())
        assert difference.error == pytest.approx((own - base).std(ddof=1) / count**0.5)
        assert difference.p == pytest.approx(float(stats.ttest_rel(own, base).pvalue), abs=1e-6)
    # by hand: the differences 1, 2 and 6 have mean 3 and standard error √(7/3), so t² = 27/7, and for two degrees of
    # freedom p = 1 − t/√(2 + t²) = 1 − √(27/41)
    by_hand = paired({0: 1.0, 1: 2.0, 2: 6.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert by_hand is not None
    assert by_hand.p == pytest.approx(1 - (27 / 41) ** 0.5)


def test_only_seeds_that_both_have_are_compared() -> None:
    assert paired({0: 80.0, 1: 82.0, 7: 0.0}, {0: 79.0, 1: 80.0, 9: 100.0}) == Difference(1.5, 0.5, None, 2)
    assert paired({0: 80.0}, {0: 79.0}) == Difference(1.0, None, None, 1)
    assert paired({0: 80.0}, {1: 79.0}) is None
    alike = paired({0: 80.1, 1: 70.1, 2: 60.1}, {0: 80.0, 1: 70.0, 2: 60.0})
    assert alike is not None
    assert (alike.error, alike.p) == (0.0, None)


def test_differences_that_are_equal_but_for_rounding_have_no_p() -> None:
    """With 15 images, one more right answer in every seed: the accuracies in metrics.jsonl have six digits."""
    own, base = ([100 * round(right / 15, 6) for right in rights] for rights in ((8, 9, 9), (7, 8, 8)))
    difference = paired(dict(enumerate(own)), dict(enumerate(base)))
    assert difference is not None
    assert difference.mean == pytest.approx(100 / 15, abs=1e-4)
    assert (difference.error, difference.p) == (0.0, None)
    (conclusion,) = comparison(arm_result("basic", base), arm_result("isda", own, base)).conclusions
    assert "may be chance" in conclusion


def arm_result(method: str, values: list[float], base: list[float] | None = None, network: str = "small") -> ArmResult:
    runs = tuple(FinishedRun(seed, value, value, 1, 1.0, "run") for seed, value in enumerate(values))
    difference = None if base is None else paired(dict(enumerate(values)), dict(enumerate(base)))
    strength = None if method == "basic" else 10.0
    return ArmResult(Arm(network, Candidate(method), strength), runs, difference, 1.0, base is None)


def comparison(*results: ArmResult, config: CompareConfig | None = None, **values: Any) -> Comparison:
    values = {"split": ValidationSplit(50, True, False), "alone": False, **values}
    return Comparison(config or grid(("basic", "isda")), results=list(results), **values)


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
        ([81.0, 83.0, 80.1], [80.0, 80.0, 79.0], "(p = 0.12, may be chance with so few seeds)"),
        ([81.0, 82.0], [80.0, 80.0], "over 2 seeds (may be chance with so few seeds)"),
        ([81.0, 79.0, 80.0], [80.0, 80.0, 80.0], "the runs do not separate these methods"),
        ([99.0], [1.0], "One seed shows nothing"),
        ([], [80.0], "No run other than those of basic has finished"),
        ([80.0], [], "No run of the baseline, basic, has finished"),
    ],
)
def test_what_can_be_concluded(own: list[float], base: list[float], sentence: str) -> None:
    (conclusion,) = comparison(arm_result("basic", base), arm_result("isda", own, base)).conclusions
    assert sentence in conclusion
    assert ("may be chance" in conclusion) == ("may be chance" in sentence)


def test_the_table_fits_a_terminal_and_cuts_nothing() -> None:
    base, own = [80.0, 81.5, 79.0], [78.5, 88.0, 83.0]
    name = "torchvision/mobilenet_v2"
    results = [
        arm_result(method, values, None if method == "basic" else base, network)
        for network in (name, "resnet50")
        for method, values in (("basic", base), ("p2p+learnable", own))
    ]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(comparison(*results).table())
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for text in ("p2p+learnable", "80.2 ± 1.3", "+3.0 ± 2.4", "baseline", "1.00", "resnet50"):
        assert text in shown
    assert name in "".join(line.split()[0] for line in shown.splitlines() if line.strip())  # in several lines


def test_times_are_compared_if_runs_were_trained_alone(tmp_path: Path) -> None:
    config = grid(("basic", "isda"), seeds=(0,), output=tmp_path)
    for settings, seconds in zip(config.runs(), (2.0, 3.0), strict=True):
        run = settings.output
        assert run is not None
        run.mkdir(parents=True)
        (run / "model.safetensors").write_bytes(b"")
        (run / "evaluation.json").write_text(json.dumps({"best_epoch": 2, "split": "test", "top1": 0.1}))
        times = [(0.4, 50.0), (0.8, seconds), (0.6, seconds), (0.5, seconds + 9)]
        lines = [json.dumps({"val_top1": top1, "seconds": time}) for top1, time in times]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        sign(run)
    results = read_results(config, alone=True)
    assert [result.time for result in results] == [1.0, pytest.approx((3.0 + 4.5) / (2.0 + 4.5))]
    assert [result.runs[0].top1 for result in results] == [80.0, 80.0]  # of the validation split, not of the test split
    assert [result.runs[0].last_top1 for result in results] == [50.0, 50.0]
    assert [result.time for result in read_results(config, alone=False)] == [None, None]


def test_the_notes_warn_of_optimistic_numbers_and_of_different_settings() -> None:
    config = grid(("basic", "p2p", "isda"), strength=(5.0, 10.0))
    basic = arm_result("basic", [80.0])
    notes = "\n".join(comparison(basic, config=config).notes)
    assert "one image is 2 points" in notes
    assert "8 validation images (one image is 12.5 points)" in "\n".join(
        comparison(basic, split=ValidationSplit(8, True, False)).notes
    )
    assert "Each seed draws its own" in notes
    assert "2 strengths were tried" in notes
    assert "its accuracy tends to be too high" in notes
    assert "Times are left out" in notes
    assert "test split" not in notes
    assert "the runs also differ" not in notes  # on the embedded birds P2P-Net has no recipe of its own
    elsewhere = replace(config, training=replace(config.training, data="photos", select="test"))
    notes = "\n".join(comparison(basic, config=elsewhere, split=ValidationSplit(50, False, True), alone=True).notes)
    assert "the runs also differ in `epochs` (100, 300), `batch_size` (16, 64), `resize` (550, 600)" in notes
    assert "`lr` (0.002, 0.03), `weight_decay` (0, 0.0005)." in notes
    assert "The accuracies are therefore too high" in notes
