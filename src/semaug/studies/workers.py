"""Training runs in worker processes, several at a time."""

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path

from semaug.training.settings import TrainConfig, required
from semaug.util.errors import SemaugError
from semaug.util.names import counted
from semaug.util.progress import Progress, duration


def train_all(
    configs: Sequence[TrainConfig],
    jobs: int,
    logs: Path,
    progress: Progress,
    *,
    finished: int = 0,
    threads: int | None = None,
) -> dict[Path, str]:
    """Train several runs in worker processes; a failed run does not stop the others.

    SIGINT or SIGTERM ends all runs. Each saves its state, so that the same call resumes it.

    Args:
        configs: Settings of the runs; each has an `output`.
        jobs: Number of runs at a time. Worker number i uses GPU i modulo the number of GPUs.
        logs: Folder for what the runs print, one file for each run.
        progress: Where to report finished runs and the remaining time.
        finished: Number of runs that were finished before, for the first message.
        threads: CPU threads of each run; None for an equal share of the cores.

    Returns:
        For each run that failed, by its directory, the reason in one sentence.
    """
    total = len(configs)
    progress.say(f"{counted(total, 'run')} to train, {finished} finished already")
    if not configs:
        return {}
    logs.mkdir(parents=True, exist_ok=True)
    jobs = min(jobs, total)
    threads = threads or max(1, (os.cpu_count() or 1) // jobs)
    workers = [_Worker(number, threads, logs) for number in range(jobs)]
    idle, waiting, failures = list(workers), deque(configs), dict[Path, str]()
    running: dict[Future[str | None], tuple[_Worker, TrainConfig]] = {}
    started, others = time.monotonic(), set(active_children())
    try:
        with progress.task("runs", total) as advance:
            while waiting or running:
                while idle and waiting:
                    worker, config = idle.pop(), waiting.popleft()
                    running[worker.submit(config)] = worker, config
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    worker, config = running.pop(future)
                    reason, run = worker.outcome(future), required(config.output)
                    idle.append(worker)
                    if reason is not None:
                        failures[run] = reason
                    done = total - len(waiting) - len(running)
                    left = duration((time.monotonic() - started) / done * (total - done))
                    progress.say(
                        f"[{done}/{total}] {run.name} {f'failed: {reason}' if reason else 'done'} · {left} left"
                    )
                    advance(done, total)
    except BaseException:
        for process in set(active_children()) - others:
            process.terminate()  # training saves its state
        raise
    finally:
        for worker in workers:
            worker.close()
    return failures


def default_jobs(small: bool = False) -> int:
    """The number of runs to train at a time: one for each GPU; without one, small runs on each core, others alone."""
    return len(_gpus()) or (min(8, os.cpu_count() or 1) if small else 1)


def reason_of(error: BaseException) -> str:
    """Summarise an error in one line; the sentence of a :class:`SemaugError` is enough, others have their class."""
    if isinstance(error, SemaugError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Worker:
    """A process that trains one run after another; it is replaced if it is killed."""

    def __init__(self, number: int, threads: int, logs: Path) -> None:
        self.number, self.threads, self.logs = number, threads, logs
        self.pool: ProcessPoolExecutor | None = None

    def submit(self, config: TrainConfig) -> "Future[str | None]":
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (self.threads,))
        try:
            with self._environment():
                return self.pool.submit(_train, config, self.logs / f"{required(config.output).name}.log")
        except BrokenProcessPool:  # killed while it was idle
            self.close()
            return self.submit(config)

    def outcome(self, future: "Future[str | None]") -> str | None:
        try:
            return future.result()
        except BrokenProcessPool:
            self.close()
            return "its process was killed, perhaps for lack of memory"

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Set the environment variables that torch reads on import: number of threads, and one GPU."""
        values = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if gpus := _gpus():
            values["CUDA_VISIBLE_DEVICES"] = gpus[self.number % len(gpus)]
        before = dict(os.environ)
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                del os.environ[name]
            os.environ.update({name: before[name] for name in values if name in before})


def _gpus() -> list[str]:
    """The GPUs by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


# In the worker process:


def _start(threads: int) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """Exit when the parent is killed: the next call must not find another process in the same run directory."""
    connection.wait([required(parent_process()).sentinel])
    os._exit(1)


def _train(config: TrainConfig, log: Path) -> str | None:
    """Train one run; return None, or the reason why it failed."""
    from semaug.report import write_report
    from semaug.training.trainer import train

    with open(log, "a", encoding="utf-8") as file:  # the descriptors, for messages of libraries and child processes too
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        folder = train(config)
        write_report([folder], folder / "report.html")
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, SemaugError):
            traceback.print_exc()
        return reason_of(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return None
