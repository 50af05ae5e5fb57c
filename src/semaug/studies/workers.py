"""Training runs in processes of their own, several at once; one that fails does not end the others."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from semaug.training.settings import TrainConfig
from semaug.util.errors import SemaugError
from semaug.util.progress import Progress, duration

Outcome = str | None
"""None for a run that is complete, else the reason why it is not, in one sentence."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    config: TrainConfig | None = None


def run_all(
    configs: Sequence[TrainConfig],
    jobs: int,
    threads: int | None,
    logs: Path,
    done: Callable[[TrainConfig, Outcome], None],
) -> dict[Path, Outcome]:
    """Train as configured, `jobs` runs at once; what runs print goes to files in `logs`. `done` hears of each one.

    Each has `threads` threads; its share of the cores if not given.
    """
    waiting = list(reversed(configs))
    outcomes: dict[Path, Outcome] = {}
    logs.mkdir(parents=True, exist_ok=True)
    jobs = min(jobs, len(waiting))
    threads = threads or max(1, (os.cpu_count() or 1) // max(1, jobs))
    workers: list[_Worker] = []
    try:
        workers.extend(_start(place, threads, logs) for place in range(jobs))
        for worker in workers:
            _next(worker, waiting)
        while busy := [worker for worker in workers if worker.config is not None]:
            ready = wait([worker.pipe for worker in busy])
            for place, worker in enumerate(workers):
                if worker.config is None or worker.pipe not in ready:
                    continue
                config, outcome = worker.config, _outcome(worker)
                assert config.output is not None
                outcomes[config.output] = outcome
                worker.config = None
                done(config, outcome)
                if not worker.process.is_alive() and waiting:
                    workers[place] = worker = _start(place, threads, logs)
                _next(worker, waiting)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
    return outcomes


def run_and_tell(
    configs: Sequence[TrainConfig], finished: int, jobs: int, threads: int | None, logs: Path, progress: Progress
) -> dict[Path, str]:
    """Train as :func:`run_all` does and say how far it is; returns the reasons of the runs that failed."""
    total = len(configs)
    progress.say(f"{total} run{'s' if total != 1 else ''} to make, {finished} made before")
    if not total:
        return {}
    started, count = time.monotonic(), 0
    failures: dict[Path, str] = {}
    with progress.task("runs", total) as advance:

        def done(config: TrainConfig, reason: Outcome) -> None:
            nonlocal count
            count += 1
            assert config.output is not None
            left = duration((time.monotonic() - started) / count * (total - count))
            if reason is not None:
                failures[config.output] = reason
            outcome = "done" if reason is None else f"failed: {reason}"
            progress.say(f"[{count}/{total}] {config.output.name} {outcome} · {left} left")
            advance(count, total)

        run_all(configs, jobs, threads, logs, done)
    return failures


def _start(place: int, threads: int, logs: Path) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    with _environment(place, threads):
        process = context.Process(target=_work, args=(theirs, threads, logs), daemon=False)
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _environment(place: int, threads: int) -> Iterator[None]:
    """What a new process finds in its environment: its share of the threads, and one of the GPUs."""
    values = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    gpus = _gpus()
    if gpus:
        values["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _gpus() -> list[str]:
    """The GPUs that there are, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def default_jobs(scale: str) -> int:
    """One run for each GPU; without one, small runs on each core and large ones on all cores."""
    return len(_gpus()) or (min(8, os.cpu_count() or 1) if scale == "small" else 1)


def _next(worker: _Worker, waiting: list[TrainConfig]) -> None:
    if waiting and worker.process.is_alive():
        worker.config = waiting.pop()
        with suppress(OSError):  # it has just ended, which waiting for its answer will tell
            worker.pipe.send(worker.config)


def _outcome(worker: _Worker) -> Outcome:
    try:
        outcome: Outcome = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process ended early ({how})"
    return outcome


# ------------------------------------------------------------------------------------------------ in the process


def _work(pipe: Connection, threads: int, logs: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            config: TrainConfig = pipe.recv()
        except (EOFError, OSError):
            return
        assert config.output is not None
        with _printing_to(logs / f"{config.output.name}.log"):
            outcome = _train(config)
        pipe.send(outcome)


def _end_with_parent() -> None:
    """A run must not go on when nobody waits for it: the next one would meet it in the same directory."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    import sys

    with open(log, "a", encoding="utf-8") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _train(config: TrainConfig) -> Outcome:
    import traceback

    from semaug.report import write_report
    from semaug.training.trainer import train

    try:
        folder = train(config)
        write_report([folder], folder / "report.html")
    except SemaugError as error:
        return str(error)
    except Exception as error:  # whatever it is, the other runs go on; the log has all of it
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return None
