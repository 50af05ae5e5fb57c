"""Docstrings as Markdown, for the reference: roles such as :meth: lose their name, examples become code."""

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
_DISPLAYED = re.compile(r"^( {4,})``(.*)``$", re.MULTILINE)
_DIRECTIVE = re.compile(r"\s*# doctest:.*")


class Docstrings(Extension):
    """Rewrites the docstring of everything that has one."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _DISPLAYED.sub(r"\1\2", _ROLE.sub(r"`\1`", obj.docstring.value))
            obj.docstring.value = _EXAMPLE.sub(_fenced, text)


def _fenced(found: re.Match[str]) -> str:
    indent = found[1]  # that of an indented section, which the fence must not end
    code = "\n".join(_DIRECTIVE.sub("", line) for line in found.group().splitlines())
    return f"{indent}```pycon\n{code}\n{indent}```"
