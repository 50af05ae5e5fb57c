"""Pages that need nothing else: their templates, and a policy by which a page may use its own styles and scripts."""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from semaug.report import charts
from semaug.report.reading import number
from semaug.util.progress import duration

if TYPE_CHECKING:
    from jinja2 import Environment

COLOURS = 6  # that the style sheet defines; further series use them again, with thin lines and other marks


@cache
def environment(*packages: str) -> "Environment":
    """The templates of these packages, and the report's own, which theirs may extend and import."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "semaug.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(percent=charts.percent, duration=duration, number=number, name=_name)
    made.globals.update(
        colour=lambda place: f"c{place % COLOURS}",
        again=lambda place: place >= COLOURS,
        shape=lambda place: charts.SHAPES[place % len(charts.SHAPES)],
    )
    return made


def _name(text: Any) -> Any:
    """The name of a class or file as HTML; long words, as such names are, may break after an underscore or slash."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[_/])(?=.)", str(text))
    return Markup("<wbr>").join(escape(part) for part in parts)


def render_page(
    made: "Environment",
    template: str,
    *,
    styles: Sequence[str] = ("style.css",),
    script: str | None = None,
    fragments: str = "",
    served: bool = False,
    **content: Any,
) -> str:
    """A page with these style sheets and this script; `fragments` is HTML in it that brings styles and scripts too.

    One that is `served` may ask its own server for data and images, and show images that the user gives it.
    """
    from markupsafe import Markup

    style = "".join(made.get_template(name).render() for name in styles)
    code = made.get_template(script).render() if script is not None else ""
    return made.get_template(template).render(
        policy=_policy(
            [style, *re.findall(r"<style>(.*?)</style>", fragments, re.DOTALL)],
            [*([code] if code else []), *re.findall(r"<script>(.*?)</script>", fragments, re.DOTALL)],
            served,
        ),
        style=Markup(style),
        script=Markup(code),
        **content,
    )


def _policy(styles: Sequence[str], scripts: Sequence[str], served: bool) -> str:
    """These styles and scripts and nothing else: whatever a class is called, it stays text."""
    images = "data: 'self' blob:; connect-src 'self'" if served else "data:"
    return f"default-src 'none'; img-src {images}; style-src {_digests(styles)}; script-src {_digests(scripts)}"


def policy_of(page: str) -> str:
    """The policy that a page states, for the header with which a server sends it."""
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert found is not None
    return html.unescape(found[1])


def _digests(texts: Sequence[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in dict.fromkeys(texts))
    return " ".join(f"'sha256-{digest}'" for digest in found) or "'none'"
