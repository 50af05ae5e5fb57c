"""Forty families of timm in the meta loop; docs/networks.md has the table of results."""

import pytest

from families import FAMILIES, committed, row


def lines() -> dict[str, str]:
    rows = [line for line in committed().splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows}


def test_the_table_has_a_line_for_each_family() -> None:
    assert list(lines()) == list(FAMILIES)
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_works_as_the_table_says(family: str) -> None:
    """If a new version of timm changes a result, run `python tests/families.py`."""
    assert str(row(family)) == lines()[family]
