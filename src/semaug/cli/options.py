"""Options of the commands as tyro reads and shows them: in groups, with defaults and ranges in plain words."""

import ast
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass, replace
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from semaug.util.ranges import MAIN, Group, range_in, ranges

Value = TypeVar("Value")
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.PositionalMetavarFromFieldName)
_DEFAULT = re.compile(r" ?Default: (.*?)\.(?= [A-Z]|$)")
_BOUNDLESS = re.compile(r"(?:from (\d+) to|(above \d+) and at most) (?:\d{7,}|1e\+\d+)")
_MANY = 10  # options in groups
_MOST_CHOICES = 60  # characters of choices beside an option; more are listed in its text


def parse(command: Any, prog: str, arguments: Sequence[str]) -> Any:
    """Read the options of a command, a dataclass: its fields are the options, the texts under them their help.

    tyro ends by SystemExit after the help, or after a message about a wrong option.
    """
    return ungrouped(tyro.cli(grouped(command), prog=prog, args=arguments, config=CONFIG))


@cache
def grouped(command: type) -> Any:
    """The options of a command as a dataclass for tyro: the main ones, and a nested dataclass for each other group."""
    groups: dict[str, list[tuple[str, Any, Any]]] = {name: [] for name in get_args(Group)}
    for option, kind, text in options(command):
        default = {} if option.default is MISSING else {"default": option.default}
        read: tuple[Any, ...] = ()
        if range_in(kind) is not None:
            read = (_number(kind),)
        elif Path in (kind, *get_args(kind)):
            read = (_path(kind),)
        member = option.name, Annotated[kind, text, *read], field(**default)
        groups[option.metadata.get("group", MAIN)].append(member)
    own = groups.pop(MAIN)
    for name, members in groups.items():
        if members:
            group = make_dataclass(name, members)
            own.append((f"{name}_group", Annotated[group, tyro.conf.arg(name=name)], field(default_factory=group)))
    text = inspect.getdoc(command) or ""
    if sum(map(len, groups.values())) > _MANY:
        text += "\n\nThe options that matter most come first, the others follow in groups."
    return make_dataclass(command.__name__, own, namespace={"__doc__": text, "command_type": command})


def ungrouped(parsed: Any) -> Any:
    """The command with the options that tyro has read into the dataclass of :func:`grouped`."""
    values: dict[str, Any] = {}
    for name, value in vars(parsed).items():
        values |= vars(value) if name.endswith("_group") else {name: value}
    values = {name: ungrouped(value) if hasattr(value, "command_type") else value for name, value in values.items()}
    return _build(parsed.command_type, values)


def _build(kind: type[Value], values: dict[str, Any]) -> Value:
    own: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for option in fields(cast(Any, kind)):
        if is_dataclass(hints[option.name]):
            hidden = option.metadata.get("hidden", ())
            shown = {name: value for name, value in values.items() if name not in hidden}
            own[option.name] = _build(hints[option.name], shown)
        elif option.name in values:
            own[option.name] = values[option.name]
    return kind(**own)


def options(kind: type, hidden: Collection[str] = ()) -> Iterator[tuple[Field[Any], Any, Any]]:
    """The options of a command, nested ones too: field, type, and the configuration of its help.

    The metadata of a nested dataclass may name fields in it that are hidden, and have their default.
    """
    texts, limits, hints = _texts(kind), ranges(kind), get_type_hints(kind, include_extras=True)
    for option in fields(cast(Any, kind)):
        if option.name in hidden:
            continue
        hint = hints[option.name]
        members = [member for member in get_args(hint) if is_dataclass(getattr(member, "__origin__", None))]
        if is_dataclass(hint):
            yield from options(cast(type, hint), (*hidden, *option.metadata.get("hidden", ())))
        elif members:  # subcommands
            yield option, reduce(or_, (Annotated[grouped(m.__origin__), *m.__metadata__] for m in members)), None
        else:
            limit = _BOUNDLESS.sub(_without_end, str(limits[option.name])) if option.name in limits else None
            described = option.metadata.get("help", texts[option.name])
            text = re.sub(r"`(\w+)`", lambda name: f"--{name[1].replace('_', '-')}", described)
            yield option, hint, _help(text, hint, option.default, limit)


def _without_end(range_: re.Match[str]) -> str:
    """A range whose upper end is no limit in practice."""
    return range_[2] or f"at least {range_[1]}"


def _help(text: str, hint: Any, default: object, limit: str | None) -> Any:
    described = _DEFAULT.search(text)
    if described is not None:
        shown = described[1]
        text = text.replace(described[0], "", 1).strip()
    elif default is MISSING:
        shown = None
    elif isinstance(default, bool):
        shown = "yes" if default else "no"
    elif isinstance(default, tuple):
        shown = " ".join(map(str, default)) or "none"
    else:
        shown = str(default)
    spec = _spec(hint)
    value = re.sub(r"^\{(\[.*\])\}$", r"\1", re.sub(r"\{None\}\||(?<=\{)None,", "", spec.metavar))
    if len(value) > _MOST_CHOICES:
        text += f" One of {value.strip('{}').replace(',', ', ')}."
        value = "NAME"
    behaviour = "required" if shown is None else f"default: {shown}"
    return tyro.conf.arg(
        help=text,
        metavar=None if value == spec.metavar else value,
        help_behavior_hint=f"({'; '.join(filter(None, (behaviour, limit)))})",
    )


def _spec(kind: Any) -> PrimitiveConstructorSpec[Any]:
    """How tyro reads an option of a type."""
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    assert not isinstance(spec, UnsupportedTypeAnnotationError), spec
    return spec


def _path(kind: Any) -> PrimitiveConstructorSpec[Any]:
    """How tyro reads an option that is a path. Python would take an empty one for the current folder."""
    spec = _spec(kind)

    def read(arguments: list[str]) -> Any:
        if "" in arguments:
            raise ValueError("the path is empty; for this folder, use .")
        return spec.instance_from_str(arguments)

    return replace(spec, instance_from_str=read)


def _number(kind: Any) -> PrimitiveConstructorSpec[Any]:
    """How tyro reads an option that is a number, with a plain message if it is none."""
    spec = _spec(kind)
    words = dict.fromkeys(word for word in re.findall(r"(?<=[{,])\w+", spec.metavar) if word != "None")
    expected = " or ".join([*words, "a whole number" if "INT" in spec.metavar else "a number"])

    def read(arguments: list[str]) -> Any:
        try:
            return spec.instance_from_str(arguments)
        except ValueError:
            raise ValueError(f"expected {expected}, not {' '.join(arguments)}") from None

    return replace(spec, instance_from_str=read)


def _texts(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass and of those that it extends."""
    texts: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if is_dataclass(parent):
            [definition] = ast.parse(inspect.getsource(parent)).body
            texts |= {
                declared.target.id: " ".join(str(text.value.value).split())
                for declared, text in pairwise(cast(ast.ClassDef, definition).body)
                if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            }
    return texts
