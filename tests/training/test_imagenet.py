"""The paper's ImageNet runs on shards, with the commands of the documentation and a stand-in for the images."""

import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from forks import run_ranks
from photos import photo_folder
from semaug.cli.main import main
from semaug.cli.train import Train
from semaug.data.readers import read_data
from semaug.inference.runs import read_metrics
from semaug.studies.presets import all_experiments
from semaug.studies.reproduce import Choice, make_plan
from semaug.studies.scales import Setup, train_config
from semaug.training.trainer import train
from semaug.util.untrusted import read_json

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "streaming.md"
SMALL: dict[str, Any] = {"model": "small", "resize": 40, "crop": 32, "batch_size": 4, "epochs": 2, "workers": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images under the names of ImageNet, and beside it `packed`, written by the documented command."""
    root = tmp_path_factory.mktemp("root")
    folder = photo_folder(root / "data" / "imagenet")
    (folder / "test").rename(folder / "val")
    for split in ("train", "val"):
        for number, species in enumerate(sorted((folder / split).iterdir())):
            species.rename(species.with_name(f"n{number:08d}"))
    (packing,) = (words for words in documented("semaug data shards imagenet") if words)
    assert packing[4] == "packed/imagenet"
    assert main([*packing[1:4], str(root / packing[4]), "--data-root", str(root / "data")]) == 0
    return root


def documented(start: str) -> list[list[str]]:
    """The commands on the page that start with these words."""
    text = re.sub(r"\\\n\s*", " ", PAGE.read_text(encoding="utf-8"))
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.strip().startswith(start)]
    assert commands, start
    return commands


def test_the_documented_command_under_torchrun_has_the_settings_of_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (words,) = (words for words in documented("torchrun") if "packed/imagenet" in words)
    parsed: list[Train] = []
    monkeypatch.setattr(Train, "run", lambda command: parsed.append(command))
    assert main(words[words.index("train") :]) == 0
    settings = asdict(parsed[0].resolve())
    cells = all_experiments()["table-imagenet"].cells
    cell = next(c for c in cells if c.network == "ResNet-50" and c.method == "learnable")
    preset = asdict(train_config(cell, Setup("full", tmp_path)).resolve())
    assert {name for name in preset if preset[name] != settings[name]} <= {"data", "data_root", "output", "workers"}
    assert (settings["images_on"], settings["data"]) == ("stream", "packed/imagenet")
    assert (settings["augmentation"]["interval"], settings["epochs"]) == (100, 120)


def test_the_documented_command_under_torchrun_runs(root: Path, tmp_path: Path) -> None:
    (words,) = (words for words in documented("torchrun") if "packed/imagenet" in words)
    command = words[words.index("train") :]
    command[command.index("packed/imagenet")] = str(root / "packed" / "imagenet")
    smaller = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    run_ranks(2, tmp_path, main, [*command, *smaller, "--device", "cpu", "--output", str(tmp_path / "run")])
    assert len(read_metrics(tmp_path / "run")) == 2
    result = read_json(tmp_path / "run" / "evaluation.json")
    assert (result["split"], result["count"]) == ("test", 12)


def test_reproduce_finds_the_shards_and_streams_them(root: Path, tmp_path: Path) -> None:
    (words,) = documented("semaug reproduce table-imagenet")
    assert words[3:5] == ["--data", "packed"]
    setup = Setup("full", tmp_path, data=root / "packed")
    plan = make_plan([all_experiments()["table-imagenet"]], setup, Choice(seeds=(0,)))
    assert len(plan.configs) == 6
    assert not plan.reasons
    models = set()
    for config in plan.configs.values():
        assert (config.images_on, config.pretrained) == ("stream", False)
        assert read_data(config.data, config.data_root).classes == ("n00000000", "n00000001", "n00000002")
        models.add(config.model)
    assert models == {"resnet50.tv_in1k", "resnext50_32x4d.tv_in1k"}
    learnable = next(config for config in plan.configs.values() if config.method == "learnable")
    run = train(replace(learnable, **SMALL, device="cpu"))
    assert "meta_loss" in read_metrics(run)[0]
