"""Any number as an option of any command, and anything in a file of settings: accepted, or refused in one sentence."""

import io
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import tyro
from hypothesis import assume, given
from hypothesis import strategies as st

from fuzzing import examples, mutated, odd_json
from semaug.cli import data as data_commands
from semaug.cli.main import COMMANDS, main
from semaug.cli.options import options
from semaug.training.settings import TrainConfig
from semaug.util.ranges import range_in

KINDS: dict[str, Any] = {
    name: getattr(import_module(f"semaug.cli.{name}"), name.title()) for name in COMMANDS if name != "data"
} | {f"data {kind.lower()}": getattr(data_commands, kind) for kind in ("Check", "Split", "Shards", "Destruction")}
OPTIONS = {name: list(options(kind)) for name, kind in KINDS.items()}
WORDS = {"figures": ["tsne"], "data split": ["x", "--output=x.csv"], "soup": ["x", "x", "--output=x"]}
"""Values of positional options, where "x" is none."""


def numbers(kind: Any) -> set[type]:
    """The types of numbers in the type of an option."""
    if kind in (int, float):
        return {kind}
    return set().union(*map(numbers, get_args(kind))) if get_origin(kind) is not dict else set()


NUMBERS = [(name, option.name) for name, some in OPTIONS.items() for option, kind, _ in some if numbers(kind)]


def run(arguments: list[str]) -> str:
    """Run a command; returns its message if it refuses."""
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        code = main(arguments)
    assert code in (0, 2), errors.getvalue()
    return errors.getvalue() if code else ""


def test_every_number_has_a_range() -> None:
    assert len(NUMBERS) > 80
    kinds = {(name, option.name): kind for name, some in OPTIONS.items() for option, kind, _ in some}
    assert [place for place in NUMBERS if range_in(kinds[place]) is None] == []


@examples(120)
@given(place=st.sampled_from(NUMBERS), data=st.data())
def test_numbers_of_all_commands(place: tuple[str, str], data: st.DataObject) -> None:
    name, number = place
    [kind] = [kind for option, kind, _ in OPTIONS[name] if option.name == number]
    floats = st.floats() if float in numbers(kind) else st.nothing()
    value, allowed = data.draw(floats | st.integers() | st.integers(-2, 2)), range_in(kind)
    assert allowed is not None
    assume(value not in allowed)  # a command with other values would run
    required = [kind for _, kind, _ in OPTIONS[name] if tyro.conf.Positional in getattr(kind, "__metadata__", ())]
    words = WORDS.get(name, ["x"] * len(required))
    flag = f"--{number.replace('_', '-')}"
    message = run([*name.split(), *words, f"{flag}={value}"])
    assert message.startswith(f"semaug: {flag} must be {allowed}, not ")
    assert message.count("\n") == 1


SETTINGS = TrainConfig().resolve().to_json()
YAML = b"""
method: isda
epochs: 3
lr: 1e-3
cache: null
augmentation: {strength: auto, meta_lr: 0.1}
seed: 1
"""


@examples(60)
@given(data=st.data())
def test_files_of_settings(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(data.draw(mutated(YAML) | odd_json(SETTINGS) | odd_json({**SETTINGS, "format": 1})))
    message = run(["train", "--config", str(file), "--print-config"])
    assert all(line.isprintable() for line in message.splitlines())
    assert "Traceback" not in message


MERGE_BOMB = "a: &a {epochs: 1}\n" + "".join(
    f"{after}: &{after} {{<<: [{', '.join([f'*{before}'] * 8)}]}}\n"
    for before, after in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
BOMB = "a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 8)}]\n"
    for before, after in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


ACCEPTED = ("seed: 1:2:3", "epochs: 1_0", "data: ''")


@pytest.mark.parametrize(
    "content",
    [
        BOMB, BOMB + "epochs: *l", MERGE_BOMB, "[" * 5000, "a: " * 5000, "{a: " * 3000, "epochs: &x [*x]", "? [a]\n: b",
        "? {a: b}\n: c", "!!python/object/apply:os.system ['touch owned']", "epochs: !!python/name:os.system",
        "epochs: !!binary aGk=", "epochs: 2001-01-01", "epochs: 1" + "0" * 4000, "epochs: 0x" + "f" * 5000,
        "epochs: .nan", "seed: 1:2:3", "<<: *x", "epochs: 1\nepochs: 2", 'method: "\\e[2J"', '"\\ud800": 1',
        'output: "a\\0b"', "1: 2", "null: 1", "augmentation: 3", "augmentation: [1]", "print_config: true", "config: x",
        "--- 1\n--- 2", "", "~", "epochs: 1_0", "download: yes please", "epochs: ''", "data: ''",
        "epochs: !!timestamp x", "epochs: !!int ''", "epochs: !!float ''", "epochs: !!bool x", "!x epochs: 1",
        "lr: " + "1:" * 300 + "1.5", "".join(f"{i}:\n" for i in range(16_000)),
    ],
)  # fmt: skip
def test_odd_settings_are_one_sentence(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text(content)
    message = run(["train", "--config", "settings.yaml", "--print-config"])
    assert "\x1b" not in message
    assert len(message) < 3000
    assert message or content in ACCEPTED
    assert not Path("owned").exists()
