"""The command line in a process of its own, as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

OPTIONS = ["--model", "small", "--pretrained", "False", "--resize", "40", "--crop", "32", "--batch-size", "4"]
OPTIONS += ["--val-per-class", "2", "--workers", "0", "--cache", "None", "--lr", "0.01"]
OPTIONS += ["--method", "isda", "--strength", "10"]


def semaug(*arguments: object, cwd: Path | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``semaug ARGUMENTS`` and return its exit code and output."""
    return subprocess.run(
        [sys.executable, "-m", "semaug", *map(str, arguments)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        timeout=300,
    )
