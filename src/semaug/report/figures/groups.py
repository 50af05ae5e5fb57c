"""Groups of look-alike classes: by name, by a table, or by what a classifier confuses."""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from semaug.util.errors import SemaugError
from semaug.util.files import read_json
from semaug.util.spreadsheets import unescape_formula

Counts = Counter[tuple[int, int]]  # of pairs of classes, the first one first
SMALLEST = 4  # classes with the same last word that make a group worth showing
MOST = 8  # classes that colours and shapes tell apart


def name_groups(classes: Sequence[str]) -> dict[str, list[int]]:
    """Classes by the last word of their names, in lower case: CUB's meta-classes ("…_Flycatcher")."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(classes):
        found = re.findall(r"[^\W\d_]+", name)
        groups.setdefault(found[-1].lower() if found else name, []).append(i)
    return groups


def table_groups(file: Path, classes: Sequence[str]) -> dict[str, list[int]]:
    """Groups from a CSV file with the columns ``class`` and ``group``; classes that it does not name have none."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in ("class", "group") if column not in (reader.fieldnames or [])]
            if missing:
                raise SemaugError(f"{file} has no column {' and no column '.join(missing)}; it needs class and group")
            rows = [(row["class"] or "", unescape_formula(row["group"] or "")) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SemaugError(f"cannot read {file}: {error}") from error
    index = {name: i for i, name in enumerate(classes)}
    rows = [(name if name in index else unescape_formula(name), group) for name, group in rows]
    unknown = [name for name, _ in rows if name not in index]
    if unknown:
        raise SemaugError(f"{file} names {len(unknown)} classes that the run does not know, such as {unknown[0]!r}")
    groups: dict[str, list[int]] = {}
    for name, group in rows:
        groups.setdefault(group, []).append(index[name])
    return groups


def confusion_counts(runs: Sequence[Path]) -> Counts:
    """How many images of two classes were taken for the other one, summed over the runs' evaluations."""
    counts: Counts = Counter()
    for run in runs:
        if (run / "evaluation.json").is_file():
            for true, predicted, count in read_json(run / "evaluation.json").get("confusion", []):
                if true != predicted:
                    counts[_pair(true, predicted)] += count
    return counts


def _pair(first: int, second: int) -> tuple[int, int]:
    return min(first, second), max(first, second)


def _within(counts: Counts, among: Sequence[int]) -> Counts:
    """The counts of pairs of which both are among these."""
    members = set(among)
    return Counter({pair: count for pair, count in counts.items() if members.issuperset(pair)})


def most_confused(counts: Counts, among: Sequence[int], size: int) -> list[int]:
    """Up to `size` of the classes `among` that are confused with each other most, in their own order.

    It starts with the most confused pair and adds the class that is confused most with those chosen; where nothing is
    confused, the first classes.
    """
    left = sorted(among)
    chosen: list[int] = []
    if len(left) >= 2 and size >= 2:
        pairs = _within(counts, left) or Counter([(left[0], left[1])])
        chosen = list(min((-count, pair) for pair, count in pairs.items())[1])
        left = [c for c in left if c not in chosen]
    while left and len(chosen) < size:
        best = max(left, key=lambda c: (sum(counts[_pair(c, other)] for other in chosen), -c))
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


def choose_group(
    runs: Sequence[Path],
    classes: Sequence[str],
    *,
    group: str | None = None,
    groups: Path | None = None,
    max_classes: int = 8,
) -> tuple[str, list[int], str]:
    """A group of look-alike classes: its name, the classes, and how it was chosen, in words.

    `groups` is a table (:func:`table_groups`); without it, groups are the classes with the same last word. `group`
    names one; else it is the one with the most classes, of equals the most confused. Where no four names end alike,
    the group is the classes that the runs confused most with each other. Of a large group, the `max_classes` most
    confused are taken.
    """
    if not 2 <= max_classes <= MOST:
        raise SemaugError(f"a figure can tell 2 to {MOST} classes apart, not {max_classes}")
    counts = confusion_counts(runs)
    found = name_groups(classes) if groups is None else table_groups(groups, classes)
    found = {name: members for name, members in found.items() if len(members) >= 2}
    how = "whose names end alike" if groups is None else f"of the same group in {groups.name}"
    if group is not None:
        by_name = {name.lower(): members for name, members in found.items()}
        if group.lower() not in by_name:
            known = ", ".join(sorted(found)[:8]) + (" …" if len(found) > 8 else "")
            raise SemaugError(f"there is no group {group!r} of two or more classes; there are {known or 'none'}")
        name, members = group, by_name[group.lower()]
    else:
        worth = found if groups is not None else {k: v for k, v in found.items() if len(v) >= SMALLEST}
        if not worth:
            if groups is not None:
                raise SemaugError(f"{groups} has no group of two or more classes")
            size = min(max_classes, 6)
            return "most confused", most_confused(counts, range(len(classes)), size), "most confused with each other"
        largest = max(map(len, worth.values()))
        worth = {name: members for name, members in worth.items() if len(members) == largest}
        name, members = max(worth.items(), key=lambda item: (_within(counts, item[1]).total(), item[0]))
    if len(members) > max_classes:
        how += f" ({max_classes} of {len(members)}, the most confused)"
        members = most_confused(counts, members, max_classes)
    return name, sorted(members), how
