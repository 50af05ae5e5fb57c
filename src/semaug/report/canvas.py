"""Shared parts of all charts: colours and markers of series, axes in inches, and figures as SVG or PNG."""

import io
import itertools
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which differ for all readers, darkened for a white page.
COLOURS = ("#0072b2", "#d55e00", "#00805f", "#9a4c95", "#8a6d00", "#4d5560", "#3aa0dc", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (6, 2, 1, 2)), (0, (1.5, 1.5)), (0, (9, 2)))
INK, SOFT, RULE, GRID = "#1c1e21", "#5a6069", "#d9dce1", "#e8eaed"
CHARACTER = 0.078  # width of a character in inches, as an estimate

# The methods that are compared most have the same colour on every page.
_METHOD_SLOTS = {
    "isda": 0, "learnable": 1, "constant": 2, "joint": 3, "p2p": 4, "basic": 5, "p2p+isda": 6, "p2p+learnable": 7,
}  # fmt: skip
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none", "svg.hashsalt": "semaug", "font.size": 8.5, "text.color": INK,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.edgecolor": RULE, "axes.labelcolor": SOFT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID,
    "xtick.color": RULE, "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT, "ytick.left": False,
    "lines.linewidth": 1.8, "legend.frameon": False, "legend.fontsize": 9, "legend.labelcolor": INK,
}  # fmt: skip
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ROOT = {
    "xmlns": "http://www.w3.org/2000/svg", "stroke-linejoin": "round",
    "font-family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
}  # fmt: skip


def clean(text: str) -> str:
    """Replace characters that XML does not allow, such as control characters in hostile names."""
    return _NO_XML.sub("\ufffd", text)


def slots(methods: Sequence[str]) -> list[int]:
    """Number series so that each method keeps its colour and no two series look alike.

    >>> slots(["basic", "isda", "isda"])
    [5, 0, 1]
    """
    taken: list[int | None] = []
    for method in methods:
        slot = _METHOD_SLOTS.get(method)
        taken.append(None if slot in taken else slot)
    free = (slot for slot in itertools.count() if slot not in taken)
    return [next(free) if slot is None else slot for slot in taken]


@contextmanager
def style() -> Iterator[None]:
    """Use the settings of matplotlib that all charts share; a decorator of functions that draw."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def panels(
    count: int, columns: int, size: tuple[float, float], margins: tuple[float, float, float, float], below: float = 0
) -> tuple["Figure", list["Axes"]]:
    """Make a figure with axes side by side.

    Args:
        count: Number of axes.
        columns: Most axes in a row.
        size: Width and height of the axes in inches.
        margins: Margins left, right, above and below each.
        below: Space at the bottom of the figure.
    """
    from matplotlib.figure import Figure

    columns = min(columns, count)
    left, right, top, bottom = margins
    cell = left + size[0] + right, top + size[1] + bottom
    width, height = columns * cell[0], -(-count // columns) * cell[1] + below
    figure = Figure(figsize=(width, height), facecolor="white")
    corners = [(i % columns * cell[0] + left, height - i // columns * cell[1] - top - size[1]) for i in range(count)]
    return figure, [figure.add_axes((x / width, y / height, size[0] / width, size[1] / height)) for x, y in corners]


def marker(slot: int) -> str:
    """Choose the marker of a series; colour and marker together differ for 64 series."""
    return MARKERS[(slot + slot // len(COLOURS)) % len(MARKERS)]


def legend_columns(labels: Sequence[str], columns: int, width: float) -> int:
    """Count the columns of a legend that fit into a width in inches, at most `columns`."""
    widest = CHARACTER * max(map(len, labels)) + 0.6
    return max(1, min(columns, int(width / widest)))


def add_legend(
    figure: "Figure", handles: Sequence[Any], columns: int, at: tuple[float, float, float] | None = None
) -> None:
    """Add a legend of artists with labels, in as many columns as fit.

    Args:
        figure: The figure.
        handles: The artists.
        columns: Most columns.
        at: Centre from the left, top from the bottom, and width, in inches; below everything else by default.
    """
    middle, top, width = at or (figure.get_figwidth() / 2, 0.3, figure.get_figwidth())
    fitting = legend_columns([str(handle.get_label()) for handle in handles], columns, width)
    place: dict[str, Any] = {
        "loc": "upper center",
        "bbox_to_anchor": (middle / figure.get_figwidth(), top / figure.get_figheight()),
        "columnspacing": 1.6,
    }
    length = 2.6 if handles[0].get_linestyle() not in ("None", "") else 1.0
    figure.legend(handles=handles, ncols=fitting, handlelength=length, **place)


def to_png(figure: "Figure") -> bytes:
    """Draw a figure as PNG, cut out to what was drawn; the same bytes on every call."""
    file = io.BytesIO()
    with style(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None}, bbox_inches="tight", pad_inches=0.15)
    # one warning for all characters that the font lacks instead of one for each
    missing = [re.match(r"Glyph (\d+) .* missing from font", str(warning.message)) for warning in caught]
    characters = "".join(dict.fromkeys(chr(int(match[1])) for match in missing if match))
    if characters:
        text = f"semaug: PNG files show boxes for {characters}, which the font lacks; HTML and SVG files do not"
        warnings.warn(text, stacklevel=2)
    return file.getvalue()


def to_svg(figure: "Figure", label: str) -> str:
    """Draw a figure as SVG, for an HTML page or a file; `label` is for screen readers.

    Text stays text. Style attributes, which the policy of our pages forbids, become presentation attributes, so that a
    style sheet can replace the colours in a dark scheme. The result is the same on every call.
    """
    file = io.StringIO()
    with style(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # browsers have a font for every character
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata, bbox_inches="tight", pad_inches=0.05)
    root = ElementTree.fromstring(clean(file.getvalue()))
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', file.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if element.tag == "defs":
            element[:] = [child for child in element if not child.tag.endswith("style")]
        attributes, element.attrib = element.attrib, {}
        for name, value in attributes.items():
            if name == "style":
                element.attrib.update(_presentation(value))
            elif name == "id" and value not in used and not value.startswith("points"):
                continue  # other charts of the page have the same
            elif not value.startswith("rotate(-0 "):
                element.set(name.rpartition("}")[2], _rounded(value) if name in ("d", "x", "y") else value)
    root.attrib = {**_ROOT, "role": "img", "aria-label": clean(label), **root.attrib}
    return ElementTree.tostring(root, encoding="unicode")


def _presentation(text: str) -> dict[str, str]:
    """A style attribute as presentation attributes."""
    pairs = {name.strip(): value.strip() for name, _, value in (part.partition(":") for part in text.split(";"))}
    font = re.match(r"(?:.*?\b(bold|\d{3}) )?([\d.]+)px", pairs.pop("font", ""))  # some versions of matplotlib
    if font:
        pairs |= {"font-size": f"{font[2]}px", "font-weight": font[1] or "normal"}
    return {name: value for name, value in pairs.items() if value and name != "font-family"}


def _rounded(numbers: str) -> str:
    shorter = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), numbers)
    return " ".join(shorter.split())
