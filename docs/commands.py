"""MkDocs hook that writes the reference of the command line from the commands themselves."""

import html
import inspect
import re
from typing import Any, get_args

import tyro

from semaug.cli.main import COMMANDS, find_command
from semaug.cli.options import options
from semaug.util.ranges import MAIN, Group


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark on the page by all commands."""
    if "<!-- commands -->" not in markdown:
        return markdown
    return markdown.replace("<!-- commands -->", "\n".join(_describe(name, find_command(name)) for name in COMMANDS))


def _describe(name: str, command: Any, level: int = 2) -> str:
    parts = [f"{'#' * level} semaug {name}", _text(inspect.getdoc(command) or "")]
    rows: dict[str, list[str]] = {group: [] for group in ("arguments", *get_args(Group))}
    for option, kind, text in options(command):
        if text is None:
            for member in get_args(kind):  # subcommands
                title = f"{name} {member.__metadata__[0].name}"
                parts.append(_describe(title, member.__origin__.command_type, level + 1))
        elif tyro.conf.Positional in getattr(kind, "__metadata__", ()):
            rows["arguments"].append(f"| `{option.name.upper()}` | {_text(text.help)} | |")
        else:
            flag = f"--{option.name.replace('_', '-')}"
            default = text.help_behavior_hint.strip("()").removeprefix("default: ")
            rows[option.metadata.get("group", MAIN)].append(f"| `{flag}` | {_text(text.help)} | {_text(default)} |")
    for group, lines in rows.items():
        if lines:
            title = {"arguments": "arguments", MAIN: "options"}.get(group, f"{group} options")
            parts.append("\n".join([f"| {title} | | default |", "|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    return re.sub(r"([*_|`\[\]])", r"\\\1", html.escape(text, quote=False))
