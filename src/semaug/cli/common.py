"""Shared parts of the commands: their base class, the choice of a device, and flags in messages."""

import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, get_type_hints

import tyro

from semaug.util.devices import choose_device as choose_device
from semaug.util.names import printable


class Command(ABC):
    """A command: a dataclass whose fields are its options."""

    resumable: ClassVar[bool] = False  # whether the same command resumes an interrupted one
    distributed: ClassVar[bool] = False  # whether it may run in several processes under torchrun
    ends_at_once: ClassVar[bool] = False  # whether a signal ends it without waiting for its threads

    @classmethod
    def expand(cls, options: list[str]) -> list[str]:
        """Add options that come from elsewhere, as from a file, to those of the command line."""
        return options

    @abstractmethod
    def run(self) -> None:
        """Run the command with its options."""


def say(message: str) -> None:
    """Print a message to standard error, so that results on standard output can be piped."""
    with suppress(OSError):  # nowhere to complain to
        print(printable(message), file=sys.stderr)


def show(result: object) -> None:
    """Print one line of a result to standard output; names in it cannot control the terminal."""
    print(printable(result))


def with_flags(text: str, command: object) -> str:
    """Write the settings that a message names as flags of the command: `` `batch_size` `` becomes ``--batch-size``.

    Other text in backticks is unchanged.
    """
    options = {name for name, _, _, positional in _options(command) if not positional}
    pattern = r"(?<!`)`([a-z][a-z0-9_]*)`(?!`)"
    return re.sub(pattern, lambda match: _flag(match[1]) if match[1] in options else match[0], text)


def command_line(name: str, options: object) -> str:
    """Write the shell command that gives the same options; those with their default value are left out."""
    words, flags = ["semaug", name], []
    for option, value, default, positional in _options(options):
        texts = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
        if positional:
            words += texts
        elif value != default:
            switch = isinstance(value, bool) and isinstance(default, bool)
            flags += [_flag(option if value else f"no_{option}")] if switch else [_flag(option), *texts]
    return shlex.join([*words, *flags])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options(command: object) -> Iterator[tuple[str, Any, Any, bool]]:
    """The options of a command, nested ones too: name, value, default, and whether it is positional."""
    hints = get_type_hints(type(command), include_extras=True)
    for option in fields(command) if is_dataclass(command) else ():
        value = getattr(command, option.name)
        if is_dataclass(value):
            yield from _options(value)
        else:
            marks = getattr(hints[option.name], "__metadata__", ())
            yield option.name, value, option.default, tyro.conf.Positional in marks
