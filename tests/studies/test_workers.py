"""Training runs in worker processes: failures, killed processes, signals."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from photos import photo_folder
from semaug.cli.main import main
from semaug.inference.manifest import read_manifest, sign
from semaug.studies import workers
from semaug.studies.cells import Cell
from semaug.studies.scales import Setup, train_config
from semaug.studies.workers import default_jobs, train_all
from semaug.training.settings import TrainConfig, required
from semaug.training.trainer import train
from semaug.util.progress import Progress


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=2, train=6, test=2, size=32)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_fails_or_is_killed_does_not_end_the_others(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = TrainConfig(
        str(photos), model="small", method="basic", pretrained=False, epochs=1, resize=32, crop=24, batch_size=4,
        val_per_class=2, workers=0, cache=None, output=tmp_path / "finished",
    )  # fmt: skip
    wrong = replace(finished, model="no_such_net", output=tmp_path / "wrong")
    killed = replace(finished, epochs=100_000, output=tmp_path / "killed")

    def kill() -> None:
        wait_until((tmp_path / "killed" / "metrics.jsonl").exists)
        (process,) = multiprocessing.active_children()
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    failures = train_all([wrong, killed, finished], 1, tmp_path / "logs", Progress(), finished=4)
    killer.join()
    assert "unknown model 'no_such_net'" in failures.pop(tmp_path / "wrong")
    assert failures == {tmp_path / "killed": "its process was killed, perhaps for lack of memory"}
    assert (tmp_path / "finished" / "report.html").is_file()
    assert "epoch 1/1" in (tmp_path / "logs" / "finished.log").read_text()
    shown = capsys.readouterr()
    assert "3 runs to train, 4 finished already" in shown.err
    assert "[2/3] killed failed: its process was killed" in shown.err
    assert "[3/3] finished done" in shown.err
    assert "epoch" not in shown.err  # it is in the log
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_command_leaves_no_process_and_is_resumed(photos: Path, tmp_path: Path, number: int) -> None:
    setup = Setup("small", tmp_path, photos, epochs=500, device="cpu")
    config = train_config(Cell("basic"), setup)
    run = required(config.output)
    words = ["reproduce", "table-sota-p2p", "--scale", "small", "--data", photos, "--output", tmp_path, "--epochs", 500]
    words += ["--method", "basic", "--network", "ResNet-50", "--seeds", 0, "--device", "cpu"]
    process = multiprocessing.get_context("fork").Process(
        target=_main, args=(list(map(str, words)), tmp_path / "shown")
    )
    process.start()  # a fork, which need not import torch again
    wait_until((run / "metrics.jsonl").exists)
    children = _descendants(str(process.pid))
    os.kill(required(process.pid), number)
    process.join(60)
    shown = (tmp_path / "shown").read_text()
    wait_until(lambda: not any(_is_running(child) for child in children))
    assert not (run / "model.safetensors").exists()
    before = len((run / "metrics.jsonl").read_text().splitlines())
    assert before < 500
    if number == signal.SIGTERM:
        assert process.exitcode == 128 + signal.SIGTERM
        assert shown.splitlines()[-1] == "semaug: stopped by SIGTERM; run the same command again to resume"
        assert "Traceback" not in shown
        assert "which is saved" in (tmp_path / "logs" / f"{run.name}.log").read_text()
        return
    epochs = before + 1
    config_file = run / "config.json"  # shortened, so that the test need not wait for 500 epochs
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"epochs": epochs}))
    identity = read_manifest(run)
    sign(run, run=identity["run"], data=identity["data"])
    train(replace(config, epochs=epochs))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == list(range(1, epochs + 1))


def _main(arguments: list[str], shown: Path) -> None:
    with open(shown, "w") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = file
        code = main(arguments)
    os._exit(code)


def _descendants(process: str) -> list[str]:
    """The processes that a process has started, and those that they have started."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [*children, *(later for child in children for later in _descendants(child))]


def _is_running(process: str) -> bool:
    """Whether any thread of a process still runs: its files are open until the last one ends."""
    return any(_state(file) not in "ZX" for file in Path("/proc").glob(f"{process}/task/*/stat"))


def _state(file: Path) -> str:
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended
        return "X"


def test_default_number_of_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_gpus", lambda: [])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert (default_jobs(), default_jobs(small=True)) == (1, 4)
    monkeypatch.setattr(workers, "_gpus", lambda: ["0", "1"])
    assert (default_jobs(), default_jobs(small=True)) == (2, 2)
