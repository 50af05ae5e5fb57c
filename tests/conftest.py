"""Tests compare numbers in fp64, one thread each: several run side by side."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("semaug", deadline=None, derandomize=True)
settings.load_profile("semaug")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
