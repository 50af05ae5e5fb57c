"""`semaug train` in several processes: the run of one, whatever their number, and however it is broken off."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

import rank_train
from photos import photo_folder
from semaug.inference.runs import read_metrics
from semaug.training import checkpoints as checkpoint
from semaug.util.files import read_json
from several import TESTS, environment, free_port, in_processes

WHOLE = ("paper", "mixup", "cutmix", "erased", "changed", "randaugment", "held-out")
CHAINED = ("paper", "pipelined", "micro")  # each begun by four processes, gone on with by two, and ended by one
TIMES = ("seconds", "images_per_second")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process."""
    folder = tmp_path_factory.mktemp("alone")
    for name in dict.fromkeys((*WHOLE, *CHAINED)):
        rank_train.run(photos, folder, name)
    return folder


def difference(one: Path, other: Path) -> float:
    """The largest between the last states of two runs: network, optimiser, running average and CovNet."""
    states: list[Any] = [checkpoint.load(run / "checkpoints" / "last") for run in (one, other)]
    largest = 0.0
    for key in ("model", "optimizer", "average"):
        first, second = (pytree.tree_leaves(state[key]) for state in states)
        assert len(first) == len(second)
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Tensor)]
        largest = max([largest, *(float((a.double() - b.double()).abs().max()) for a, b in pairs)])
    first, second = (state["learner"]["source"] for state in states)
    return max([largest, *(float((value - second[key]).abs().max()) for key, value in first.items())])


