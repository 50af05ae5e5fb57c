"""A figure, the page around it, and the files that it is written to."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semaug.runs import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment


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


@cache
def environment() -> "Environment":
    """The templates of the figures, and those of the report, whose charts and style they share."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    from semaug.report import charts
    from semaug.report.page import COLOURS

    loader = ChoiceLoader([PackageLoader("semaug.figures"), PackageLoader("semaug.report")])
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters.update(percent=charts.percent, words=words)
    made.globals.update(colour=lambda place: f"c{place % COLOURS}", again=lambda place: place >= COLOURS)
    return made


def words(name: str) -> str:
    """The name of a class as people write it: CUB's "001.Black_footed_Albatross" is "Black footed Albatross"."""
    return re.sub(r"^\d+\.", "", name).replace("_", " ").strip() or name


def fragment(template: str, **content: Any) -> str:
    """The HTML of a figure: the template's content with the style and the script that all figures share."""
    from markupsafe import Markup

    made = environment()
    style, script = (made.get_template(file).render() for file in ("fragment.css", "fragment.js"))
    inside = Markup(made.get_template(template).render(**content))
    return made.get_template("fragment.html").render(style=Markup(style), script=Markup(script), inside=inside)


def page(figures: Sequence[Figure], title: str | None = None) -> str:
    """A page of figures that needs nothing else; it may run their scripts alone and load nothing."""
    from markupsafe import Markup

    made = environment()
    style = made.get_template("style.css").render()
    inside = "".join(figure.html for figure in figures)
    styles = [style, *re.findall(r"<style>(.*?)</style>", inside, re.DOTALL)]
    scripts = re.findall(r"<script>(.*?)</script>", inside, re.DOTALL)
    policy = (
        "default-src 'none'; img-src data:; "
        f"style-src {' '.join(dict.fromkeys(map(_digest, styles)))}; "
        f"script-src {' '.join(dict.fromkeys(map(_digest, scripts)))}"
    )
    parts = [(figure, Markup(figure.html)) for figure in figures]
    return made.get_template("figure_page.html").render(
        policy=policy, style=Markup(style), title=title or figures[0].title, parts=parts
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
