"""The predictions for many GPUs: what the documentation shows is what the script computes, and it computes sensibly."""

from pathlib import Path

import pytest

from scripts import scaling

ROOT = Path(__file__).parents[2]


def test_the_documented_tables_are_those_of_the_script() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    for table in scaling.tables():
        assert table in page, table


def test_an_all_reduce_takes_the_time_of_its_slowest_links() -> None:
    links = scaling.Links(start=0.0, hop=0.0)
    assert links.all_reduce(1e9, 1) == 0
    assert links.all_reduce(450e9, 8) == pytest.approx(2 * 7 / 8)
    # between two machines every GPU sends and receives an eighth over an adapter of its own
    assert links.all_reduce(8 * 50e9, 16) == pytest.approx(2 * 7 / 8 * 8 * 50 / 450 + 2 * 1 / 2)
    assert scaling.Links().all_reduce(0, 64) == pytest.approx(20e-6 + 2 * 3 * 10e-6)


def test_the_gpu_waits_for_every_bucket_of_every_sum() -> None:
    links = scaling.Links(start=0.0, hop=0.0)
    second = 450e9 / 1.75  # bytes that eight GPUs sum in one second
    size = scaling.Sizes((second, second), (3 * second,), (0,))
    waits = {m.name: scaling.waiting(m, size, links, 8) for m in scaling.methods()}
    statistics = 16 * scaling.DIMENSIONS / second
    assert waits["plain training"] == pytest.approx(2)
    assert waits["pipelined"] == pytest.approx(2 + 3 + statistics)
    assert waits["paper's order, interval 10"] == pytest.approx(2 + 2 * 3 / 10 + statistics)


def test_one_gpu_is_as_fast_as_measured_and_more_are_no_more_than_that() -> None:
    size = scaling.sizes(200)
    for method in scaling.methods():
        assert scaling.efficiency(method, size, scaling.Links(), 1) == pytest.approx(1)
        found = [scaling.efficiency(method, size, scaling.Links(), ranks) for ranks in (1, 8, 64, 512)]
        assert found == sorted(found, reverse=True)
