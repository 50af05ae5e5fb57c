"""HTML pages in a single file: templates, and a policy that lets a page run only its own styles and scripts."""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from semaug.report import canvas, charts
from semaug.report.reading import number
from semaug.util.progress import duration

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

# Colours of the charts, which style sheets replace in a dark scheme.
_THEME = {"card": "#ffffff", "ink": canvas.INK, "soft": canvas.SOFT, "rule": canvas.RULE, "grid": canvas.GRID}
_THEME |= {f"c{i}": colour for i, colour in enumerate(canvas.COLOURS)}


@cache
def environment(*packages: str) -> "Environment":
    """Make the environment of the templates of some packages; they may use those of the report. Texts are escaped."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "semaug.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(percent=charts.percent, duration=duration, number=number, name=_name)
    made.globals.update(swatch=_swatch, theme=_THEME)
    return made


def _name(text: Any) -> Markup:
    """The name of a class or file; a long one may break after an underscore or slash."""
    parts = re.split(r"(?<=[_/])(?=.)", str(text))
    return Markup("<wbr>").join(escape(part) for part in parts)


@cache
def _swatch(slot: int, line: bool = True) -> Markup:
    return chart(charts.swatch(slot % 192, line), "")  # after 192, colours, dashes and markers repeat


def chart(figure: "Figure", label: str) -> Markup:
    """Draw a chart as an ``<svg>`` element for a page; `label` is for screen readers."""
    return Markup(canvas.to_svg(figure, label))


def line_charts(drawn: Sequence[charts.LineChart], *, legend: bool = False) -> list[dict[str, Any]]:
    """Draw charts of curves for the macro ``charts``: title, caption and ``<svg>`` element of each."""
    return [
        {
            "title": one.title,
            "caption": f"{one.caption}{' (logarithmic)' if one.log_y else ''}.".replace("..", "."),
            "svg": chart(
                charts.lines([one], titles=False, legend=legend),
                f"{one.title} by {one.x_label}: {', '.join(series.label for series in one.series)}",
            ),
        }
        for one in drawn
    ]


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
    """Render a page that needs no other file.

    Args:
        made: The environment of templates.
        template: Name of the template, which extends base.html.
        styles: Names of style sheets.
        script: Name of the script, if there is one.
        fragments: HTML in the page that has its own styles and scripts.
        served: Whether a server sends the page, which may then ask it for data and images, and show images of the user.
        content: Variables of the template.
    """
    sheet = "".join(made.get_template(name).render() for name in styles)
    code = made.get_template(script).render() if script is not None else ""
    images = "data: 'self' blob:; connect-src 'self'" if served else "data:"
    allowed = [
        _digests([text, *re.findall(rf"<{tag}>(.*?)</{tag}>", fragments, re.DOTALL)])
        for tag, text in (("style", sheet), ("script", code))
    ]
    policy = f"default-src 'none'; img-src {images}; style-src {allowed[0]}; script-src {allowed[1]}"
    return made.get_template(template).render(policy=policy, style=Markup(sheet), script=Markup(code), **content)


def _digests(texts: Sequence[str]) -> str:
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in dict.fromkeys(texts) if text
    ]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def policy_of(page: str) -> str:
    """Look up the policy of a page of :func:`render_page`, which a server sends as a header."""
    stated = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert stated is not None
    return html.unescape(stated[1])
