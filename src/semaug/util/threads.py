"""Threads on the CPU: how they wait for each other, and how many cores there are for them.

The threads of an operator wait for the slowest. By default OpenMP lets them spin meanwhile, and on busy cores they take
the time that the slowest needs. With a passive policy they sleep. OpenMP reads the policy when torch is imported, so
:mod:`semaug` imports this module first. What the user has set is not changed.

If torch cannot be imported, as with too little memory or in a folder that was deleted, the command line ends with one
sentence.
"""

import os
import sys

if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_IS_COMMAND = os.path.basename(sys.argv[0]) in ("-m", "semaug")
try:
    if _IS_COMMAND:
        os.getcwd()  # MKL ends the process without a folder, and says that torch is missing
    import numpy  # noqa: F401  # first: its library ends the process if torch has left it no memory
    import torch  # noqa: F401
except (ImportError, MemoryError, OSError, SystemError) as error:
    if not _IS_COMMAND:
        raise
    reason = " ".join(str(error).split()) if isinstance(error, ImportError) else "not enough memory"
    message = f"PyTorch cannot be loaded ({reason}); is memory limited (ulimit -v)?"
    if isinstance(error, FileNotFoundError):
        message = "the current folder was deleted or replaced; change to one that exists"
    sys.stderr.write(f"semaug: {message}\n")
    raise SystemExit(2) from None


def available_cores() -> int:
    """Number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
