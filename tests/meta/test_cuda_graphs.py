"""Steps replayed as CUDA graphs: the same bits as eager steps, on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    with graphed.repeatable():
        yield


@pytest.mark.parametrize("name", graphed.CASES)
def test_graphed_steps_equal_eager_steps_to_the_bit(name: str) -> None:
    graphed.check_case(name)


@pytest.mark.parametrize("name", ["pipelined", "pipelined, dropout", "pipelined, AdamW", "ISDA"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_run_resumes_to_the_bit_with_or_without_graphs(name: str, before: bool, after: bool) -> None:
    graphed.check_resume(name, before, after)


@pytest.mark.parametrize(("kind", "message"), graphed.FALLBACKS.items())
def test_a_network_that_cannot_be_captured_is_trained_after_one_warning(kind: type[nn.Module], message: str) -> None:
    graphed.check_fallback(kind, message)


def test_the_host_waits_for_the_gpu_in_no_replay() -> None:
    graphed.check_replays_wait_for_nothing()


def test_graphs_take_little_more_memory() -> None:
    graphed.check_memory()
