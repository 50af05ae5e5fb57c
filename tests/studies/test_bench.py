"""`semaug bench` on a tiny network. Times are never asserted, only that there are some."""

import io
import json
import re
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from semaug.cli.main import main
from semaug.meta import gradient as metagrad
from semaug.meta.learner import LearnableAugmentation
from semaug.studies.bench import (
    VARIANTS,
    BenchConfig,
    BenchResult,
    Timing,
    agreement,
    median_and_spread,
    settings,
    timing,
)
from tiny import TinyNet

TINY = ["--model", "small", "--pixels", "16", "--half", "2", "--classes", "3", "--frozen-blocks", "1"]
TINY += ["--repetitions", "3", "--seconds", "1", "--device", "cpu", "--precision", "fp32"]


def bench(output: Path, *arguments: object, skip_all_but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the command; return the content of bench.json."""
    skip = [name for name in VARIANTS if name not in skip_all_but] if skip_all_but else []
    words = ["bench", *TINY, *arguments, "--output", output, *(["--skip", *skip] if skip else [])]
    assert main(list(map(str, words))) == 0
    content: dict[str, Any] = json.loads((output / "bench.json").read_text())
    return content


def test_every_variant_is_measured_and_the_engines_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = bench(tmp_path, "--seconds", 1000, "--pixels", 32, "--half", 4)  # nothing is slow in comparison
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert list(found["methods"]) == list(VARIANTS)
    for row in found["methods"].values():
        assert row["title"] in shown
        assert row["failure"] is None
        assert len(row["ms_per_step_by_repetition"]) == row["repetitions"] == found["repetitions"] == 3
        assert row["steps_per_repetition"] <= found["steps_per_repetition"] == 5
        assert min(row["ms_per_step_by_repetition"]) > 0
        assert row["ms_per_image"] == pytest.approx(row["ms_per_step"] / 8)
        assert row["ratio"] > 0
        assert row["ratio_spread"] >= 0
        assert "peak_memory" not in row  # unknown on a CPU
    assert found["methods"]["plain"]["ratio"] == 1
    assert set(found["versions"]) == {"torch", "timm", "semaug", "python"}
    assert found["device"]
    assert found["settings"]["half"] == 4

    agreement = found["meta_gradient"]["agreement"]
    assert found["meta_gradient"]["reference"] == "double backward in fp64"
    assert [(row["part"], row["of"], row["against"]) for row in agreement] == [
        (part, of, against)
        for part in ("all", "backbone")
        for of, against in (
            ("jvp", "double backward"),
            ("jvp", "double backward in fp64"),
            ("double backward", "double backward in fp64"),
        )
    ]
    for row in agreement:
        assert row["cosine"] > 0.999
        assert row["relative_error"] < 1e-3

    words = " ".join(ElementTree.parse(tmp_path / "bench.svg").getroot().itertext())
    assert all(variant.title in words for variant in VARIANTS.values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "resnet5o"], "unknown model 'resnet5o'"),
        (["--frozen-blocks", "9"], "frozen_blocks must be in 0 … 3"),
        (["--frozen-blocks", "-1"], "--frozen-blocks must be from 0 to 1000000, not -1"),
        (["--half", "1"], "--half must be from 2 to 1000000, not 1"),
        (["--pixels", "0"], "--pixels must be from 1 to 8192, not 0"),
        (["--pixels", "2"], "does not run on such images"),
        (["--classes", "1"], "--classes must be from 2 to 1000000, not 1"),
        (["--repetitions", "2"], "--repetitions must be from 3 to 1000000, not 2"),
        (["--seconds", "nan"], "--seconds must be above 0 and at most 1e+09, not nan"),
        (["--skip", "magic"], "unknown variant 'magic'"),
        (["--skip", "plain"], "'plain' cannot be skipped"),
        (["--device", "abacus"], "--device must be cpu"),
        (["--output", "taken/bench"], "cannot write to taken/bench"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert main(["bench", *TINY, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def fail_by(monkeypatch: pytest.MonkeyPatch, engine: str, error: Exception) -> None:
    step = LearnableAugmentation.step

    def failing(self: LearnableAugmentation, *batch: Any) -> Any:
        if self.executor.engine == engine:
            raise error
        return step(self, *batch)

    monkeypatch.setattr(LearnableAugmentation, "step", failing)


def test_a_variant_that_runs_out_of_memory_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_by(monkeypatch, "double_backward", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"))
    found = bench(tmp_path, skip_all_but=("plain", "paper", "paper-double-backward", "pipelined"))
    assert found["methods"].pop("paper-double-backward")["failure"] == "out of memory"
    assert list(found["methods"]) == ["plain", "paper", "pipelined"]
    assert all(row["ratio"] > 0 for row in found["methods"].values())
    # the reference comes from the engine that has enough memory
    assert found["meta_gradient"]["reference"] == "jvp in fp64"
    assert [row["of"] for row in found["meta_gradient"]["agreement"]] == ["jvp", "jvp"]
    row = next(line for line in capsys.readouterr().out.splitlines() if "double backward" in line)
    assert "out of memory" in row
    assert "out of memory" in (tmp_path / "bench.svg").read_text()


def test_a_variant_that_fails_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_by(monkeypatch, "jvp", RuntimeError("no such kernel\nand a long explanation"))
    found = bench(tmp_path, skip_all_but=("plain", "paper", "pipelined"))
    assert found["methods"]["pipelined"]["failure"] == "no such kernel"
    assert found["methods"]["plain"]["ratio"] == 1
    assert found["meta_gradient"] == {"reference": None, "agreement": []}
    printed = capsys.readouterr().out
    assert "pipelined: no such kernel" in printed
    assert "double backward was left out" in printed
    assert "long explanation" not in printed


def test_a_network_with_dropout_has_no_reference_in_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "build_model", lambda name, classes, pixels: TinyNet(classes))
    found = bench(tmp_path, skip_all_but=("plain", "paper", "paper-double-backward"))
    assert found["meta_gradient"]["reference"] is None
    assert len(found["meta_gradient"]["agreement"]) == 2
    assert all(row["cosine"] > 0.999 for row in found["meta_gradient"]["agreement"])  # the same masks in both engines
    assert "draws random numbers" in found["notes"][0]


def test_results_are_medians_of_paired_ratios_and_memory_is_relative_to_plain() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 9.0]) == (3.0, 1.0)
    assert median_and_spread([2.0]) == (2.0, None)
    timings = {
        "plain": Timing("plain", [1.0, 2.0, 4.0], 2_000_000_000),
        "isda": Timing("ISDA", [2.0, 4.0, 8.0], 3_000_000_000),  # twice as long each time, whatever the clock does
        "paper": Timing("paper", failure="out of memory"),
    }
    config = BenchConfig(device="cpu").resolve()
    result = BenchResult(config, "abacus", timings)
    assert result.ratio("isda") == (2.0, 0.0)
    assert result.ratio("paper") is None
    rows = result.to_json()["methods"]
    assert rows["isda"]["peak_memory_ratio"] == 1.5
    assert rows["isda"]["ms_per_step"] == 4000
    assert rows["paper"] == {"title": "paper", "failure": "out of memory"}


def test_defaults_fit_the_model() -> None:
    assert BenchConfig(model="resnet50", device="cpu").resolve().frozen_blocks == 10
    assert BenchConfig(model="small", device="cpu").resolve().frozen_blocks == 0


def test_the_comparison_detects_a_wrong_pass_through_the_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = metagrad.jvp

    def wrong(problem: Any, direction: Any, parameters: Any) -> Any:
        bent = {name: value if "head" in name else value * value.sign() for name, value in direction.items()}
        return right(problem, bent, parameters)

    monkeypatch.setattr(metagrad, "jvp", wrong)
    found = bench(tmp_path, skip_all_but=("plain", "paper", "paper-double-backward"))
    agreement = found["meta_gradient"]["agreement"]
    cosines = {(row["part"], row["of"], row["against"]): row["cosine"] for row in agreement}
    assert cosines["backbone", "jvp", "double backward"] < 0.9
    assert cosines["backbone", "double backward", "double backward in fp64"] > 0.999


def test_with_every_block_frozen_only_the_head_is_compared(tmp_path: Path) -> None:
    found = bench(tmp_path, "--frozen-blocks", 3, skip_all_but=("plain", "paper"))
    (row,) = found["meta_gradient"]["agreement"]
    assert row["part"] == "all"
    assert row["against"] == "jvp in fp64"
    assert found["notes"] == ["double backward was left out of the comparison of meta-gradients: it was skipped"]
    assert row["cosine"] > 0.999


class Clock:
    """Counts the steps of all variants. A step of double backward takes `seconds`, any other a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 0.0
        self.counts: dict[str, int] = {}

        def make_counted(config: BenchConfig, name: str) -> Any:
            def counted(*batch: Any) -> None:
                self.counts[name] = self.counts.get(name, 0) + 1
                self.now += seconds if name == "paper-double-backward" else 0.1

            return counted

        monkeypatch.setattr(timing, "_step", make_counted)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic))


