"""`semaug train` in several processes: the run of one process, whatever their number, and however it is interrupted."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

import rank_fails
import rank_train
from forks import SLOWEST, run_ranks, start_ranks
from photos import QUICK
from semaug.cli.main import main
from semaug.inference.runs import read_metrics
from semaug.training import checkpoints
from semaug.util.untrusted import read_json
from several import environment, free_port

WHOLE = ("mixup", "cutmix", "erased", "changed")  # made by two processes
OWN = ("snapmix", "manifold", "local")  # of two processes; each mixes, or takes pseudo updates on, images of its own
CHAINED = ("paper", "pipelined", "micro", "isda")  # begun by four processes, continued by two, and ended by one
TIMES = ("seconds", "validation_seconds", "saving_seconds", "images_per_second")


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process."""
    folder = tmp_path_factory.mktemp("alone")
    for name in (*WHOLE, *CHAINED):
        rank_train.run(photos, folder, name)
    return folder


@pytest.fixture(scope="module")
def together(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The runs of several processes, and what the two processes wrote to standard error."""
    folder = tmp_path_factory.mktemp("together")
    run_ranks(4, folder, rank_train.main, photos, folder, [(name, 1) for name in CHAINED])
    runs = [(name, 2) for name in CHAINED] + [(name, 99) for name in (*WHOLE, *OWN)]
    said = run_ranks(2, folder, rank_train.main, photos, folder, runs)
    for name in CHAINED:
        assert len(read_metrics(folder / name)) == 2
        rank_train.run(photos, folder, name)
    return folder, said


def difference(one: Path, other: Path) -> float:
    """The largest difference between the last states of two runs: network, optimiser, moving average and CovNet."""
    states: list[Any] = [checkpoints.load(run / "checkpoints" / "last") for run in (one, other)]
    largest = 0.0
    for key in ("model", "optimizer", "average"):
        first, second = (pytree.tree_leaves(state[key]) for state in states)
        assert len(first) == len(second)
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Tensor)]
        largest = max([largest, *(float((a.double() - b.double()).abs().max()) for a, b in pairs)])
    first, second = (state["learner"]["source"] for state in states)
    return max([largest, *(float((value - second[key]).abs().max()) for key, value in first.items())])


@pytest.mark.parametrize("name", [*WHOLE, *CHAINED])
def test_a_run_of_several_processes_is_that_of_one(alone: Path, together: tuple[Path, list[str]], name: str) -> None:
    one, other = alone / name, together[0] / name
    assert difference(one, other) < 1e-6
    rows, others = read_metrics(one), read_metrics(other)
    assert len(rows) == len(others) == (QUICK | rank_train.RUNS[name])["epochs"]
    for row, second in zip(rows, others, strict=True):
        assert set(row) == set(second)
        for metric in set(row) - set(TIMES):
            # `abs` leaves out a norm of rounding errors, where λ and with it the meta-gradient is 0
            assert second[metric] == pytest.approx(row[metric], rel=1e-3, abs=1e-6), metric
    results = [read_json(run / "evaluation.json") for run in (one, other)]
    assert results[0]["confusion"] == results[1]["confusion"]
    assert results[0]["cross_entropy"] == pytest.approx(results[1]["cross_entropy"], abs=1e-5)


def test_only_the_first_process_writes_messages(together: tuple[Path, list[str]]) -> None:
    first, second = together[1]
    assert first.count("18 train, 6 val, 12 test images") == len(WHOLE) + len(CHAINED) + len(OWN)
    assert second == ""


def test_local_pseudo_updates_and_statistics_train(together: tuple[Path, list[str]]) -> None:
    run = together[0] / "local"
    assert [row["epoch"] for row in read_metrics(run)] == [1, 2]
    assert read_json(run / "config.json")["augmentation"]["pseudo"] == "local"


@pytest.mark.parametrize("name", ["snapmix", "manifold"])
def test_ranks_that_mix_their_own_images_train_one_network(together: tuple[Path, list[str]], name: str) -> None:
    run = together[0] / name
    (row,) = read_metrics(run)
    assert 0 < row["train_loss"] < 3
    assert read_json(run / "evaluation.json")["top1"] >= 0


# The command line


def command(photos: Path, output: Path, *options: str) -> list[str]:
    settings = {"model": "small", "resize": 40, "crop": 32, "batch-size": 8, "val-per-class": 2, "epochs": 6}
    settings |= {"method": "learnable", "workers": 0, "cache": "None", "lr": 0.02, "device": "cpu"}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    flags += ["--pretrained", "False", "--order", "pipelined", "--data", str(photos), "--output", str(output)]
    return ["train", "--keep-checkpoints", *flags, *options]


def torchrun(arguments: list[str], *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", *options, "-m", "semaug"]
    return subprocess.Popen([*launcher, *arguments], env=environment(), stderr=subprocess.PIPE, text=True)


def finished(*processes: subprocess.Popen[str]) -> list[str]:
    """What processes that end well have written."""
    try:
        said = [process.communicate(timeout=SLOWEST)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(said)
    return said


def on_one_node(arguments: list[str], *options: str) -> subprocess.Popen[str]:
    return torchrun(arguments, "--nproc-per-node", "2", "--master-port", str(free_port()), *options)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SLOWEST
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def worker(launcher: int, rank: int) -> int:
    """The process of a rank that torchrun has started."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"there is no rank {rank}")


@pytest.fixture(scope="module")
def two_nodes(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two launchers with a process each, connected through the loopback device."""
    folder = tmp_path_factory.mktemp("nodes") / "run"
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--master-port", str(free_port())]
    said = finished(*(torchrun(command(photos, folder), *shared, "--node-rank", str(node)) for node in range(2)))
    assert "epoch 6/6" in said[0]
    assert "epoch" not in said[1]
    return folder


def test_two_nodes_complete_a_run(two_nodes: Path) -> None:
    assert len(read_metrics(two_nodes)) == 6
    assert (two_nodes / "report.html").is_file()
    assert read_json(two_nodes / "evaluation.json")["count"] == 12


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_after_either_rank_is_killed_torchrun_restarts_the_run_and_it_ends_as_if_undisturbed(
    photos: Path, two_nodes: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launcher = on_one_node(command(photos, run), "--max-restarts", "2")
    for rank in (1, 0):
        epochs = len(read_metrics(run))
        wait_until(lambda before=epochs: len(read_metrics(run)) > before)  # type: ignore[misc]
        processes = [Path(f"/proc/{worker(launcher.pid, each)}") for each in (0, 1)]
        os.kill(int(processes[rank].name), signal.SIGKILL)
        # The other one may end another epoch first, which must not be taken for one of the next start.
        wait_until(lambda both=processes: not any(process.exists() for process in both))  # type: ignore[misc]
    assert finished(launcher)[0].count("resuming after epoch") == 2
    assert difference(two_nodes, run) == 0
    for row, second in zip(read_metrics(two_nodes), read_metrics(run), strict=True):
        assert {k: v for k, v in row.items() if k not in TIMES} == {k: v for k, v in second.items() if k not in TIMES}
    assert (two_nodes / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_a_run_that_is_asked_to_stop_is_saved_by_all_ranks_and_can_be_resumed(
    photos: Path, two_nodes: Path, tmp_path: Path
) -> None:
    ranks = start_ranks(2, tmp_path, main, command(photos, tmp_path / "run"))
    ranks[0].wait_until((tmp_path / "run" / "checkpoints" / "last").exists)
    for rank in ranks:  # so does torchrun when it is stopped
        rank.send(signal.SIGTERM)
    codes, said = zip(*(rank.wait() for rank in ranks), strict=True)
    assert codes == (143, 143)
    assert "".join(said).count(", which is saved") == 1, said
    run_ranks(2, tmp_path, main, command(photos, tmp_path / "run"))
    # The statistics of BatchNorm were averaged once more than in the undisturbed run, which changes their rounding.
    assert difference(two_nodes, tmp_path / "run") < 1e-6


def test_a_rank_that_fails_ends_all_with_a_sentence(photos: Path, tmp_path: Path) -> None:
    said = run_ranks(2, tmp_path, rank_fails.main, command(photos, tmp_path / "run"), fails=True)
    assert said[1] == "semaug: the last process fails\n"
    assert (
        said[0].splitlines()[-1].startswith("semaug: another process has ended; run the same command again to resume")
    )
    assert "Traceback" not in said[0]


def test_a_mistake_that_all_ranks_share_is_reported_once(photos: Path, tmp_path: Path) -> None:
    single = tmp_path / "single"
    for split in ("train", "test"):
        species = next((photos / split).iterdir())
        shutil.copytree(species, single / split / "bird")
    mistakes = {
        "single class": command(single, tmp_path / "run"),
        "too small for 2 processes": command(photos, tmp_path / "run", "--batch-size", "1"),
        "semaug train": ["report", str(tmp_path)],
    }
    for sentence, arguments in mistakes.items():
        said = run_ranks(2, tmp_path, main, arguments, fails=True)
        assert sentence in said[0].splitlines()[-1]
        assert said[0].count("semaug: ") == 1
        assert said[1] == ""
