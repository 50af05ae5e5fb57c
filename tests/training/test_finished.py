"""A finished run: it is small, works from any folder, and can be trained further as the start of another run."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from commands import OPTIONS
from photos import photo_folder, quick_config
from semaug.cli.main import main
from semaug.network.models import SmallNet
from semaug.p2p import P2PNet
from semaug.training.optimization import build_network
from semaug.util.progress import Progress

TRAIN = ["train", "--data", "photos", *OPTIONS]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos and a finished run, both named by relative paths."""
    folder = tmp_path_factory.mktemp("project")
    photo_folder(folder / "photos", train=4)
    with contextlib.chdir(folder):
        assert main([*TRAIN, "--epochs", "1", "--output", "runs/a"]) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: " ".join("".join(capsys.readouterr()).split())


def test_checkpoints_are_deleted_at_the_end(
    project: Path, tmp_path: Path, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(project, tmp_path / "copy")) / "runs" / "a"
    assert not (run / "checkpoints").exists()
    (run / "checkpoints").mkdir()  # as if the process had been killed before it could delete them
    monkeypatch.chdir(tmp_path / "copy")
    assert main([*TRAIN, "--epochs", "1", "--output", "runs/a"]) == 0
    assert "runs/a is complete; choose another output directory to train again, with weights runs/a" in said()
    assert not (run / "checkpoints").exists()


def test_a_run_finds_its_images_from_another_folder(
    project: Path, tmp_path: Path, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(project / "runs" / "a")]) == 0
    assert main(["figures", "confusions", str(project / "runs" / "a")]) == 0
    moved = shutil.copytree(project, tmp_path / "moved")
    (moved / "photos").rename(tmp_path / "photos")  # which is then found here
    assert main(["evaluate", "moved/runs/a"]) == 0
    shutil.rmtree(tmp_path / "photos")
    said()
    assert main(["evaluate", "moved/runs/a"]) == 2
    sentence = (
        "moved/runs/a was trained on are neither at 'moved/photos' nor at 'photos'; run the command in the folder"
    )
    assert sentence in said()
    assert main(["export", str(project / "runs" / "a"), "exported", "--no-onnx"]) == 0
    assert "base" not in json.loads(Path("exported/config.json").read_text())


def test_a_finished_run_is_trained_further_as_the_weights_of_another(
    project: Path, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert main([*TRAIN, "--epochs", "2", "--output", "runs/a"]) == 2
    advice = "(epochs 1 → 2); choose another --output, and runs/a as --weights to train its model further"
    assert advice in said()
    assert main([*TRAIN, "--epochs", "1", "--output", "runs/b", "--weights", "runs/a"]) == 0
    assert "runs/a: 26 tensors loaded epoch 1/1" in said(), "all of them"


def test_a_p2p_net_is_trained_further_too(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = P2PNet(SmallNet(3), 3)
    save_file({name: value.clone() for name, value in trained.state_dict().items()}, tmp_path / "model.safetensors")
    settings = quick_config(tmp_path, tmp_path / "run", method="p2p", weights=tmp_path).resolve()
    model = build_network(settings, 3, torch.device("cpu"), Progress(quiet=True))
    torch.testing.assert_close(model.state_dict(), trained.state_dict(), rtol=0, atol=0)
