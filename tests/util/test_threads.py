"""How threads on the CPU wait: set before torch is imported, unless the user has set it."""

import os
import subprocess
import sys

import pytest

from semaug.util.threads import available_cores

SHOW = "import os; print(os.environ.get('OMP_WAIT_POLICY'))"


@pytest.mark.parametrize(
    ("program", "environment", "policy"),
    [
        ("import semaug.cli.main", {}, "PASSIVE"),
        ("import semaug", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ("import torch, semaug", {}, "None"),  # too late: OpenMP has read it
    ],
)
def test_threads_wait_passively_unless_the_user_wants_otherwise(
    program: str, environment: dict[str, str], policy: str
) -> None:
    """OpenMP prints the settings that it has read, when torch loads it."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", f"{program}; {SHOW}"]
    clean |= {"OMP_DISPLAY_ENV": "true", **environment}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == policy
    assert ("OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr) == (policy != "ACTIVE")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_cores_are_those_of_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert available_cores() == len(before)