@pytest.mark.parametrize(
    ("seconds", "repetitions", "steps", "taken"),
    [(0.9, 3, 5, 6 + 15), (1.5, 3, 1, 2 + 3), (4.0, 1, 1, 2 + 1), (20.0, 1, 1, 2 + 1)],
)
def test_a_slow_variant_takes_fewer_and_shorter_turns(
    seconds: float,
    repetitions: int,
    steps: int,
    taken: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock(monkeypatch, seconds)
    monkeypatch.setattr(agreement, "_meta_gradient", lambda *_: (torch.ones(1), False))
    found = bench(tmp_path, "--seconds", 20, "--skip", "isda", "pipelined")
    assert clock.counts.pop("paper-double-backward") == taken
    assert set(clock.counts.values()) == {6 + 15}
    assert (found["repetitions"], found["steps_per_repetition"]) == (3, 5)
    row = found["methods"]["paper-double-backward"]
    assert (row["repetitions"], row["steps_per_repetition"]) == (repetitions, steps)
    assert row["ratio"] == pytest.approx(seconds / 0.1)
    assert row["ratio_spread"] == (None if repetitions == 1 else pytest.approx(0))

    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("paper, double backward"))
    assert ("±" in line) == (repetitions > 1)
    several = "s" if repetitions > 1 else ""
    slow = f"measured in fewer or shorter turns: paper, double backward ({repetitions} repetition{several} of 1 step)"
    assert (slow in " ".join(printed.split())) == (steps == 1)

    left_out = "double backward was left out of the comparison of meta-gradients: it took 20.0 s per step"
    assert (left_out in found["notes"]) == (left_out in " ".join(printed.split())) == (seconds > 5)
    reference = "jvp in fp64" if seconds > 5 else "double backward in fp64"
    assert found["meta_gradient"]["reference"] == reference
    assert ("double backward" in [row["of"] for row in found["meta_gradient"]["agreement"]]) == (seconds <= 5)


