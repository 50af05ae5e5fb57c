"""`semaug bench` as a user runs it, on a tiny network; times are never asserted, only that there are some."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from semaug import cli, metagrad
from semaug.bench import METHODS, BenchConfig, Result, Timing, median_and_spread, timing
from semaug.meta import LearnableAugmentation
from tiny import TinyNet

TINY = ["--model", "small", "--pixels", "32", "--half", "4", "--classes", "5", "--frozen-blocks", "1"]
TINY += ["--repetitions", "3", "--seconds", "1", "--device", "cpu", "--precision", "fp32"]


def semaug(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "semaug", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        timeout=300,
    )


def test_every_method_is_measured_and_the_engines_agree(tmp_path: Path) -> None:
    done = semaug("bench", *TINY, "--output", tmp_path / "bench")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert list(found["methods"]) == list(METHODS)
    for row in found["methods"].values():
        assert row["title"] in done.stdout
        assert row["failure"] is None
        assert len(row["ms_per_step_by_repetition"]) == found["repetitions"] == 3
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

    chart = ElementTree.parse(tmp_path / "bench" / "bench.svg").getroot()
    words = " ".join(chart.itertext())
    assert all(title in words for title, _ in METHODS.values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "resnet5o"], "unknown model 'resnet5o'"),
        (["--frozen-blocks", "9"], "frozen_blocks must lie in 0 … 3"),
        (["--frozen-blocks", "-1"], "--frozen-blocks must be at least 0"),
        (["--half", "1"], "--half must be at least 2, not 1"),
        (["--pixels", "0"], "--pixels must be at least 1"),
        (["--pixels", "2"], "does not run on such images"),
        (["--classes", "1"], "--classes must be at least 2"),
        (["--repetitions", "2"], "--repetitions must be at least 3"),
        (["--seconds", "nan"], "--seconds must be a positive number"),
        (["--skip", "magic"], "unknown method 'magic'"),
        (["--skip", "plain"], "'plain' cannot be skipped"),
        (["--device", "abacus"], "--device must be cpu or cuda"),
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
    assert cli.main(["bench", *TINY, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def fail_by(monkeypatch: pytest.MonkeyPatch, engine: str, error: Exception) -> None:
    step = LearnableAugmentation.step

    def failing(self: LearnableAugmentation, *batch: Any) -> Any:
        if self.engine == engine:
            raise error
        return step(self, *batch)

    monkeypatch.setattr(LearnableAugmentation, "step", failing)


def test_a_method_without_memory_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_by(monkeypatch, "double_backward", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"))
    skipped = ["isda", "paper-interval", "pipelined-interval"]
    assert cli.main(["bench", *TINY, "--output", str(tmp_path), "--skip", *skipped]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["methods"].pop("paper-double-backward")["failure"] == "out of memory"
    assert list(found["methods"]) == ["plain", "paper", "pipelined"]
    assert all(row["ratio"] > 0 for row in found["methods"].values())
    # the reference falls back to the engine that there is memory for
    assert found["meta_gradient"]["reference"] == "jvp in fp64"
    assert [row["of"] for row in found["meta_gradient"]["agreement"]] == ["jvp", "jvp"]
    row = next(line for line in capsys.readouterr().out.splitlines() if "double backward" in line)
    assert "out of memory" in row
    assert "out of memory" in (tmp_path / "bench.svg").read_text()


def test_a_method_that_breaks_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_by(monkeypatch, "jvp", RuntimeError("no such kernel\nand a long explanation"))
    assert cli.main(["bench", *TINY, "--output", str(tmp_path), "--skip", "paper-double-backward"]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["methods"]["pipelined"]["failure"] == "no such kernel"
    assert found["methods"]["plain"]["ratio"] == 1
    assert found["meta_gradient"] == {"reference": None, "agreement": []}
    printed = capsys.readouterr().out
    assert "pipelined: no such kernel" in printed
    assert "long explanation" not in printed


def test_a_network_with_dropout_has_no_reference_in_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "build_model", lambda name, classes, pixels: TinyNet(classes))
    skipped = ["isda", "pipelined", "paper-interval", "pipelined-interval"]
    assert cli.main(["bench", *TINY, "--output", str(tmp_path), "--skip", *skipped]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["meta_gradient"]["reference"] is None
    assert len(found["meta_gradient"]["agreement"]) == 2
    assert all(row["cosine"] > 0.999 for row in found["meta_gradient"]["agreement"])  # the same masks in both engines
    assert "draws random numbers" in found["notes"][0]


def test_figures_are_medians_of_paired_ratios_and_memory_is_relative_to_plain() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 9.0]) == (3.0, 1.0)
    timings = {
        "plain": Timing("plain", [1.0, 2.0, 4.0], 2_000_000_000),
        "isda": Timing("ISDA", [2.0, 4.0, 8.0], 3_000_000_000),  # twice as long each time, whatever the clock does
        "paper": Timing("paper", failure="out of memory"),
    }
    config = BenchConfig(device="cpu").filled()
    result = Result(config, "abacus", timings, None, [], [])
    assert result.ratio("isda") == (2.0, 0.0)
    assert result.ratio("paper") is None
    rows = result.to_json()["methods"]
    assert rows["isda"]["peak_memory_ratio"] == 1.5
    assert rows["isda"]["ms_per_step"] == 4000
    assert rows["paper"] == {"title": "paper", "failure": "out of memory"}


def test_defaults_fit_the_model() -> None:
    assert BenchConfig(model="resnet50", device="cpu").filled().frozen_blocks == 10
    assert BenchConfig(model="small", device="cpu").filled().frozen_blocks == 0


def test_the_comparison_sees_a_wrong_pass_through_the_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = metagrad.jvp

    def wrong(problem: Any, direction: Any, parameters: Any) -> Any:
        bent = {name: value if "head" in name else value * value.sign() for name, value in direction.items()}
        return right(problem, bent, parameters)

    monkeypatch.setattr(metagrad, "jvp", wrong)
    skipped = [name for name in METHODS if name not in ("plain", "paper", "paper-double-backward")]
    assert cli.main(["bench", *TINY, "--output", str(tmp_path), "--skip", *skipped]) == 0
    agreement = json.loads((tmp_path / "bench.json").read_text())["meta_gradient"]["agreement"]
    cosines = {(row["part"], row["of"], row["against"]): row["cosine"] for row in agreement}
    assert cosines["backbone", "jvp", "double backward"] < 0.9
    assert cosines["backbone", "double backward", "double backward in fp64"] > 0.999


def test_with_every_block_frozen_only_the_head_is_compared(tmp_path: Path) -> None:
    skipped = [name for name in METHODS if name not in ("plain", "paper")]
    assert cli.main(["bench", *TINY, "--frozen-blocks", "3", "--output", str(tmp_path), "--skip", *skipped]) == 0
    (row,) = json.loads((tmp_path / "bench.json").read_text())["meta_gradient"]["agreement"]
    assert row["part"] == "all"
    assert row["cosine"] > 0.999
