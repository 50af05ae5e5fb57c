"""Damaged and invented input for readers, which must return a value or refuse it in one sentence.

The tests try a fixed number of examples; `make fuzz` (FUZZ=N) tries N times as many and prints how many there were.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from semaug.util.errors import SemaugError

FACTOR = int(os.environ.get("FUZZ", "1"))


def examples(count: int) -> settings:
    """Settings of a test that tries so many examples, or FUZZ times as many."""
    ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count * FACTOR, deadline=None, suppress_health_check=ignored)


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
                parent[last] = None if value is _REMOVED else value
        except (KeyError, IndexError, TypeError):  # an earlier change has removed it
            continue
    return json.dumps(whole[""]).encode()
