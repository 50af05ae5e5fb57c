"""The inference loop: decoding ahead in order, and networks on batches of pixels."""

import itertools
import threading
import time

import pytest
import torch
from torch import nn

from semaug.data.images import Preprocessing
from semaug.inference.loop import decode_batches, predict_logits, run_batches

PREPROCESSING = Preprocessing(8, 6)


@pytest.mark.parametrize("workers", [None, 0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_results_come_in_order_and_in_batches(workers: int | None, batch_size: int) -> None:
    def load(i: int) -> int:
        time.sleep(0.002 * (i % 3 == 0))  # later items finish earlier
        return i * i

    batches = list(decode_batches(load, range(10), batch_size, workers))
    assert [result for batch in batches for result in batch] == [i * i for i in range(10)]
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}


def test_endless_items_are_loaded_at_most_two_batches_ahead() -> None:
    taken: list[int] = []

    def items():
        for i in itertools.count():
            taken.append(i)
            yield i

    batches = decode_batches(lambda i: i, items(), 3)
    assert next(batches) == [0, 1, 2]
    assert len(taken) == 3 + 2 * 3
    batches.close()
    assert threading.active_count() < 10  # the threads of the pool have ended


def test_the_first_error_ends_the_loop() -> None:
    done = []

    def load(i: int) -> float:
        done.append(i)
        return 1 / (i - 5)

    batches = decode_batches(load, range(1000), 2, workers=2)
    assert len(next(batches)) == 2
    with pytest.raises(ZeroDivisionError):
        list(batches)
    assert len(done) < 30


class Net(nn.Module):
    """A network whose outputs depend on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(64, 5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def pixel_batches() -> list[torch.Tensor]:
    return [torch.randint(256, (count, 8, 8, 3), dtype=torch.uint8) for count in (4, 4, 2)]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_logits_are_those_of_the_network_in_evaluation_mode(autocast: torch.dtype | None) -> None:
    model, batches = Net().train(), pixel_batches()
    results = list(predict_logits(model, iter(batches), PREPROCESSING, autocast=autocast))
    model.eval()
    for pixels, logits in zip(batches, results, strict=True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            expected = model(PREPROCESSING.evaluation_input(pixels))
        assert torch.equal(logits, expected.float())
        assert logits.dtype == torch.float32
        assert not logits.requires_grad


def test_autocast_outside_of_the_loop_does_not_change_it() -> None:
    model, batches = Net(), pixel_batches()
    expected = list(predict_logits(model, batches, PREPROCESSING))
    with torch.autocast("cpu", torch.bfloat16):
        results = list(predict_logits(model, batches, PREPROCESSING))
    assert all(map(torch.equal, results, expected))


def test_any_function_of_the_inputs_can_be_run() -> None:
    batches = pixel_batches()
    results = list(run_batches(lambda inputs: inputs.double().mean((2, 3)), batches, PREPROCESSING))
    for pixels, means in zip(batches, results, strict=True):
        expected = PREPROCESSING.evaluation_input(pixels).double().mean((2, 3))
        torch.testing.assert_close(means, expected.float())
