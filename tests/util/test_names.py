"""Names in tables that a spreadsheet would run as formulas."""

from hypothesis import given
from hypothesis import strategies as st

from semaug.util.names import escape_formula, unescape_formula


@given(st.one_of(st.text(max_size=8), st.text("'=+-@\t\r\n ab", max_size=8)))
def test_a_name_in_a_table_starts_no_formula_and_is_read_back(name: str) -> None:
    cell = escape_formula(name)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert unescape_formula(cell) == name
    assert cell in (name, f"'{name}")
