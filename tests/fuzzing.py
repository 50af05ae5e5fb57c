"""Damaged and invented input for readers, which must return a value or refuse it in one sentence.

The tests try a fixed number of examples; `make fuzz` tries FUZZ times as many and prints how many there were.
"""

import copy
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from semaug.util.errors import SemaugError

FACTOR = int(os.environ.get("FUZZ", "1"))


_tried = Counter[str]()  # examples by test


def examples(count: int) -> Callable[[Any], Any]:
    """Let a test try so many examples, or FUZZ times as many, and count them. `make fuzz` runs all these tests."""
    ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

    def decorate(test: Any) -> Any:
        inner = test.hypothesis.inner_test

        @functools.wraps(inner)
        def counted(*arguments: Any, **options: Any) -> None:
            _tried[os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")] += 1
            inner(*arguments, **options)

        test.hypothesis.inner_test = counted
        fuzzed = settings(max_examples=count * FACTOR, deadline=None, suppress_health_check=ignored)(test)
        return pytest.mark.fuzz(fuzzed)

    return decorate


# Hooks of pytest, which conftest.py imports for `make fuzz`.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Pass the number of examples on to the process that prints the summary."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("examples", _tried[item.nodeid]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table: examples and findings of each target."""
    tried, findings = Counter[str](), Counter[str]()
    for outcome_, reports in terminalreporter.stats.items():
        for report in reports if outcome_ in ("passed", "failed", "error") else ():
            target = report.nodeid.partition("[")[0].removeprefix("tests/")
            tried[target] += dict(report.user_properties).get("examples", 0)
            findings[target] += outcome_ != "passed"
    terminalreporter.section("examples and findings")
    for target, count in sorted(tried.items()):
        terminalreporter.line(f"{count:8} {findings[target]:4}  {target}")
    terminalreporter.line(f"{tried.total():8} {findings.total():4}  {len(tried)} targets")


def outcome(reader: Callable[[Any], Any], argument: object) -> tuple[Any, str]:
    """What a reader returns, or the sentence with which it refuses; any other exception fails the test."""
    try:
        return reader(argument), ""
    except SemaugError as error:
        sentence = str(error)
    assert sentence.isprintable(), "it could control a terminal, or has two lines"
    assert 0 < len(sentence) < 10_000
    return None, sentence


def mutated(contents: bytes, near: int | None = None) -> st.SearchStrategy[bytes]:
    """The content cut off, or with pieces replaced, most of them near its beginning, where they matter."""
    last = len(contents)
    places = st.one_of(st.integers(0, min(near or last, last)), st.integers(0, last))
    pieces = st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\x80"]))
    cuts = st.lists(st.tuples(places, st.integers(0, 8), pieces), min_size=1, max_size=4)

    def spliced(cuts: list[tuple[int, int, bytes]]) -> bytes:
        content = contents
        for place, length, piece in cuts:
            content = content[:place] + piece + content[place + length :]
        return content

    return st.one_of(cuts.map(spliced), cuts.map(spliced), places.map(lambda place: contents[:place]))


ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 10**6, 2**63, -(10**30), 0.5, -1.5, 1e308, float("nan"), float("inf"), "", "a",
    "birds", "\0", "\x1b[31m", "\ud800", "../..", "/", "x" * 5000, [], {}, [[]], [1, "a"], {"a": 1}, ["a", "a"],
    [None] * 3,
]  # fmt: skip
"""Values of other types and sizes, half characters, and names that control a terminal."""
_REMOVED = object()


def odd_json(content: Any) -> st.SearchStrategy[bytes]:
    """JSON with up to three values, at any depth, replaced by odd ones or removed; or damaged as text."""
    change = st.tuples(
        st.sampled_from(list(_places(content))), st.one_of(st.sampled_from(ODD_VALUES), st.just(_REMOVED))
    )
    changed = st.lists(change, min_size=1, max_size=3).map(lambda changes: _changed(content, changes))
    return st.one_of(changed, changed, changed, mutated(json.dumps(content).encode()))


def _places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield from _places(content[key], (*above, key))


def _changed(content: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> bytes:
    whole = {"": copy.deepcopy(content)}
    for place, value in changes:
        parent: Any = whole
        *path, last = ("", *place)
        try:
            for key in path:
                parent = parent[key]
            if value is _REMOVED and place:
                del parent[last]
            else:
                parent[last] = None if value is _REMOVED else copy.deepcopy(value)  # the next change may alter it
        except (KeyError, IndexError, TypeError):  # an earlier change has removed it
            continue
    return json.dumps(whole[""]).encode()
