"""Settings of a training run from a file: YAML, or the config.json of an earlier run."""

import difflib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from semaug.data.readers import KNOWN, data_root
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.util.errors import SettingError
from semaug.util.names import shown
from semaug.util.untrusted import read_bytes

MAX_BYTES = 100_000
MAX_TEXT = 4096  # of a setting, as of a path


_BOOLEANS = yaml.SafeLoader.bool_values  # by their words in lower case: yes, no, true, false, on, off


class _Null(str):
    """A null of YAML as it is written in the file: nothing, ~ or null."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML without two values for one name, tags, and aliases, which could repeat a few bytes exponentially often.

    Values stay text, as on the command line: YAML would read 010 as 8, 1:30 as 90, and the folders 1.10 and yes as 1.1
    and true. What it calls null is a :class:`_Null`.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise SettingError(f"line {event.start_mark.line + 1} has an alias (*), and settings must be plain values")
        if event.tag is not None:  # PyYAML raises errors of many kinds for text that does not fit its tag
            raise SettingError(f"line {event.start_mark.line + 1} has a tag (!), and settings must be plain values")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> str:
        """The text of a value; JSON writes a character such as an emoji as two, which PyYAML leaves apart."""
        try:
            return str(super().construct_scalar(node)).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise SettingError(f"line {node.start_mark.line + 1} has half a character (a lone surrogate)") from None

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = Counter(str(key.value) for key, _ in node.value)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise SettingError(f"the setting {shown(twice)} has two values")
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:null", lambda _, node: _Null(node.value))


def read_flags(path: Path) -> list[str]:
    """Read the settings in a YAML or JSON file as flags of `semaug train`.

    The config.json of a run also has facts about that run, which are left out, as is its output directory. Its relative
    paths begin where that run was started.
    """
    try:
        text = read_bytes(path, MAX_BYTES)
        if text.lstrip().startswith(b"{"):  # JSON is YAML too, if it is not indented by tabs
            text = re.sub(rb"(?m)^\t+", b"", text)
        content = yaml.load(text, _Loader)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}): {getattr(error, 'problem', None)}"
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
    kinds: dict[str, Any] = get_type_hints(TrainConfig) | get_type_hints(Augmentation)
    del kinds["augmentation"]
    if "format" in settings:  # the config.json of a run
        base = settings.get("base")
        if base is None and "run" not in settings:
            raise SettingError(f"{path} belongs to an exported folder and lacks most settings; use that of the run")
        settings = {name: value for name, value in settings.items() if name in kinds and name != "output"}
        if isinstance(base, str):
            settings |= _paths(settings, path.parent / base)
    return [_flag(path, str(name), value, kinds) for name, value in settings.items()]


def _paths(settings: dict[str, Any], base: Path) -> dict[str, str]:
    """Paths of an earlier run that began where it was started, if they exist there and that is not here."""
    if not os.path.exists(base) or os.path.samefile(base, os.curdir):
        return {}
    start = os.path.realpath(base)
    names = ("data", "data_root", "weights")
    values = {name: settings.get(name) for name in names}
    paths = {name: value for name, value in values.items() if isinstance(value, str) and not isinstance(value, _Null)}
    if paths.get("data") == "birds" or paths.get("data") in KNOWN:  # a name, not a path
        del paths["data"]
        paths.setdefault("data_root", str(data_root(None)))
    there = {name: str(Path(start, value)) for name, value in paths.items()}
    return {name: place for name, place in there.items() if os.path.exists(place)}


def _flag(path: Path, name: str, value: Any, kinds: dict[str, Any]) -> str:
    if name.replace("-", "_") not in kinds:
        similar = difflib.get_close_matches(name, kinds, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise SettingError(f"{path} has an unknown setting {shown(name)}{hint}")
    if not isinstance(value, str):
        raise SettingError(f"{path}: the setting {name} has several values")
    kind, flag = kinds[name.replace("-", "_")], name.replace("_", "-")
    if isinstance(value, _Null) and type(None) in get_args(kind):
        value = "None"
    elif kind is bool or bool in get_args(kind):
        if value.lower() not in _BOOLEANS:
            raise SettingError(f"{path}: the setting {name} must be true or false")
        is_on = _BOOLEANS[value.lower()]
        if kind is bool:
            return f"--{flag}" if is_on else f"--no-{flag}"
        value = str(is_on)
    if "\0" in value:
        raise SettingError(f"{path}: the setting {name} has a null character")
    if len(value) > MAX_TEXT:
        raise SettingError(f"{path}: the setting {name} has more than {MAX_TEXT} characters")
    return f"--{flag}={value}"
