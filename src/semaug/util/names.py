"""Names and other text of unknown origin, made safe for a terminal and for CSV files.

In HTML the templates escape every text (:mod:`semaug.report.html`).
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def printable(text: object) -> str:
    """Text for a terminal, on one line: characters that do not print, as in escape sequences, are written as codes."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def shown(text: str) -> str:
    """Text for a message: quoted, on one line, and at most 100 characters of it."""
    return repr(text if len(text) <= 100 else f"{text[:99]}…")


def listed(texts: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Texts for a message: the first ones, at most `most`, and the number of the others."""
    all_texts = list(texts)
    others = len(all_texts) - most
    return separator.join(all_texts[:most]) + (f" and {others} more" if others > 0 else "")


def some(names: Iterable[str]) -> str:
    """Names for a message: the first five, quoted, and the number of the others."""
    return listed(map(shown, names))


def counted(count: int, noun: str) -> str:
    """A number of things, such as "1 class", "2 classes" and "3 pairs of images"."""
    word, of, rest = noun.partition(" of ")
    return f"{count} {noun if count == 1 else f'{word}es{of}{rest}' if word.endswith('s') else f'{word}s{of}{rest}'}"


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, with that many digits after the point; 1 is 100 %."""
    return f"{100 * share:.{digits}f} %"


def class_title(name: str) -> str:
    """Write the name of a class as people do: with spaces, and without the three-digit numbers of CUB-200-2011.

    >>> class_title("001.Black_footed_Albatross")
    'Black footed Albatross'
    """
    return re.sub(r"^\d{3}\.(?=[^\W\d])", "", name.replace("_", " ").strip()) or name


def class_titles(names: Sequence[str]) -> tuple[str, ...]:
    """Write the names of all classes by :func:`class_title`; as they are if two would become the same."""
    titles = tuple(map(class_title, names))
    return titles if len(set(titles)) == len(titles) else tuple(names)


def folded(name: str) -> str:
    """A key that is equal for names that differ only in case, spaces, zeros around a number, or Unicode form.

    >>> folded("Blue_Jay ") == folded("blue jay"), folded("01") == folded("1.0")
    (True, True)
    """
    text = unicodedata.normalize("NFKC", name).casefold()
    text = "".join(c for c in text if c.isprintable() and c not in " _")
    number = re.fullmatch(r"0*(\d+?)(\.0*)?", text)
    return number[1] if number else text


def escape_formula(name: str) -> str:
    """The cell for a name in a CSV file: with an apostrophe in front if a spreadsheet would read it as a formula."""
    return f"'{name}" if name.lstrip("'").startswith(_STARTS) else name


def unescape_formula(cell: str) -> str:
    """The name that :func:`escape_formula` wrote as `cell`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_STARTS) else cell
