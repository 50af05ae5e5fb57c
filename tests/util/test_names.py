"""Names in tables that a spreadsheet would run as formulas."""

from hypothesis import given
from hypothesis import strategies as st

from semaug.util.names import class_title, class_titles, escape_formula, unescape_formula


@given(st.one_of(st.text(max_size=8), st.text("'=+-@\t\r\n ab", max_size=8)))
def test_a_name_in_a_table_starts_no_formula_and_is_read_back(name: str) -> None:
    cell = escape_formula(name)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert unescape_formula(cell) == name
    assert cell in (name, f"'{name}")


def test_class_names_are_written_as_people_write_them() -> None:
    assert class_title("009.Brewer_Blackbird") == class_title("Brewer Blackbird") == "Brewer Blackbird"
    for name in ("12.", "1.5 turbo", "737-200", "_", "001.002.x", "3.Series", "n01440764"):
        assert class_title(class_title(name)) == class_title(name) == name
    assert class_titles(("b_c", "a")) == ("b c", "a")
    assert class_titles(("001.Crow", "002.Crow")) == ("001.Crow", "002.Crow")
