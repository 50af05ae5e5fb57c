"""`semaug reproduce` as a user runs it, on a tiny folder of images."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from photos import photo_folder
from semaug.cli.main import main
from semaug.data.readers import read_data
from semaug.inference.manifest import sign
from semaug.inference.runs import read_metrics
from semaug.report.figures import FIGURES, FigureKind
from semaug.studies import presets, theorem
from semaug.studies.bench import VARIANTS, BenchConfig, Timing
from semaug.studies.cells import Cell
from semaug.studies.page import line_charts
from semaug.studies.presets import all_experiments
from semaug.studies.reproduce import Choice, reproduce
from semaug.studies.results import Section, SeedRun, collect, finished_runs, known_extra, measure_extra
from semaug.studies.scales import WORLDS, Setup, World, train_config
from semaug.training.settings import required
from semaug.util.errors import FileError

pytestmark = pytest.mark.usefixtures("inline_workers")

CHROMIUM = shutil.which("chromium")
TINY = ["--scale", "small", "--seeds", "0", "--epochs", "1"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


def semaug(*arguments: object) -> int:
    return main(["reproduce", *map(str, arguments)])


@pytest.fixture(scope="module")
def first(photos: Path, tmp_path_factory: pytest.TempPathFactory, inline_workers: None) -> Path:
    """Two tables with three runs, one of which finds a folder in its place that is no run."""
    output = tmp_path_factory.mktemp("output")
    occupied = train_config(Cell("mixup"), Setup("small", output, photos, epochs=1)).output
    assert occupied is not None
    occupied.mkdir(parents=True)
    (occupied / "notes.txt").write_text("not a run")
    assert semaug(
        "table-image-level", "table-sota-p2p", *TINY, "--data", photos, "--output", output, "--jobs", 2,
        "--method", "mixup", "basic", "isda", "--network", "ResNet-50",
    ) == 2  # fmt: skip
    return output


@pytest.mark.parametrize("name", ["results.json", "results.md", "report.html"])
def test_a_file_of_the_users_in_the_output_folder_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "results.json").write_text('{\n  "scale": "small"')
    (tmp_path / name).write_text("my notes")
    with pytest.raises(FileError, match=f"{name} exists and is another kind of file"):
        reproduce(["theorem"], Setup("small", tmp_path), Choice())
    assert (tmp_path / name).read_text() == "my notes"


def cells(output: Path, name: str) -> dict[str, dict[str, Any]]:
    results = json.loads((output / "results.json").read_text())
    return {f"{cell['network']} {cell['title']}": cell for cell in results["experiments"][name]["cells"]}


def test_cells_are_run_and_a_failing_one_does_not_end_the_others(first: Path) -> None:
    found = cells(first, "table-image-level")
    for title in ("ResNet-50 basic", "ResNet-50 ISDA"):
        assert found[title]["status"] == "measured"
        run = first / "runs" / found[title]["seeds"][0]["run"]
        top1 = json.loads((run / "evaluation.json").read_text())["top1"]
        assert found[title]["ours"] == pytest.approx(100 * top1)
        assert found[title]["difference"] is None  # not the paper's data
    assert found["ResNet-50 Mixup"]["status"] == "not run"
    assert "holds no run" in found["ResNet-50 Mixup"]["reason"]
    assert found["ResNet-50 CutMix"]["reason"] == "left out by the options"
    assert found["ResNet-50 CutMix"]["ours"] is None
    assert found["ResNet-50 ISDA"]["paper_over_basic"] == pytest.approx(0.8)
    difference = found["ResNet-50 ISDA"]["ours"] - found["ResNet-50 basic"]["ours"]
    assert found["ResNet-50 ISDA"]["over_basic"] == pytest.approx(difference)
    assert cells(first, "table-sota-p2p")["P2P-Net basic"]["reason"] == "left out by the options"
    text = (first / "results.md").read_text()
    assert "| 85.9 | not run |" in text
    assert f"    semaug reproduce table-sota-p2p --scale small --data {'/'}" in text


def test_a_second_call_repeats_only_the_run_that_failed(
    photos: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.stat().st_mtime_ns for file in (first / "runs").glob("*/model.safetensors")}
    options = [*TINY, "--data", photos, "--output", first, "--network", "ResNet-50", "--method", "basic", "isda"]
    assert semaug("table-sota-p2p", *options) == 0
    assert "0 runs to train, 2 finished already" in capsys.readouterr().err
    assert len(before) == 2
    assert {file: file.stat().st_mtime_ns for file in (first / "runs").glob("*/model.safetensors")} == before
    assert (first / "report.html").read_text().count("<section") > 1  # earlier results are still reported
    assert semaug("table-image-level", *options, "mixup") == 2
    shown = capsys.readouterr()
    assert "1 run to train, 2 finished already" in shown.err
    assert shown.err.splitlines()[-1] == "semaug: 1 of the runs and pictures failed; the report says why"
    assert "not run" in shown.out
    assert "* stand-ins: CUB-200-2011: the folder photos" in shown.out


def test_runs_on_other_images_are_not_reported_together(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = Path(shutil.copytree(photos, tmp_path / "photos")), tmp_path / "output"
    options = ["table-image-level", *TINY, "--data", data, "--output", output, "--method", "basic"]
    assert semaug(*options) == 0
    (finished,) = (output / "runs").iterdir()
    before = (output / "results.json").read_bytes()
    min((data / "train").rglob("*.png")).unlink()
    capsys.readouterr()
    assert semaug(*options, "isda") == 2
    sentence = f"the classes or images of photos changed since {finished} was trained; restore them, or choose another"
    assert sentence in capsys.readouterr().err
    assert [*(output / "runs").iterdir()] == [finished]
    assert (output / "results.json").read_bytes() == before


def test_best_of_test_stands_beside_the_last_epoch_if_it_is_asked_for(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["table-image-level", *TINY, "--epochs", 2, "--data", photos, "--output", tmp_path, "--method", "basic"]
    assert semaug(*options, "--best-of-test") == 0
    found = cells(tmp_path, "table-image-level")["ResNet-50 basic"]
    run = tmp_path / "runs" / found["seeds"][0]["run"]
    scores, rows = json.loads((run / "evaluation.json").read_text()), read_metrics(run)
    assert found["ours"] == pytest.approx(100 * scores["top1"])
    assert scores["best_epoch"] == 2  # the last
    assert found["best_of_test"] == pytest.approx(100 * max(rows[0]["test_top1"], rows[1]["val_top1"]))
    shown = capsys.readouterr().out
    assert "best" in shown
    assert '"Best of test" is the best epoch on the test split' in shown
    assert "--best-of-test" in (tmp_path / "results.md").read_text()
    assert semaug(*options, "--best-of-test", "--select", "val") == 2
    assert "--best-of-test needs --select last" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_report_opens_without_errors(first: Path, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    options += [f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    page = (first / "report.html").as_uri()
    shown = subprocess.run([str(CHROMIUM), *options, page], capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == []
    assert "left out by the options" in shown.stdout
    assert "Bilinear CNN" in shown.stdout
    assert "<svg" in shown.stdout
    assert "not run" in shown.stdout


def test_the_list_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert semaug("list") == 0
    listed = capsys.readouterr().out
    assert "table-datasets " in listed
    assert "theorem " in listed
    assert semaug() == 0
    assert capsys.readouterr().out == listed


def test_without_a_gpu_full_scale_measures_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMAUG_DATA", str(tmp_path))
    arguments = ["reproduce", "figure-frozen-blocks", "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main(arguments) == 0  # nothing failed: it was not run, and says why
    assert "the time per step at full scale needs a GPU" in capsys.readouterr().out
    found = cells(tmp_path / "out", "figure-frozen-blocks")
    assert {cell["status"] for cell in found.values()} == {"not run"}
    assert all("needs CUB-200-2011" in cell["reason"] for cell in found.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table-1"], "unknown experiment 'table-1'"),
        (["all", "--method", "magic"], "unknown method 'magic'"),
        (["all", "--data", "nowhere"], "there is no folder nowhere"),
        (["all", "--jobs", "0"], "--jobs must be from 1 to 256, not 0"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(
    tmp_path: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments, "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "out").exists()


def finish(cell: Cell, setup: Setup, seed: int, top1: float) -> None:
    """Write the files of a finished run that are read."""
    config = train_config(cell, setup, seed)
    run = config.output
    assert run is not None
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(config.resolve().to_json()))
    (run / "model.safetensors").write_bytes(b"")
    (run / "evaluation.json").write_text(json.dumps({"top1": top1, "split": "test"}))
    (run / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "variance_mean": 0.5, "augmentation_share": 0.1}) + "\n")
    sign(run, data=None if setup.data is None else read_data(str(setup.data)).fingerprint())


def test_means_spreads_and_differences(tmp_path: Path) -> None:
    setup = Setup("full", tmp_path)
    for seed, basic, learnable in ((0, 0.84, 0.86), (1, 0.85, 0.89)):
        finish(Cell("basic"), setup, seed, basic)
        finish(Cell("learnable"), setup, seed, learnable)
    finish(Cell("learnable"), setup, 7, 0.5)  # basic has no run with this seed
    rows = {(r.cell.dataset, r.cell.method): r for r in collect(all_experiments()["table-datasets"], setup, {})}
    basic, learnable = rows["cub", "basic"], rows["cub", "learnable"]
    assert basic.mean == pytest.approx(84.5)
    assert basic.spread == pytest.approx(0.5**0.5)
    assert basic.difference == pytest.approx(0.0)
    assert learnable.mean == pytest.approx(75.0)
    assert learnable.difference == pytest.approx(75.0 - 86.7)
    assert learnable.gain == pytest.approx(3.0)
    assert learnable.paper_gain == pytest.approx(2.2)
    assert [type(run) for run in learnable.runs] == [SeedRun] * 3
    assert rows["nabirds", "basic"].mean is None
    assert rows["nabirds", "basic"].ours == "not run"
    assert "needs NABirds" in rows["nabirds", "basic"].reason
    other = collect(all_experiments()["table-datasets"], Setup("full", tmp_path, epochs=3), {})
    assert all(row.mean is None for row in other)  # other settings belong to other runs


@pytest.mark.parametrize("seed", ["00", "\N{ARABIC-INDIC DIGIT ZERO}", "0 (copy)"])
def test_a_copy_of_a_run_does_not_count_as_another_seed(tmp_path: Path, seed: str) -> None:
    setup, cell = Setup("full", tmp_path), Cell("basic")
    finish(cell, setup, 0, 0.84)
    run = required(train_config(cell, setup).output)
    shutil.copytree(run, run.with_name(run.name.removesuffix("0") + seed))
    assert [found.run for found in finished_runs(cell, setup)] == [run]


@dataclass(frozen=True)
class Picture:
    title: str = "a picture"
    caption: str = "what is seen"
    png: bytes = b""
    html: str = "<div><style>.x { color: red }</style><script>1 + 1</script>planted</div>"
    numbers: Any = None


def test_pictures_are_drawn_once_and_a_failing_one_is_reported(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def tsne(runs: Any, *, more_than: int) -> Any:
        seen.append((runs, more_than))
        return Picture()

    def neighbours(runs: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setitem(FIGURES, "tsne", FigureKind(tsne, "all", ""))
    monkeypatch.setitem(FIGURES, "neighbours", FigureKind(neighbours, "all", ""))
    setup = Setup("small", tmp_path, photos)
    for cell in (Cell("basic"), Cell("learnable"), Cell("constant"), Cell("isda")):
        finish(cell, setup, 0, 0.5)
    names = ("figure-tsne", "figure-neighbours", "figure-joint")
    choice = Choice(methods=("basic", "learnable", "constant", "isda"), seeds=(0,))
    for _ in range(2):
        assert reproduce(names, setup, choice, 1).failed == 1
    assert len(seen) == 1
    assert set(seen[0][0]) == {"basic", "learnable"}
    assert seen[0][1] == 3, "the option of the preset at this scale"
    page = (tmp_path / "report.html").read_text()
    assert "planted" in page
    assert "ValueError: no such thing" in page
    assert "Variance" in page


PRESET = """
from semaug.studies.cells import Cell, Experiment

