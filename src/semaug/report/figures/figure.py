"""A figure, the page around it, and the files that it is written to."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semaug.report.html import environment, render_page
from semaug.util.files import write_atomically


@dataclass(frozen=True)
class Figure:
    """A picture with what is to be said about it.

    `html` is a fragment for a page: it brings its own style and script, loads nothing, and holds neither title nor
    caption, which are here as plain text. :func:`page` makes a page of one or several figures.
    """

    name: str  # of the files
    title: str
    caption: str
    numbers: dict[str, Any]  # what was measured, in plain types
    png: bytes
    svg: str | None  # None where the picture is made of photos
    html: str


def words(name: str) -> str:
    """The name of a class as people write it: CUB's "001.Black_footed_Albatross" is "Black footed Albatross"."""
    return re.sub(r"^\d+\.", "", name).replace("_", " ").strip() or name


def fragment(template: str, **content: Any) -> str:
    """The HTML of a figure: the template's content with the style and the script that all figures share."""
    from markupsafe import Markup

    made = environment("semaug.report.figures")
    style, script = (made.get_template(file).render() for file in ("fragment.css", "fragment.js"))
    inside = Markup(made.get_template(template).render(**content))
    return made.get_template("fragment.html").render(style=Markup(style), script=Markup(script), inside=inside)


def page(figures: Sequence[Figure], title: str | None = None) -> str:
    """A page of figures that needs nothing else; it may run their scripts alone and load nothing."""
    from markupsafe import Markup

    return render_page(
        environment("semaug.report.figures"),
        "figure_page.html",
        fragments="".join(figure.html for figure in figures),
        title=title or figures[0].title,
        parts=[(figure, Markup(figure.html)) for figure in figures],
    )


def write(figure: Figure, folder: Path) -> list[Path]:
    """Write NAME.png, NAME.svg (where the picture is vector) and NAME.html; returns the files."""
    contents = {".png": figure.png, ".html": page([figure]).encode()}
    if figure.svg is not None:
        contents[".svg"] = figure.svg.encode()
    files = []
    for suffix, content in contents.items():
        files.append(folder / f"{figure.name}{suffix}")
        write_atomically(files[-1], content)
    return files
