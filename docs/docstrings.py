"""Adapts docstrings to Markdown for the reference: cross-references, examples, settings of dataclasses, their ranges.

A Griffe extension, named in `mkdocs.yml`. The sections (`Args:`, `Returns:`, `Raises:`) are parsed by Griffe itself.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from griffe import Attribute, Class, Docstring, ExprCall, Extension, Function, Object

from semaug.util.ranges import ranges

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")
_EXAMPLE_HEADING = re.compile(r"^Examples?:\n(?=((?: {4}.*|\s*\n)+))", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
_FORMULA = re.compile(r"^( {4,})``(.*)``(.?)$", re.MULTILINE)
_RETURNS = re.compile(r"^(Returns:\n    )(?=.*:)", re.MULTILINE)
_DOCTEST_DIRECTIVE = re.compile(r"\s*# doctest:.*")
_ENTRY = re.compile(r"^::: (\S+)", re.MULTILINE)
_DOCUMENTED = frozenset(_ENTRY.findall((Path(__file__).parent / "reference.md").read_text(encoding="utf-8")))


class Docstrings(Extension):
    """Rewrites every docstring, and lists the fields of a dataclass as its arguments."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)
            if (
                isinstance(obj, Function) and obj.returns is not None
            ):  # Griffe takes the words before a colon for a type
                obj.docstring.value = _RETURNS.sub(rf"\1{obj.returns}: ", obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Show the default of a field, not the function that declares it."""
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function) == "setting":
            attr.value = value.arguments[0]

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Add an `Args:` section made from the docstrings under the fields of a dataclass."""
        described = {
            name: field.docstring.value
            for name, field in cls.members.items()
            if field.is_attribute and field.docstring is not None
        }
        text = cls.docstring.value if cls.docstring is not None else ""
        if "dataclass" not in cls.labels or "Args:" in text or not described:
            return
        known = ranges(getattr(import_module(cls.module.path), cls.name)) if cls.path in _DOCUMENTED else {}
        limits = {name: f" Range: {allowed}." for name, allowed in known.items()}
        rows = [f"    {name}: {' '.join(value.split())}{limits.get(name, '')}" for name, value in described.items()]
        cls.docstring = Docstring("\n".join([text, "", "Args:", *rows]), parent=cls)


def _markdown(text: str) -> str:
    text = _EXAMPLE_HEADING.sub("", text)
    text = _FORMULA.sub(r"\1\2\3", _ROLE.sub(_reference, text))
    return _EXAMPLE.sub(_fenced, text)


def _reference(role: re.Match[str]) -> str:
    """A link if the reference has an entry for the name or for its class; the name as code otherwise."""
    name = role[1]
    short = name.rpartition("semaug.")[2]
    for entry in (name, f"semaug.{short}", f"semaug.{short.split('.')[0]}"):
        if entry in _DOCUMENTED:
            return f"[`{short}`][{entry}]"
    return f"`{name}`"


def _fenced(example: re.Match[str]) -> str:
    lines = [_DOCTEST_DIRECTIVE.sub("", line.removeprefix(example[1])) for line in example[0].splitlines()]
    return "\n".join(["```pycon", *lines, "```"])
