"""Names in CSV files that a spreadsheet would otherwise run as a formula."""

STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def escape_formula(name: str) -> str:
    """The name for a cell of a table: with an apostrophe in front if a spreadsheet would take it for a formula."""
    return f"'{name}" if name.lstrip("'").startswith(STARTS) else name


def unescape_formula(cell: str) -> str:
    """The name that :func:`escape_formula` wrote as `cell`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(STARTS) else cell
