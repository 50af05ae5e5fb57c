"""MkDocs hook that converts formulas to MathML, so that pages need no script, and keeps figures on one line."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Convert every formula of a page, and keep "71.8 ± 0.7" and "32 %" on one line."""
    return re.sub(r"(?<=\d) (?=[±%])|(?<=±) (?=\d)", "\N{NO-BREAK SPACE}", _FORMULA.sub(_mathml, content))


def _mathml(match: re.Match[str]) -> str:
    element, bracket, formula = match.groups()
    display = "block" if bracket == "[" else "inline"
    return f'<{element} class="formula">{convert(html.unescape(formula), display=display)}</{element}>'
