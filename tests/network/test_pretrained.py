"""Pretrained weights: safetensors files of the Hugging Face hub, and torchvision's, from a cache or fetched."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file

from photos import photo_folder
from semaug.cli.main import main
from semaug.network import pretrained
from semaug.network.models import build_model
from semaug.util.errors import ModelError, SettingError

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


def test_pickled_weights_of_timm_are_refused() -> None:
    with pytest.raises(SettingError, match="^legacy_senet154 has no pretrained weights as a safetensors file"):
        build_model("legacy_senet154", 3, 32, pretrained=True)


@pytest.fixture
def in_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch's empty cache; torchvision's weights of MobileNetV2 are on a server that refuses connections."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    weights = torchvision.models.MobileNet_V2_Weights.DEFAULT
    monkeypatch.setattr(weights, "_value_", replace(weights.value, url="http://127.0.0.1:9/models/net-ABC.pth"))
    return tmp_path / "torch" / "checkpoints"


def put_pickle(folder: Path, content: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a pickle into torch's cache under a name with its own checksum, which torchvision then states."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    weights = torchvision.models.MobileNet_V2_Weights.DEFAULT
    name = f"net-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}.pth"
    monkeypatch.setattr(weights, "_value_", replace(weights.value, url=f"http://127.0.0.1:9/models/{name}"))
    folder.mkdir(parents=True)
    (folder / name).write_bytes(buffer.getvalue())
    return folder / name


def test_weights_of_torchvision_are_used_if_their_checksum_is_right(
    in_torchvision: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["weights", "torchvision/mobilenet_v2"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"semaug: http://127.0.0.1:9 does not answer, and {in_torchvision / 'net-ABC.pth'} is missing;"
    )
    state = torchvision.models.mobilenet_v2().state_dict()
    file = put_pickle(in_torchvision, state, monkeypatch)
    assert main(command) == 0
    assert capsys.readouterr().out.strip() == str(file)
    model = build_model("torchvision/mobilenet_v2", 3, 32, pretrained=True)
    assert torch.equal(model.state_dict()["features.0.0.weight"], state["features.0.0.weight"])
    assert model.state_dict()["classifier.1.weight"].shape[0] == 3
    file.write_bytes(file.read_bytes() + b"x")
    assert main(command) == 2
    assert capsys.readouterr().err == f"semaug: the pretrained weights {file} are damaged; delete the file\n"


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_weights_of_torchvision_is_not_run(
    in_torchvision: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pickle(in_torchvision, {"a": Malicious(tmp_path / "owned")}, monkeypatch)
    with pytest.raises(ModelError, match="holds other things than the weights of mobilenet_v2; delete the file"):
        build_model("torchvision/mobilenet_v2", 3, 32, pretrained=True)
    assert not (tmp_path / "owned").exists()
