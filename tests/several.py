"""Several processes on this machine, as torchrun starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment() -> dict[str, str]:
    """One thread for each process, which finds the library and the tests where this one does."""
    path = os.pathsep.join([str(TESTS), *(entry for entry in sys.path if entry)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def in_processes(count: int, script: Path, *arguments: str, fails: bool = False, timeout: float = 600) -> list[str]:
    """Run a script in several processes, in the environment that torchrun gives them; returns what each has told."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        told = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert all(codes) if fails else not any(codes), f"{codes}\n" + "\n".join(told)
    return told
