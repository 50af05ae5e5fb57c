"""Tests compare numbers in fp64, one thread each: several run side by side."""

import os
import signal

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when semaug.network.kernels is imported, which is after this file.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("semaug", deadline=None, derandomize=True)
settings.load_profile("semaug")
torch.set_num_threads(1)
if "FUZZ" in os.environ:
    from fuzzing import pytest_runtest_call, pytest_terminal_summary  # noqa: F401
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so a shell starts what it runs in the background, and all below it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # whatever the last test did
