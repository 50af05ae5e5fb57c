"""Groups of look-alike classes: by name, by a table, or by the confusions of a classifier."""

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from semaug.data.samples import Samples
from semaug.report.reading import confusion_entries
from semaug.util.errors import DataError, SettingError
from semaug.util.names import class_title, unescape_formula
from semaug.util.untrusted import MAX_JSON_BYTES, read_bytes, read_json

Counts = Counter[tuple[int, int]]
"""Number of images of two classes that were classified as the other one; the smaller class is first."""

_SMALLEST = 4  # classes with the same last word that are worth showing
_LARGEST = 32  # classes of a panel that readers can tell apart, with effort


class Group(NamedTuple):
    """A group of look-alike classes."""

    name: str
    classes: list[int]
    how: str  # how it was chosen, in words that follow "classes"


def _name_groups(classes: Sequence[str]) -> dict[str, list[int]]:
    """Classes by the last word of their names in lower case, as in CUB-200-2011 ("…_Flycatcher")."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(classes):
        words = re.findall(r"[^\W\d_]+", name)
        groups.setdefault(words[-1].lower() if words else name, []).append(i)
    return groups


def table_groups(file: Path, classes: Sequence[str]) -> dict[str, list[int]]:
    """Read groups from a CSV file with the columns ``class`` and ``group``: classes by group.

    Raises:
        DataError: If the file cannot be read, lacks a column or names an unknown class.
    """
    try:
        text = read_bytes(file, MAX_JSON_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = [column for column in ("class", "group") if column not in (reader.fieldnames or [])]
        if missing:
            raise DataError(f"{file} has no column {' and no column '.join(missing)}; it needs class and group")
        rows = [(row["class"] or "", unescape_formula(row["group"] or "")) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    index = {name: i for i, name in enumerate(classes)}
    groups: dict[str, list[int]] = {}
    for written, group in rows:
        names = (written, unescape_formula(written), class_title(written))
        name = next((name for name in names if name in index), written)
        if name not in index:
            raise DataError(f"{file} names the class {name!r}, which the run does not have")
        groups.setdefault(group, []).append(index[name])
    return groups


def confusion_counts(runs: Sequence[Path], classes: int) -> Counts:
    """Count the images that runs classified as another class; runs without evaluation are left out."""
    counts: Counts = Counter()
    for run in runs:
        evaluation = read_json(run / "evaluation.json") if (run / "evaluation.json").is_file() else {}
        for true, predicted, count in confusion_entries(evaluation, classes):
            if true != predicted:
                counts[min(true, predicted), max(true, predicted)] += count
    return counts


def _within(counts: Counts, members: Sequence[int]) -> Counts:
    """The counts of pairs whose classes are both members."""
    known = set(members)
    return Counter({pair: count for pair, count in counts.items() if known.issuperset(pair)})


def _most_confused(counts: Counts, members: Sequence[int], size: int) -> list[int]:
    """The most confused pair, and one after the other the class that is confused most with those chosen; in order."""
    left = sorted(members)
    chosen: list[int] = []
    if len(left) >= 2 and size >= 2:
        pairs = _within(counts, left) or Counter([(left[0], left[1])])
        chosen = list(min((-count, pair) for pair, count in pairs.items())[1])
        left = [c for c in left if c not in chosen]
    while left and len(chosen) < size:
        best = max(left, key=lambda c: (sum(counts[min(c, other), max(c, other)] for other in chosen), -c))
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


def choose_groups(
    runs: Sequence[Path],
    classes: Sequence[str],
    *,
    groups: Path | None = None,
    more_than: int = 5,
    samples: Samples | None = None,
) -> list[Group]:
    """Choose all groups of more than `more_than` classes, the largest first; if there is none, :func:`choose_group`.

    Args:
        runs: Run directories, whose evaluations show which classes are confused.
        classes: Names of the classes.
        groups: A table for :func:`table_groups`; by default the classes whose names end alike are a group.
        more_than: Groups of more classes than this are chosen, at least 1.
        samples: Images; classes without images are left out.

    Raises:
        SettingError: If `more_than` is less than 1.
        DataError: If the table is malformed, or there is no group with images.
    """
    if more_than < 1:
        raise SettingError(f"`more_than` must be at least 1, not {more_than}")
    shown = range(len(classes)) if samples is None else {*samples.labels}
    known = _name_groups(classes) if groups is None else table_groups(groups, classes)
    sizes = {name: sum(label in shown for label in members) for name, members in known.items()}
    large = sorted((name for name in sizes if sizes[name] > more_than), key=lambda name: (-sizes[name], name))
    if not large:
        return [choose_group(runs, classes, groups=groups, samples=samples)]
    return [choose_group(runs, classes, group=name, groups=groups, samples=samples) for name in large]


def choose_group(
    runs: Sequence[Path],
    classes: Sequence[str],
    *,
    group: str | None = None,
    groups: Path | None = None,
    max_classes: int = _LARGEST,
    samples: Samples | None = None,
) -> Group:
    """Choose a group of look-alike classes.

    Groups are read from a table, or are the classes whose names end alike. Without a name, it is the largest group; of
    equals, the most confused one. Where fewer than four names end alike, it is the most confused classes.

    Args:
        runs: Run directories, whose evaluations show which classes are confused.
        classes: Names of the classes.
        group: Name of the group.
        groups: A table for :func:`table_groups`.
        max_classes: Most classes, 2 to 32; of a larger group the most confused are taken.
        samples: Images; classes without images are left out of the result.

    Raises:
        SettingError: If there is no such group.
        DataError: If the table is malformed, or fewer than two classes have images.
    """
    if not 2 <= max_classes <= _LARGEST:
        raise SettingError(f"a figure can show 2 to {_LARGEST} classes, not {max_classes}")
    counts = confusion_counts(runs, len(classes))
    known = _name_groups(classes) if groups is None else table_groups(groups, classes)
    known = {name: members for name, members in known.items() if len(members) >= 2}
    how = "whose names end alike" if groups is None else f"of the same group in {groups.name}"
    large = {name: own for name, own in known.items() if groups is not None or len(own) >= _SMALLEST}
    if group is not None:
        names = {name.lower(): name for name in known}
        if group.lower() not in names:
            some = ", ".join(sorted(known)[:8]) + (" …" if len(known) > 8 else "")
            raise SettingError(f"there is no group {group!r} of two or more classes; there are {some or 'none'}")
        name, members = group, known[group if group in known else names[group.lower()]]
    elif large:
        name = max(large, key=lambda name: (len(large[name]), _within(counts, large[name]).total(), name))
        members = large[name]
    elif groups is not None:
        raise DataError(f"{groups} has no group of two or more classes")
    else:
        name, how = "most confused", "most confused with each other"
        members = _most_confused(counts, range(len(classes)), min(max_classes, 6))
    if len(members) > max_classes:
        how += f" ({max_classes} of {len(members)}, the most confused)"
        members = _most_confused(counts, members, max_classes)
    present = [label for label in members if samples is None or label in samples.labels]
    if len(present) < 2:
        raise DataError(f"only {len(present)} of the {len(members)} classes of the group have images here")
    return Group(name, sorted(present), how)
