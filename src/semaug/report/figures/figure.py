"""A figure, its HTML fragments, the page around it, and its files."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.inference.pictures import data_uri
from semaug.report.charts import Panel, PhotoBlock, scatter, to_svg
from semaug.report.html import environment, render_page
from semaug.util.files import write_atomically


@dataclass(frozen=True)
class Figure:
    """A picture with what it shows and what was measured.

    Args:
        name: Name of its files.
        title: Heading.
        caption: What it shows, in sentences.
        numbers: What was measured, in plain types.
        png: The picture as PNG.
        svg: The picture as SVG; None for photos.
        html: The picture as a part of a page, with its own style and script.
    """

    name: str
    title: str
    caption: str
    numbers: dict[str, Any]
    png: bytes
    svg: str | None
    html: str


def class_title(name: str) -> str:
    """Write the name of a class as people write it.

    Args:
        name: Name of a class.

    Returns:
        The name without number and underscores.

    Example:
        >>> class_title("001.Black_footed_Albatross")
        'Black footed Albatross'
    """
    return re.sub(r"^\d+\.", "", name).replace("_", " ").strip() or name


def fragment(template: str, **content: Any) -> str:
    """Render the HTML of a figure with the style and the script that all figures share.

    Args:
        template: Name of the template.
        content: Variables of the template.

    Returns:
        HTML that loads nothing.
    """
    from markupsafe import Markup

    made = environment("semaug.report.figures")
    style, script = (made.get_template(file).render() for file in ("fragment.css", "fragment.js"))
    inside = Markup(made.get_template(template).render(**content))
    return made.get_template("fragment.html").render(style=Markup(style), script=Markup(script), inside=inside)


def photo_fragment(blocks: Sequence[PhotoBlock], good: str, bad: str) -> str:
    """Render a grid of photos.

    Args:
        blocks: The photos.
        good: Meaning of a blue frame.
        bad: Meaning of an orange frame.

    Returns:
        HTML.
    """
    made = environment("semaug.report.figures")
    made.filters["uri"] = lambda picture: data_uri(Image.fromarray(picture), quality=85)
    return fragment("photos.html", blocks=blocks, good=good, bad=bad)


def scatter_fragment(
    panels: Sequence[Panel], classes: Sequence[str], thumbnails: npt.NDArray[np.uint8], names: Sequence[str]
) -> str:
    """Render scatter plots whose points show their image when pointed at, focused or tapped.

    Args:
        panels: The plots.
        classes: Names of the classes.
        thumbnails: Small pictures, uint8 (N, side, side, 3).
        names: Name of each image.

    Returns:
        HTML.
    """
    from markupsafe import Markup

    # all thumbnails in one picture, of which the page shows a part
    count, side = thumbnails.shape[:2]
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    sheet = np.zeros((rows * columns, side, side, 3), dtype=np.uint8)
    sheet[:count] = thumbnails
    sheet = sheet.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    return fragment(
        "scatter.html",
        panels=[(panel, Markup(_interactive(panel, classes, names))) for panel in panels],
        classes=classes,
        augmented=any(any(panel.augmented) for panel in panels),
        sheet={"uri": data_uri(Image.fromarray(sheet), quality=78), "columns": columns, "rows": rows},
    )


def _interactive(panel: Panel, classes: Sequence[str], names: Sequence[str]) -> str:
    """The SVG of a scatter plot with the data that the script shows of each point."""
    svg = to_svg(scatter([panel], classes, titles=False), "")
    root = ElementTree.fromstring(svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1))
    root.attrib |= {"class": "cloud", "role": "group"}
    root.set("aria-label", f"{panel.title}: {len(panel.places)} features; use the arrow keys to go from point to point")
    tabindex = "0"
    for kind in (1, 0):
        for c, name in enumerate(classes):
            group = root.find(f".//g[@id='points-0-{c}-{kind}']")
            own = np.flatnonzero((np.asarray(panel.labels) == c) & (np.asarray(panel.augmented) == kind))
            if group is None or not len(own):
                continue
            for shape in group.findall("defs/path"):  # so that each point can have a style
                shape.attrib = {"id": shape.attrib["id"], "d": shape.attrib["d"]}
            marks = [mark for mark in group.iter() if mark.tag == "use" or (mark.tag == "path" and not mark.get("id"))]
            for mark, i in zip(marks, own.tolist(), strict=True):
                hint = names[panel.images[i]] + (", augmented" if kind else "")
                mark.attrib |= {"class": "point", "role": "img", "tabindex": tabindex, "aria-label": f"{name}, {hint}"}
                mark.attrib |= {
                    "data-class": str(c),
                    "data-image": str(panel.images[i]),
                    "data-name": name,
                    "data-hint": hint,
                }
                tabindex = "-1"
    return ElementTree.tostring(root, encoding="unicode")


def page(figures: Sequence[Figure], title: str | None = None) -> str:
    """Render a page of figures that needs no other file.

    Args:
        figures: The figures.
        title: Heading; that of the first figure by default.

    Returns:
        The page as HTML.
    """
    from markupsafe import Markup

    return render_page(
        environment("semaug.report.figures"),
        "figure_page.html",
        fragments="".join(figure.html for figure in figures),
        title=title or figures[0].title,
        parts=[(figure, Markup(figure.html)) for figure in figures],
    )


def write(figure: Figure, folder: Path) -> list[Path]:
    """Write a figure as NAME.png, NAME.html and, unless it consists of photos, NAME.svg.

    Args:
        figure: The figure.
        folder: The folder; it is made if it does not exist.

    Returns:
        The files.

    Raises:
        FileError: If a file cannot be written.
    """
    contents = {".png": figure.png, ".html": page([figure]).encode(errors="replace")}
    if figure.svg is not None:
        contents[".svg"] = figure.svg.encode()
    for suffix, content in contents.items():
        write_atomically(folder / f"{figure.name}{suffix}", content)
    return [folder / f"{figure.name}{suffix}" for suffix in contents]
