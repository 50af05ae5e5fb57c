"""Groups of look-alike classes, by name, by table and by confusion."""

import json
from collections import Counter
from pathlib import Path

import pytest

from semaug.report.figures.groups import _most_confused, _name_groups, choose_group, choose_groups, table_groups
from semaug.util.errors import SemaugError
from semaug.util.names import class_titles

CUB = ("001.Least_Flycatcher", "002.Fish_Crow", "003.Great_Crested_Flycatcher", "004.American_Crow", "005.Ovenbird")


def test_groups_are_the_last_words_of_names() -> None:
    assert _name_groups(CUB) == {"flycatcher": [0, 2], "crow": [1, 3], "ovenbird": [4]}
    assert _name_groups(["737-200", "A320"]) == {"737-200": [0], "a": [1]}


def test_a_table_makes_groups(tmp_path: Path) -> None:
    file = tmp_path / "groups.csv"
    file.write_text("group,class\ndark,002.Fish_Crow\nsmall,005.Ovenbird\ndark,004.American_Crow\n")
    assert table_groups(file, CUB) == table_groups(file, class_titles(CUB)) == {"dark": [1, 3], "small": [4]}
    name, members, how = choose_group([], CUB, groups=file)
    assert (name, members) == ("dark", [1, 3])
    assert "groups.csv" in how


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("species,group\na,b\n", "no column class"),
        ("species,family\na,b\n", "no column class and no column group"),
        ("", "no column"),
        ("class,group\nDodo,dark\n", "'Dodo'"),
        ("class,group\n002.Fish_Crow,dark\n", "no group of two"),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "groups.csv"
    file.write_text(content)
    with pytest.raises(SemaugError, match=message):
        choose_group([], CUB, groups=file)


def test_a_table_that_is_not_there_or_not_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="there is no file"):
        table_groups(tmp_path / "none.csv", CUB)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(SemaugError, match="cannot read"):
        table_groups(tmp_path / "bytes.csv", CUB)


def test_a_group_can_be_named() -> None:
    assert choose_group([], CUB, group="Crow")[1] == [1, 3]
    with pytest.raises(SemaugError, match="crow, flycatcher"):
        choose_group([], CUB, group="ovenbird")
    with pytest.raises(SemaugError, match="2 to 32"):
        choose_group([], CUB, max_classes=33)


def test_all_groups_of_more_than_some_classes_are_chosen() -> None:
    names = [f"{i}_{word}" for i, word in enumerate(("Wren",) * 6 + ("Gull",) * 8 + ("Tern",) * 5 + ("Ovenbird",))]
    assert [(group.name, len(group.classes)) for group in choose_groups([], names)] == [("gull", 8), ("wren", 6)]
    assert [group.name for group in choose_groups([], names, more_than=4)] == ["gull", "wren", "tern"]
    assert [group.name for group in choose_groups([], names, more_than=8)] == ["gull"], "the largest instead"
    with pytest.raises(SemaugError, match="at least 1"):
        choose_groups([], names, more_than=0)


def test_groups_that_differ_in_case_alone_are_two(tmp_path: Path) -> None:
    file = tmp_path / "groups.csv"
    file.write_text("class,group\n" + "".join(f"{name},{group}\n" for name, group in zip(CUB, "aAaAb", strict=True)))
    assert [group.classes for group in choose_groups([], CUB, groups=file, more_than=1)] == [[1, 3], [0, 2]]


def test_without_names_that_end_alike_the_most_confused_classes_are_a_group(tmp_path: Path) -> None:
    entries = [[0, 0, 5], [4, 2, 7], [2, 4, 1], [1, 2, 3], [3, 0, 2]]
    (tmp_path / "evaluation.json").write_text(json.dumps({"confusion": entries}))
    name, members, _ = choose_group([tmp_path], CUB, max_classes=3)
    assert (name, members) == ("most confused", [1, 2, 4])


def test_most_confused_starts_with_the_worst_pair() -> None:
    counts = Counter({(1, 3): 5, (0, 1): 1, (0, 2): 2})
    assert _most_confused(counts, range(4), 2) == [1, 3]
    assert _most_confused(counts, range(4), 3) == [0, 1, 3]
    assert _most_confused(Counter(), range(4), 3) == [0, 1, 2]
    assert _most_confused(counts, [2], 3) == [2]


def test_ten_thousand_classes_need_no_square_table(tmp_path: Path) -> None:
    entries = [[true, (true * 7 + 1) % 10_000, 1] for true in range(10_000)] + [[5000, 20, 2]]
    (tmp_path / "evaluation.json").write_text(json.dumps({"confusion": entries}))
    members = choose_group([tmp_path], [f"{i}" for i in range(10_000)], max_classes=2)[1]
    assert members == [20, 5000]


@pytest.mark.parametrize("content", [[], {"confusion": 3}, {"confusion": [[0, 9, 1], [-1, 0, 1], "x", [0, 1, 1.5]]}])
def test_a_damaged_evaluation_counts_nothing(tmp_path: Path, content: object) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    assert choose_group([tmp_path], CUB, max_classes=2).classes == [0, 1]