@pytest.mark.parametrize(("first", "second", "steps"), [(9.0, 0.1, 5), (0.1, 9.0, 5), (9.0, 2.0, 1)])
def test_one_long_step_does_not_make_a_variant_slow(
    first: float, second: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, first, 10.0, 10.0 + second, 20.0, 20.4])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    batch = torch.zeros(2), torch.zeros(2)
    config = BenchConfig(device="cpu").resolve()
    assert timing._warm_up(config, "paper", lambda *_: None, *batch)[:2] == (steps, pytest.approx(min(first, second)))


def test_if_every_step_is_slow_only_variants_with_an_interval_take_whole_cycles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SLOW_STEP", 0.0)
    monkeypatch.setattr(settings, "SLOW_SHARE", 0.0)
    rows = bench(tmp_path)["methods"]
    assert {name for name, row in rows.items() if row["steps_per_repetition"] == 5} == {
        "paper-interval",
        "pipelined-interval",
    }
    assert {row["repetitions"] for row in rows.values()} == {1}
    assert all(row["ratio"] > 0 for row in rows.values())


def test_an_interruption_of_the_comparison_leaves_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(agreement, "_meta_gradient", interrupt)
    skipped = [name for name in VARIANTS if name not in ("plain", "paper")]
    assert main(["bench", *TINY, "--output", str(tmp_path), "--skip", *skipped]) == 130
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["methods"]["paper"]["ratio"] > 0
    assert found["meta_gradient"] is None
    assert "paper, jvp" in (tmp_path / "bench.svg").read_text()
    printed = capsys.readouterr()
    assert "paper, jvp" in printed.out
    assert "bench.json" in printed.out
    assert printed.err.splitlines()[-1] == "semaug: interrupted"


def test_the_widest_numbers_fit_80_columns() -> None:
    seconds, titles = [21.0, 31.0, 99.0], {name: variant.title for name, variant in VARIANTS.items()}
    timings = {name: Timing(title, seconds, 139_000_000_000) for name, title in titles.items()}
    timings["plain"] = Timing("plain cross-entropy", [0.1, 0.1, 0.1], 11_300_000_000)
    timings["isda"] = Timing("ISDA", failure="out of memory")
    written = io.StringIO()
    Console(width=80, file=written).print(BenchResult(BenchConfig(device="cpu").resolve(), "abacus", timings).costs())
    lines = written.getvalue().splitlines()
    rows = [line for line in lines if line.startswith(tuple(titles.values()))]
    assert len(rows) == len(VARIANTS)
    assert all(row.endswith("12.30") for row in rows[2:])
    headings = ["method", "ms/step", "ms/image", "× plain", "GB", "× plain"]
    assert any(re.split(r"\s{2,}", line) == headings for line in lines)
    assert "…" not in "".join(lines)
