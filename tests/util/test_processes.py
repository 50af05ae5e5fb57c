"""Ordered maps over worker processes."""

import os
import time
from pathlib import Path

import pytest

from semaug.util.errors import DataError
from semaug.util.processes import TASK_SIZE, is_other_process, ordered_map


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(ordered_map(lambda i: i * i, range(50), workers)) == [i * i for i in range(50)]
    assert list(ordered_map(lambda i: i, [], workers)) == []


def test_items_are_read_only_so_far_ahead() -> None:
    read = []

    def items():
        for i in range(200):
            read.append(i)
            yield i

    results = ordered_map(lambda i: i, items(), 1, tasks_ahead=2)
    for place, result in enumerate(results):
        assert result == place
        assert len(read) <= (place // TASK_SIZE + 2) * TASK_SIZE
    assert len(read) == 200


def test_an_error_in_a_worker_is_raised_in_its_place() -> None:
    results = ordered_map(lambda i: 10 // (20 - i), range(50), 2)
    with pytest.raises(ZeroDivisionError):
        list(results)


def test_a_worker_that_is_killed_ends_in_one_sentence() -> None:
    with pytest.raises(DataError, match=r"^a process that reads images was killed, .*; set `workers` to 1$"):
        list(ordered_map(os._exit, range(3), 1))


def test_a_consumer_that_stops_does_not_wait_for_pending_tasks(tmp_path: Path) -> None:
    def slow(i: int) -> int:
        (tmp_path / str(i)).touch()
        if i >= TASK_SIZE:
            time.sleep(0.2)
        return i

    results = ordered_map(slow, range(200), 2)
    assert next(results) == 0
    results.close()
    # the workers may begin a few items of the second and third task before they see the event
    assert len(list(tmp_path.iterdir())) < 2 * TASK_SIZE


def test_only_other_living_processes_count() -> None:
    assert is_other_process(os.getppid())
    assert not is_other_process(os.getpid()), "an earlier process may have had this number"
    assert not is_other_process(9**30)