def assert_same_run(one: Path, other: Path) -> None:
    largest = difference(one, other)
    print(f"{one.name}: the states differ by {largest:.1e}")
    assert largest < 1e-6
    rows, others = read_metrics(one), read_metrics(other)
    assert len(rows) == len(others) == (rank_train.SETTINGS | rank_train.RUNS.get(one.name, {}))["epochs"]
    for row, second in zip(rows, others, strict=True):
        assert set(row) == set(second)
        for name in set(row) - set(TIMES):
            # a norm of rounding errors, where λ is 0 and the meta-gradient with it, is left out by `abs`
            assert second[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
    results = [read_json(run / "evaluation.json") for run in (one, other)]
    assert results[0]["confusion"] == results[1]["confusion"]
    assert results[0]["cross_entropy"] == pytest.approx(results[1]["cross_entropy"], abs=1e-5)


def test_runs_of_two_processes_are_those_of_one(photos: Path, alone: Path, tmp_path: Path) -> None:
    told = in_processes(2, TESTS / "rank_train.py", str(photos), str(tmp_path), "99", *WHOLE)
    for name in WHOLE:
        assert_same_run(alone / name, tmp_path / name)
    assert told[0].count("18 train, 6 val, 12 test images") == len(WHOLE)
    assert told[1] == "", "only the first process tells"


def test_a_run_goes_on_in_another_number_of_processes(photos: Path, alone: Path, tmp_path: Path) -> None:
    script = TESTS / "rank_train.py"
    in_processes(4, script, str(photos), str(tmp_path), "1", *CHAINED)
    in_processes(2, script, str(photos), str(tmp_path), "2", *CHAINED)
    for name in CHAINED:
        assert len(read_metrics(tmp_path / name)) == 2
        rank_train.run(photos, tmp_path, name)
        assert_same_run(alone / name, tmp_path / name)


# The command line


def command(photos: Path, output: Path, *options: str) -> list[str]:
    settings = {"model": "small", "resize": 40, "crop": 32, "batch-size": 8, "val-per-class": 2, "epochs": 6}
    settings |= {"method": "learnable", "workers": 0, "cache": "None", "lr": 0.02, "device": "cpu"}
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    given += ["--pretrained", "False", "--order", "pipelined", "--data", str(photos), "--output", str(output)]
    return ["train", *given, *options]


def torchrun(arguments: list[str], *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "semaug"]
    return subprocess.Popen([*launcher, *arguments], env=environment(), stderr=subprocess.PIPE, text=True)


def finished(*processes: subprocess.Popen[str]) -> list[str]:
    """What processes that end well have told."""
    try:
        told = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(told)
    return told


def on_one_node(arguments: list[str], *options: str) -> subprocess.Popen[str]:
    return torchrun(arguments, "--nproc-per-node", "2", "--master-port", str(free_port()), *options)


def wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, f"{file} was not written"
        time.sleep(0.02)


def worker(launcher: int, rank: int) -> int:
    """The process of a rank that torchrun has started."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"there is no rank {rank}")


@pytest.fixture(scope="module")
def two_nodes(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two launchers with a process each, which meet on the loopback device."""
    folder = tmp_path_factory.mktemp("nodes") / "run"
    meeting = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    nodes = [torchrun(command(photos, folder), *meeting, "--node-rank", str(node)) for node in range(2)]
    told = finished(*nodes)
    assert "epoch 6/6" in told[0]
    assert "epoch" not in told[1]
    return folder


def assert_equal_runs(one: Path, other: Path) -> None:
    assert difference(one, other) == 0
    for row, second in zip(read_metrics(one), read_metrics(other), strict=True):
        assert {k: v for k, v in row.items() if k not in TIMES} == {k: v for k, v in second.items() if k not in TIMES}
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_two_nodes_complete_a_run(two_nodes: Path) -> None:
    assert len(read_metrics(two_nodes)) == 6
    assert (two_nodes / "report.html").is_file()
    assert read_json(two_nodes / "evaluation.json")["count"] == 12


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_undisturbed(
    photos: Path, two_nodes: Path, tmp_path: Path, rank: int
) -> None:
    launcher = on_one_node(command(photos, tmp_path / "run"), "--max-restarts", "1")
    wait_for(tmp_path / "run" / "checkpoints" / "last")
    os.kill(worker(launcher.pid, rank), signal.SIGKILL)
    told = finished(launcher)[0]
    assert "going on after epoch" in told
    assert_equal_runs(two_nodes, tmp_path / "run")


def test_a_run_that_is_asked_to_stop_is_saved_by_all_and_goes_on(photos: Path, two_nodes: Path, tmp_path: Path) -> None:
    launcher = on_one_node(command(photos, tmp_path / "run"))
    wait_for(tmp_path / "run" / "checkpoints" / "last")
    launcher.send_signal(signal.SIGTERM)
    told = launcher.communicate(timeout=120)[1]
    assert launcher.returncode != 0
    assert told.count("which is saved; run the same command again to resume") == 1, told
    finished(on_one_node(command(photos, tmp_path / "run")))
    # The statistics of BatchNorm were averaged once more than in the undisturbed run, which leaves rounding.
    assert difference(two_nodes, tmp_path / "run") < 1e-6


def test_a_rank_that_fails_ends_all_with_a_sentence(photos: Path, tmp_path: Path) -> None:
    told = in_processes(2, TESTS / "rank_fails.py", *command(photos, tmp_path / "run"), fails=True)
    assert told[1] == "semaug: the last process has had enough\n"
    assert told[0].splitlines()[-1].startswith("semaug: another process has ended; the same command goes on from")
    assert "Traceback" not in told[0]


def test_what_no_rank_can_do_is_told_once(photos: Path, tmp_path: Path) -> None:
    single = tmp_path / "single"
    for split in ("train", "test"):
        species = next((photos / split).iterdir())
        shutil.copytree(species, single / split / "bird")
    faults = {
        "single class": command(single, tmp_path / "run"),
        "give a larger --batch-size": command(photos, tmp_path / "run", "--batch-size", "2"),
        "torchrun are for semaug train alone": ["report", str(tmp_path)],
    }
    for sentence, arguments in faults.items():
        told = in_processes(2, TESTS / "rank_fails.py", *arguments, fails=True)
        assert told[0].count("\n") == 1 or sentence == "give a larger --batch-size"
        assert sentence in told[0].splitlines()[-1]
        assert told[1] == ""


def test_local_pseudo_updates_and_statistics_train_too(photos: Path, tmp_path: Path) -> None:
    options = ("--order", "paper", "--pseudo", "local", "--epochs", "2")
    finished(on_one_node(command(photos, tmp_path / "run", *options)))
    assert [row["epoch"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert read_json(tmp_path / "run" / "config.json")["augmentation"]["pseudo"] == "local"