EXPERIMENT = Experiment(
    name="figure-new",
    order=15,
    title="A new figure",
    line="basic beside ISDA, for a test",
    shows="Nothing.",
    caption="None.",
    cells=(Cell("basic", paper=84.5), Cell("isda", paper=85.3, setting="λ0 = 5", strength=5.0)),
    measure=lambda experiment, setup: {"lines": [f"measured at {setup.scale} scale"]},
)
"""


def test_a_preset_is_added_by_one_file(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "figure_new.py").write_text(PRESET)
    monkeypatch.setattr(presets, "__path__", [*presets.__path__, str(folder)])
    assert semaug("list") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["table-datasets", "figure-new", "table-networks"]  # by its `order`
    output = tmp_path / "out"
    assert semaug("figure-new", *TINY, "--data", photos, "--output", output) == 0
    found = cells(output, "figure-new")
    assert {title: cell["status"] for title, cell in found.items()} == {
        "ResNet-50 basic": "measured",
        "ResNet-50 ISDA, λ0 = 5": "measured",
    }
    assert "measured at small scale" in capsys.readouterr().out
    assert "A new figure" in (output / "report.html").read_text()


def test_times_per_step_are_measured_for_each_number_of_frozen_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_variants(config: BenchConfig, *_: Any) -> dict[str, Timing]:
        seconds = {"plain": [1.0, 1.0], "paper": [2.0, 2.0]}
        timed = {name: Timing(VARIANTS[name].title, values) for name, values in seconds.items()}
        name = "paper-double-backward"
        return timed | {name: Timing(VARIANTS[name].title, failure="out of memory" if config.frozen_blocks else None,
                                     seconds=[3.0, 5.0])}  # fmt: skip

    monkeypatch.setattr("semaug.studies.bench.timing.time_variants", time_variants)
    setup, preset = Setup("small", tmp_path, device="cpu"), all_experiments()["figure-frozen-blocks"]
    assert known_extra(preset, setup) == {}
    measure_extra(preset, setup)
    extra = known_extra(preset, setup)
    assert [row["frozen"] for row in extra["times"]] == ["nothing", "stem", "1", "2", "3"]
    assert extra["times"][0]["jvp"]["ratio"] == 2
    assert extra["times"][0]["double_backward"]["ratio"] == 4
    assert extra["lines"][1] == (
        "nothing frozen: plain cross-entropy 1000.0 ms (× 1.00); paper, jvp 2000.0 ms (× 2.00); "
        "paper, double backward 4000.0 ms (× 4.00)"
    )
    assert extra["lines"][2].endswith("paper, double backward out of memory")
    section = Section(setup, preset, collect(preset, setup, {}), extra=extra)
    assert len(line_charts(section)) == 1


def test_the_theorem_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = theorem.measure
    monkeypatch.setattr(theorem, "measure", lambda **_: real(shortest=4, doublings=1, long_run=8, seeds=1, scale=2.0))
    assert reproduce(("theorem",), Setup("small", tmp_path), Choice()).failed == 0
    page = (tmp_path / "report.html").read_text()
    assert "rescaled: min_t E‖∇L_meta‖² ∝ T^" in page
    assert reproduce(("theorem",), Setup("small", tmp_path), Choice()).failed == 0  # its own files are replaced
    for name in ("results.md", "report.html"):
        own = (tmp_path / name).read_text()
        (tmp_path / name).write_text(own + "My notes.\n")
        with pytest.raises(FileError, match=f"{name} was edited, and the notes in it would be lost"):
            reproduce(("theorem",), Setup("small", tmp_path), Choice())
        assert (tmp_path / name).read_text() == own + "My notes.\n"
        (tmp_path / name).write_text(own)


def test_the_gap_of_the_bound_is_measured_and_drawn(tmp_path: Path) -> None:
    setup = Setup("small", tmp_path)
    assert reproduce(("figure-bound",), setup, Choice()).failed == 0
    extra = known_extra(all_experiments()["figure-bound"], setup)
    print("\n".join(extra["lines"]))
    for curve in extra["gap"].values():
        assert curve["mean"][-1] > 10 * curve["spread"][-1]  # a bound
        assert curve["spread"][-1] < curve["spread"][0] / 16  # 4096 draws: noise as 1/64
    assert "Gap of the bound" in (tmp_path / "report.html").read_text()


def test_drawn_birds_stand_in_for_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORLDS, "cars", World(2, 5, train=4, test=2, size=32))
    setup = Setup("small", tmp_path, epochs=1)
    result = reproduce(("table-datasets",), setup, Choice(("cars",), methods=("basic",), seeds=(0,)), jobs=1)
    assert result.failed == 0
    (row,) = (row for row in result.sections[0].rows if row.runs)
    assert (row.data, row.cell.dataset) == ("2 drawn species, seed 5, chance 50.0 %", "cars")
    assert len(list((tmp_path / "data" / "birds-2-5" / "train").rglob("*.png"))) == 8
