"""Threads on the CPU: how they wait for each other, and how many cores there are for them.

The threads of an operator wait for the slowest. By default OpenMP lets them spin meanwhile, and on busy cores they take
the time that the slowest needs. With a passive policy they sleep. OpenMP reads the policy when torch is imported, so
:mod:`semaug` imports this module first. What the user has set is not changed.

If torch cannot be imported, as with too little memory, the command line ends with one sentence.
"""

import os
import sys

if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import numpy  # noqa: F401  # first: its library ends the process if torch has left it no memory
    import torch  # noqa: F401
except (ImportError, MemoryError, OSError, SystemError) as error:
    if os.path.basename(sys.argv[0]) not in ("-m", "semaug"):
        raise
    reason = " ".join(str(error).split()) if isinstance(error, ImportError) else "not enough memory"
    sys.stderr.write(f"semaug: PyTorch cannot be loaded ({reason}); is memory limited (ulimit -v)?\n")
    raise SystemExit(2) from None


def available_cores() -> int:
    """Number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
