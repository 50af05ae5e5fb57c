"""Images looked at in several processes."""

import os
import time
from pathlib import Path

import pytest

from semaug.util.errors import SemaugError
from semaug.util.processes import each, is_running


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(each(lambda i: i * i, 50, workers)) == [i * i for i in range(50)]
    assert list(each(lambda i: i, 0, workers)) == []


def test_a_process_that_is_ended_is_told_in_one_sentence() -> None:
    with pytest.raises(SemaugError, match=r"^a process that reads images was ended, .*; try --workers 1$"):
        list(each(os._exit, 3, 1))


def test_who_stops_asking_does_not_wait_for_what_was_given_out(tmp_path: Path) -> None:
    def slow(i: int) -> int:
        (tmp_path / str(i)).touch()
        if i >= 16:
            time.sleep(0.2)
        return i

    results = each(slow, 200, 2)
    assert next(results) == 0
    results.close()
    # of the second chunk and those that wait behind it, some may be begun before the workers are told
    assert len(list(tmp_path.iterdir())) < 32


def test_only_others_that_live_are_running() -> None:
    assert is_running(os.getppid())
    assert not is_running(os.getpid()), "its number was that of an earlier one"
    assert not is_running(9**30)
