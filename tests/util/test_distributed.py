"""Sums and copies over processes, and the loss of one of them."""

from typing import Any

import pytest
import torch

import rank_sums
from forks import run_ranks

RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each process."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(RANKS, folder, rank_sums.main, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_sums_are_exact_equal_on_all_ranks_and_keep_the_layout(results: list[dict[str, Any]]) -> None:
    parts = [rank_sums.inputs(rank) for rank in range(RANKS)]
    for bucket, sums in results[0]["sums"].items():
        for own, total, *tensors in zip(sums, results[1]["sums"][bucket], *parts, strict=True):
            assert torch.equal(own, total)
            assert torch.equal(total, sum(tensors[1:], tensors[0]))
            assert own.stride() == tensors[0].stride()


def test_gradients_are_summed_and_none_stays_none(results: list[dict[str, Any]]) -> None:
    parts = [[t for t in rank_sums.inputs(rank) if t.is_floating_point()][1:] for rank in range(RANKS)]
    for result in results:
        missing, *gradients = result["gradients"]
        assert missing is None
        for gradient, *tensors in zip(gradients, *parts, strict=True):
            assert torch.equal(gradient, sum(tensors[1:], tensors[0]))


def test_copies_are_those_of_rank_zero(results: list[dict[str, Any]]) -> None:
    for result in results:
        for copy, original in zip(result["copies"], rank_sums.inputs(0), strict=True):
            assert torch.equal(copy, original)
        assert result["object"] == "from 0"
        assert result["averaged"]["running_mean"].tolist() == [0.5] * 3
        assert result["averaged"]["num_batches_tracked"] == 5


def test_rows_numbers_and_objects_are_gathered_in_order(results: list[dict[str, Any]]) -> None:
    for result in results:
        rows, halves = result["rows"]
        assert rows[:, 0].tolist() == [0, 10, 11, 12]
        assert torch.equal(halves, rows.double() / 2)
        assert result["numbers"] == [[0, 7], [1, 7]]
    assert results[0]["objects"] == [{"rank": 0}, {"rank": 1}]
    assert results[1]["objects"] == []


def test_an_error_on_one_rank_is_raised_on_all_with_its_type(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["made"] == "made"
        assert result["raised"] == ("DataError", "the disk of this rank is damaged", True)


def test_every_operation_reports_a_process_that_has_ended(results: list[dict[str, Any]]) -> None:
    for kind, message, _ in results[0]["lost"]:
        assert kind == "PeerLostError"
        assert message.startswith("the connection to the other processes is lost (")
        assert "\n" not in message
