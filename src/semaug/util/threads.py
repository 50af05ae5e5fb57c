"""Threads on the CPU: how they wait for each other, and how many cores there are for them.

The threads of an operator wait for the last of them. OpenMP lets them spin, which gains nothing on free cores and on busy
ones takes the time that the last one needs: beside two busy processes on two cores, training ran at a fraction of its
speed. A passive thread sleeps. OpenMP reads the policy when torch is imported, so :mod:`semaug` imports this module first.
A policy that the user has set is respected.
"""

import os
import sys

if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def available_cores() -> int:
    """Number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
