"""The command line: in this process, or in one of its own, as a user would run it."""

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from semaug.cli.main import main

OPTIONS = ["--model", "small", "--pretrained", "False", "--resize", "40", "--crop", "32", "--batch-size", "4"]
OPTIONS += ["--val-per-class", "2", "--workers", "0", "--cache", "None", "--lr", "0.01"]
OPTIONS += ["--method", "isda", "--strength", "10"]


def semaug(*arguments: object, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``semaug ARGUMENTS`` here, which saves the imports, and return its exit code and output."""
    words, output, errors = list(map(str, arguments)), io.StringIO(), io.StringIO()
    typed = mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    columns, streams = mock.patch.dict(os.environ, COLUMNS="200"), (redirect_stdout(output), redirect_stderr(errors))
    with columns, typed, chdir(cwd or Path.cwd()), streams[0], streams[1]:
        code = main(words)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


def semaug_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m semaug ARGUMENTS`` and return its exit code and output."""
    return subprocess.run(
        [sys.executable, "-m", "semaug", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        timeout=300,
    )
