"""Settings of a training run from a file: YAML, or the config.json of an earlier run."""

import difflib
import os
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from semaug.data.readers import KNOWN, data_root
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.util.errors import SettingError
from semaug.util.names import shown
from semaug.util.untrusted import read_bytes

MAX_BYTES = 100_000
MAX_TEXT = 4096  # of a setting, as of a path


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML without two values for one name, tags, and aliases, which could repeat a few bytes exponentially often.

    Numbers stay text, as on the command line: YAML would read 010 as 8, 1:30 as 90, and the folder 1.10 as 1.1.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise SettingError(f"line {event.start_mark.line + 1} repeats another one by an alias (*)")
        if event.tag is not None:  # PyYAML raises errors of many kinds for text that does not fit its tag
            raise SettingError(f"line {event.start_mark.line + 1} has a tag (!), which settings do not need")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = Counter(str(key.value) for key, _ in node.value)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise SettingError(f"the setting {shown(twice)} has two values")
        return super().construct_mapping(node, deep)


def read_flags(path: Path) -> list[str]:
    """Read the settings in a YAML or JSON file as flags of `semaug train`.

    The config.json of a run also has facts about that run, which are left out, as is its output directory. Its relative
    paths begin where that run was started.
    """
    try:
        content = yaml.load(read_bytes(path, MAX_BYTES), _Loader)  # JSON is YAML too
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1})"
        raise SettingError(f"{path} is neither YAML nor JSON{place}") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path} does not hold settings, one `name: value` per line")
    augmentation = content.pop("augmentation", {})
    if not isinstance(augmentation, dict):
        raise SettingError(f"{path}: augmentation does not hold settings")
    names = Counter(str(name).replace("-", "_") for name in (*content, *augmentation))
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise SettingError(f"{path}: the setting {shown(twice)} has two values")
    settings = content | augmentation
    defaults = {option.name: option.default for kind in (TrainConfig, Augmentation) for option in fields(kind)}
    del defaults["augmentation"]
    if "format" in settings:  # the config.json of a run
        base = settings.get("base")
        settings = {name: value for name, value in settings.items() if name in defaults and name != "output"}
        if isinstance(base, str):
            settings |= _paths(settings, path.parent / base)
    return [_flag(path, str(name), value, defaults) for name, value in settings.items()]


def _paths(settings: dict[str, Any], base: Path) -> dict[str, str]:
    """Paths of an earlier run that began where it was started, if they exist there and that is not here."""
    if not os.path.exists(base) or os.path.samefile(base, os.curdir):
        return {}
    start = os.path.realpath(base)
    names = ("data", "data_root", "weights")
    paths = {name: settings[name] for name in names if isinstance(settings.get(name), str)}
    if paths.get("data") == "birds" or paths.get("data") in KNOWN:  # a name, not a path
        del paths["data"]
        paths.setdefault("data_root", str(data_root(None)))
    there = {name: str(Path(start, value)) for name, value in paths.items()}
    return {name: place for name, place in there.items() if os.path.exists(place)}


def _flag(path: Path, name: str, value: Any, defaults: dict[str, Any]) -> str:
    if name.replace("-", "_") not in defaults:
        similar = difflib.get_close_matches(name, defaults, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise SettingError(f"{path} has an unknown setting {shown(name)}{hint}")
    if isinstance(value, dict | list):
        raise SettingError(f"{path}: the setting {name} has several values")
    flag = name.replace("_", "-")
    if isinstance(defaults[name.replace("-", "_")], bool):
        if not isinstance(value, bool):
            raise SettingError(f"{path}: the setting {name} must be true or false")
        return f"--{flag}" if value else f"--no-{flag}"
    if "\0" in (text := str(value)):
        raise SettingError(f"{path}: the setting {name} has a null character")
    if len(text) > MAX_TEXT:
        raise SettingError(f"{path}: the setting {name} has more than {MAX_TEXT} characters")
    return f"--{flag}={text}"
