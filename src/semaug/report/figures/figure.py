"""A figure, the page around it, and its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from semaug.report.html import environment, render_page
from semaug.util.files import refuse_edited, write_page, write_picture


@dataclass(frozen=True)
class Figure:
    """A picture with its caption and its measurements."""

    name: str  # of its files
    title: str
    caption: str  # what it shows, in sentences
    numbers: dict[str, Any]  # what was measured, in plain types
    png: bytes
    svg: str | None  # None for photos
    html: str  # a part of a page, with its own style and script


def fragment(template: str, **content: Any) -> str:
    """Render a template as a part of a page, with the style and the script that all figures share."""
    made = environment("semaug.report.figures")
    style, script = (made.get_template(file).render() for file in ("fragment.css", "fragment.js"))
    inside = Markup(made.get_template(template).render(**content))
    return made.get_template("fragment.html").render(style=Markup(style), script=Markup(script), inside=inside)


def page(figures: Sequence[Figure], title: str | None = None) -> str:
    """Render a page of figures that needs no other file; its heading is that of the first figure by default."""
    return render_page(
        environment("semaug.report.figures"),
        "figure_page.html",
        fragments="".join(figure.html for figure in figures),
        title=title or figures[0].title,
        parts=[(figure, Markup(figure.html)) for figure in figures],
    )


def write(figure: Figure, folder: Path) -> list[Path]:
    """Write a figure as NAME.html, NAME.png and, unless it consists of photos, NAME.svg; returns the files.

    Raises:
        FileError: If a file cannot be written, or one of the same name was edited or is not that of a figure.
    """
    suffixes = (".html", ".png") if figure.svg is None else (".html", ".png", ".svg")
    html, png, *svg = files = [folder / f"{figure.name}{suffix}" for suffix in suffixes]
    refuse_edited(*files)
    write_page(html, page([figure]))
    write_picture(png, figure.png)
    for file in svg:
        write_page(file, figure.svg or "")
    return files
