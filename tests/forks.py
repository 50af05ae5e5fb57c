"""Processes forked from one that has imported everything, which saves each of them seconds."""

import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import torch

from semaug.cli.main import main
from semaug.util.locks import locked
from several import free_port

SLOWEST = 300.0  # seconds that anything may take
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(  # all that a training run imports
    [
        "semaug.cli.main", "semaug.cli.train", "semaug.training.trainer", "semaug.report", "torchvision.transforms.v2",
        "timm", "matplotlib.figure", "matplotlib.backends.backend_svg", "jinja2", "PIL.PngImagePlugin",
        "PIL.JpegImagePlugin", "torch._decomp.decompositions_for_jvp", "typeguard",
    ]
)  # fmt: skip


class Fork:
    """A process that calls a function; its standard error goes to a file.

    Args:
        log: The file.
        function: A function of a module; its return value is the exit code.
        arguments: Arguments of the function.
        environment: Environment variables to set.
        own_group: Whether the process leads a process group of its own.
    """

    def __init__(
        self,
        log: Path,
        function: Callable[..., int | None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        own_group: bool = False,
    ) -> None:
        self.log = log
        settings = {"COLUMNS": "300", **(environment or {})}
        self.process = _FORKS.Process(target=_run, args=(log, settings, own_group, function, arguments))
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def is_running(self) -> bool:
        return self.process.exitcode is None

    def send(self, number: signal.Signals, to_group: bool = False) -> None:
        (os.killpg if to_group else os.kill)(self.pid, number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens while the process runs."""
        deadline = time.monotonic() + SLOWEST
        while not condition():
            assert self.is_running(), self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and what the process wrote to standard error."""
        self.process.join(SLOWEST)
        if self.is_running():
            self.process.kill()
            raise AssertionError(f"process {self.pid} does not end:\n{self.log.read_text()}")
        assert self.process.exitcode is not None
        return self.process.exitcode, self.log.read_text()


def _run(
    log: Path, environment: Mapping[str, str], own_group: bool, function: Callable[..., int | None], arguments: Any
) -> None:
    set_start_method("fork", force=True)  # as in a process that was not forked
    if own_group:
        os.setsid()
    os.environ |= environment
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def semaug(arguments: list[str], stdout: str | None = None) -> int:
    """In a fork: what the process of ``semaug ARGUMENTS`` does, with its standard output to a file."""
    if stdout is not None:
        os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = ["semaug", *arguments]
    return main()


def script(folder: str, file: str, *options: str) -> None:
    """In a fork: what the process of ``python FILE OPTIONS`` does in a folder."""
    os.chdir(folder)
    sys.argv = [file, *options]
    runpy.run_path(file, run_name="__main__")


def hold_lock(folder: Path, name: str, seconds: float, copied: Path | None = None, to: Path | None = None) -> None:
    """In a fork: lock a folder, write "locked", wait, and copy a file while the folder is still locked."""
    with locked(folder, name):
        print("locked", flush=True)
        time.sleep(seconds)
        if copied is not None and to is not None:
            shutil.copy(copied, to)


def start_ranks(count: int, folder: Path, function: Callable[..., int | None], *arguments: Any) -> list[Fork]:
    """Call a function in several processes, with the environment that torchrun sets."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Fork(
            folder / f"rank-{count}-{rank}-{common['MASTER_PORT']}.log",
            function,
            *arguments,
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def run_ranks(
    count: int, folder: Path, function: Callable[..., int | None], *arguments: Any, fails: bool = False
) -> list[str]:
    """Call a function in several processes, as above, and wait for their end; returns what each wrote."""
    forks = start_ranks(count, folder, function, *arguments)
    try:
        codes, said = zip(*(fork.wait() for fork in forks), strict=True)
    finally:
        for fork in forks:
            if fork.is_running():
                fork.process.kill()
    assert all(codes) if fails else not any(codes), f"{codes}\n" + "\n".join(said)
    return list(said)
