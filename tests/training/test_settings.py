"""Every number has a range, which the checks, the help and the settings of a run directory share."""

import re
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

from semaug.cli.main import main
from semaug.cli.options import options
from semaug.cli.train import Train
from semaug.inference.runs import Settings
from semaug.training.methods import Augmentation
from semaug.training.recipes import RECIPES
from semaug.training.settings import TrainConfig
from semaug.util.errors import FileError
from semaug.util.ranges import ranges
from semaug.util.untrusted import read_json

WRONG = {
    "--clip-norm": ("-1", "0", "nan", "inf"),
    "--momentum": ("5", "-0.1", "nan"),
    "--patience": ("-1", "0"),
    "--label-smoothing": ("2", "-0.1"),
    "--weight-decay": ("-1", "inf", "1e308"),
    "--padding": ("-1", "8192"),
    "--seed": ("-1", "9223372036854775807", "12345678901234567890123", "9" * 400),
    "--workers": ("-1", "100000"),
    "--warmup-epochs": ("nan", "-1"),
    "--lr": ("0", "nan", "inf", "1e308"),
    "--epochs": ("0", "9" * 400),
    "--val-fraction": ("0", "1", "nan"),
    "--val-per-class": ("-1",),
    "--ema": ("1", "nan"),
    "--resize": ("0", "1000000"),
    "--strength": ("-1", "nan", "1e13"),
    "--meta-lr": ("-1", "nan"),
    "--fixed-trace": ("0", "inf"),
    "--depth": ("0", "1000000"),
    "--frozen-blocks": ("-1",),
    "--freeze": ("-1", "20000"),
    "--layer-decay": ("0", "1.1"),
    "--drop-path": ("1", "-0.1"),
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in WRONG.items() for value in values])
def test_a_number_out_of_its_range_is_one_sentence_that_names_the_range(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", flag, value, "--output", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(rf"semaug: {flag} must be (from|above|at least|at most) [^\n]*, not [^\n]*\n", message), message
    assert not (tmp_path / "run").exists()


def has_number(kind: object) -> bool:
    return kind in (int, float) or (get_origin(kind) is not dict and any(map(has_number, get_args(kind))))


@pytest.mark.parametrize("settings", [TrainConfig, Augmentation])
def test_every_number_has_a_range(settings: type) -> None:
    numbers = {name for name, kind in get_type_hints(settings).items() if has_number(kind)}
    assert len(numbers) > 5
    assert numbers == set(ranges(settings))


def test_the_help_names_the_ranges() -> None:
    hints = {option.name: help.help_behavior_hint for option, _, help in options(Train)}
    assert hints["clip_norm"] == "(default: no clipping; above 0)"
    assert hints["seed"] == "(default: 0; at least 0)"
    assert hints["depth"] == "(default: 1; from 1 to 100)"
    limited = {name for name, hint in hints.items() if re.search(r"; (at least|at most|above|from) [^;]*\)$", hint)}
    assert limited == ranges(TrainConfig).keys() | ranges(Augmentation).keys()


def test_the_help_shows_every_recipe_and_what_to_expect() -> None:
    [text] = [help.help for option, _, help in options(Train) if option.name == "recipe"]
    for recipe in RECIPES.values():
        assert f"{recipe.name}: {recipe.summary}." in text


def test_the_settings_of_a_run_directory_have_the_same_ranges(tmp_path: Path) -> None:
    shared = ranges(Settings).keys() & ranges(TrainConfig).keys()
    assert shared == {"epochs", "seed", "val_fraction", "val_per_class"}
    assert {name: ranges(Settings)[name] for name in shared} == {name: ranges(TrainConfig)[name] for name in shared}
    (tmp_path / "config.json").write_text('{"model": "a", "preprocessing": {"resize": 40, "crop": 32}, "epochs": 0}')
    with pytest.raises(FileError, match="epochs should be from 1 to 1000000$"):
        read_json(tmp_path / "config.json", Settings)
