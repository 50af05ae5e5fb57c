"""Pretrained weights: safetensors files of the Hugging Face hub, from its cache or fetched."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file

from photos import photo_folder
from semaug.cli.main import main
from semaug.network import pretrained
from semaug.network.models import build_model
from semaug.util.errors import SettingError

MODEL = "test_resnet"  # the smallest ResNet of timm
FOLDER = "models--timm--test_resnet.r160_in1k"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, whose server refuses connections."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def fill(cache: Path) -> dict[str, torch.Tensor]:
    """Put weights into the cache as the hub does; returns them."""
    torch.manual_seed(1)
    weights: dict[str, torch.Tensor] = timm.create_model(MODEL).state_dict()
    folder = cache / FOLDER
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    save_file(weights, folder / "snapshots" / "abc" / "model.safetensors")
    return weights


def test_without_a_network_one_sentence_names_the_file_and_its_folder(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes before any image is decoded."""
    photos = photo_folder(tmp_path / "photos", species=2, train=2, test=1)
    assert main(["train", "--data", str(photos), "--model", MODEL, "--output", str(tmp_path / "run")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"semaug: http://127.0.0.1:9 does not answer, and model.safetensors of timm/test_resnet.r160_in1k is not in "
        f"{cache / FOLDER}; copy that folder from a machine where semaug weights {MODEL} has run, give a file as "
        "--weights, or train from scratch with --pretrained False"
    )


def test_weights_in_the_cache_are_used_without_a_network(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = fill(cache)
    assert main(["weights", MODEL]) == 0
    assert capsys.readouterr().out.strip() == str(cache / FOLDER / "snapshots" / "abc" / "model.safetensors")
    model = build_model(MODEL, 3, 32, pretrained=True)
    state = model.state_dict()
    assert torch.equal(state["layer4.0.conv1.weight"], weights["layer4.0.conv1.weight"])
    assert state["fc.weight"].shape[0] == 3
    file = cache / FOLDER / "snapshots" / "abc" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert main(["weights", MODEL]) == 2
    assert "are damaged" in capsys.readouterr().err


def test_weights_are_fetched_as_safetensors_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        raise EntryNotFoundError("404: there is only a pytorch_model.bin")

    monkeypatch.setattr(pretrained, "_answers", lambda url: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(
        SettingError, match="no pretrained weights as a safetensors file, and other formats can hold code"
    ):
        build_model(MODEL, 3, 32, pretrained=True)
    assert asked == [("timm/test_resnet.r160_in1k", "model.safetensors")]


@pytest.mark.parametrize("name", ["torchvision/resnet18", "legacy_senet154"])
def test_pickled_weights_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(name)} has no pretrained weights as a safetensors file"):
        build_model(name, 3, 32, pretrained=True)
