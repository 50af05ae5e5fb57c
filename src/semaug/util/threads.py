"""Threads on the CPU: how they wait for each other, and how many cores there are for them.

The threads of an operator wait for the slowest. By default OpenMP lets them spin meanwhile, and on busy cores they take
the time that the slowest needs. With a passive policy they sleep. OpenMP reads the policy when torch is imported, so
:mod:`semaug` imports this module first. What the user has set is not changed.
"""

import os
import sys

if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def available_cores() -> int:
    """Number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
