"""`semaug compare`: from the words of the command line to the settings of the library."""

import re
import shlex
from pathlib import Path

import pytest

from photos import photo_folder
from semaug.cli.compare import Compare
from semaug.cli.main import main
from semaug.studies.grid import CompareConfig
from semaug.util.errors import SemaugError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=2, train=6, test=2, size=32)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--method magic", "unknown method 'magic'; the methods are basic, "),
        ("--method", "--method needs at least one value"),
        ("--seeds", "--seeds needs at least one value"),
        ("--model", "--model needs at least one value"),
        ("--strength", "--strength needs at least one value"),
        ("--method basic isda basic", "--method lists basic twice"),
        ("--method isda 'isda --strength auto'", "two of the methods have the same settings: "),
        ("--seeds 1 1", "--seeds lists 1 twice"),
        ("--model small small", "--model lists small twice"),
        ("--strength 5 5.0", "--strength lists 5.0 twice"),
        ("--strength -1", "--strength must be from 0 to 1e+12, not -1"),
        ("--method basic mixup --strength 5", "--strength is for methods that augment features"),
        ("--jobs 0", "--jobs must be from 1 to 256, not 0"),
        (
            "--weights resnet18=weights.pth",
            "--weights has a value for resnet18, which is not among the networks: small",
        ),
        ("--weights small=nowhere.pth", "--weights: there is no file or run nowhere.pth"),
        ("--model small resnet18 --weights weights.pth", "with several networks, each needs its own --weights"),
        ("--frozen-blocks few", "--frozen-blocks takes N or MODEL=N with a whole number N, stem or auto, not 'few'"),
        ("--frozen-blocks resnet18=2", "--frozen-blocks has a value for resnet18"),
        ("--frozen-blocks small=1 small=2", "--frozen-blocks has two values for small"),
        ("--frozen-blocks 1 2", "--frozen-blocks has two values for every network"),
        ("--epochs 0", "--epochs must be from 1 to 1000000"),
        ("--data nowhere", "nowhere"),
        ("--val-per-class 0", "leaves no images to validate on: --val-per-class is 0"),
        ("--method basic 'isda --fixed-trace 0.5'", "isda does not use --fixed-trace"),
        ("--method 'isda --seed 3'", "--seed cannot differ between methods (isda --seed 3)"),
        ("--method 'isda --data=x'", "--data cannot differ between methods"),
        ("--method 'learnable --fixed-tracks 3'", "'--fixed-tracks 3' are not options of semaug train"),
        ("--method 'learnable --fixed-trace much'", "'--fixed-trace much' are not options of semaug train"),
        ('--method "isda \'x"', "no closing quotation"),
        ("--method ''", "unknown method ''"),
    ],
)
def test_mistakes_give_one_sentence_before_anything_is_trained(
    photos: Path, tmp_path: Path, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = ["--data", str(photos), "--output", str(output)]
    options += [] if "--model" in arguments else ["--model", "small"]
    assert main(["compare", *options, *shlex.split(arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not output.exists()


def test_a_method_may_have_options_of_its_own() -> None:
    methods = (
        "basic --label-smoothing 0.1",
        "learnable --fixed_trace=0.5 --no-compile --meta-lr 1e-4",
        "isda --strength 7",
        "isda",
    )
    config = Compare(method=methods, model=("small",), strength=(5.0, 20.0)).config()
    config.check()
    assert [dict(candidate.settings) for candidate in config.method] == [
        {"label_smoothing": 0.1},
        {"fixed_trace": 0.5, "compile": False, "meta_lr": 1e-4},
        {"strength": 7.0},
        {},
    ]
    assert [arm.title for arm in config.arms()] == [
        "basic --label-smoothing 0.1",
        "learnable --fixed_trace=0.5 --no-compile --meta-lr 1e-4 (λ0 5)",
        "learnable --fixed_trace=0.5 --no-compile --meta-lr 1e-4 (λ0 20)",
        "isda --strength 7 (λ0 7)",
        "isda (λ0 5)",
        "isda (λ0 20)",
    ]


def test_values_for_one_network_come_before_those_for_all(tmp_path: Path) -> None:
    file = tmp_path / "a=b.pth"
    file.write_bytes(b"")
    options = Compare(
        model=("small", "resnet18"),
        method=("learnable",),
        frozen_blocks=("2", "resnet18=stem"),
        weights=(f"small={file}",),
    )
    config = options.config()
    config.check()
    small, resnet = (config.settings(arm, 0) for arm in config.arms())
    assert (small.augmentation.frozen_blocks, resnet.augmentation.frozen_blocks) == (2, "stem")
    assert (small.weights, resnet.weights) == (file, None)


def test_the_command_in_the_report_repeats_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "compare --method basic 'isda --ema 0.9' --model small --strength 5.0 --seeds 4 5 --frozen-blocks small=2"
    words += " --epochs 3 --compile --pretrained False --cache None --order pipelined --data 'my photos'"
    seen: list[CompareConfig] = []

    def stop(config: CompareConfig) -> None:
        seen.append(config)
        raise SemaugError("enough")

    monkeypatch.setattr("semaug.studies.compare.compare", stop)
    assert main(shlex.split(words)) == 2
    assert main(shlex.split(seen[0].command)[1:]) == 2
    assert seen[0] == seen[1]
    assert seen[0].training.augmentation.order == "pipelined"
    assert re.match("semaug compare --method basic 'isda --ema 0.9' --model small", seen[0].command)
