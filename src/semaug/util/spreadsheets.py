"""Escaping of names in CSV files that a spreadsheet would run as formulas."""

_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def escape_formula(name: str) -> str:
    """The cell for a name: with an apostrophe in front if a spreadsheet would read it as a formula."""
    return f"'{name}" if name.lstrip("'").startswith(_STARTS) else name


def unescape_formula(cell: str) -> str:
    """The name that :func:`escape_formula` wrote as `cell`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_STARTS) else cell
