"""The examples run unchanged, but on less data, with the real libraries."""

import importlib.util
import json
import logging
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import notebook

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for setting, value in settings.items():
        monkeypatch.setattr(module, setting, value)
    return module


def noise(count: int, pixels: int, classes: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, pixels, pixels, generator=generator), torch.arange(count) % classes)


def test_several_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("several_losses", monkeypatch, EPOCHS=2)
    photos = module.photos
    monkeypatch.setattr(module, "photos", lambda split, per_class: photos(split, 6))
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]


def test_plain_pytorch_with_torchmetrics(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example("plain_pytorch", monkeypatch, PER_SPECIES=5, EPOCHS=2).main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]
    assert all("'Accuracy': '0." in line and "'CalibrationError': '0." in line for line in lines)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_timm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], optimizer: str) -> None:
    monkeypatch.setattr("semaug.meta.sensitivity._warned", set())
    module = example("timm_parts", monkeypatch, EPOCHS=2, OPTIMIZER=optimizer)
    monkeypatch.setattr(module, "digits", lambda: (noise(100, 32, 10), noise(20, 32, 10)))
    if optimizer == "adamw":  # the learner knows its update rule: no warning
        module.main()
    else:
        with pytest.warns(UserWarning, match="under Lamb is a plain gradient step"):
            module.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_resumes_exactly_from_its_own_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def small(*_: Any) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 5))

    module = example("lightning_module", monkeypatch, EPOCHS=4, build_model=small)
    data = noise(24, 4, 5)
    monkeypatch.setattr(module, "loaders", lambda: (module.exact_loader(data, 8), DataLoader(data, 8)))
    precisions = []
    step = module.Learnable.training_step

    def watched(self: Any, batch: Any, index: int) -> None:
        step(self, batch, index)
        precisions.append(self.learner.executor.precision)

    monkeypatch.setattr(module.Learnable, "training_step", watched)
    with torch.backends.mkldnn.flags(enabled=False):  # its products in bf16 crash on some CPUs
        module.main(precision=precision)
    assert set(precisions) == {torch.bfloat16 if precision == "bf16-mixed" else None}
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line or "same" in line]
    assert [line.split(":")[0] for line in lines] == [
        "epoch 4, optimiser step 24",
        "epoch 2, optimiser step 12",
        "epoch 4, optimiser step 24",
        "the same weights",
    ]
    assert lines[-1].endswith("True")


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Noise in the format of a Hugging Face dataset."""

    def __init__(self, split: str) -> None:
        self.data = noise(20, 8, 10)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.data[index]
        return {"pixel_values": image, "labels": label}


def test_hugging_face_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("hugging_face", monkeypatch, EPOCHS=1, BATCH=10, Digits=Rows)
    module.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "Trainer: loss" in line]
    assert [line.split(":")[0] for line in lines] == ["IsdaTrainer", "LearnableTrainer"]


def test_hugging_face_trainer_resumes_exactly_from_its_own_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = example("hugging_face", monkeypatch, EPOCHS=2, BATCH=10)
    weights = []
    for resume in (False, True):
        torch.manual_seed(0)
        options = {"strength": 5.0, "order": "pipelined"}
        model = module.small_model()
        if resume:  # otherwise the Trainer does not find all of DINOv2's weights
            model = type(model).from_pretrained(tmp_path / "checkpoint-2")
        trainer = module.LearnableTrainer(
            model, args=module.arguments(str(tmp_path)), train_dataset=Rows(""), augmentation=options
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.learner.half_steps == 8
        assert float(trainer.learner.strength) > 0
        weights.append({**trainer.model.state_dict(), **trainer.learner.source.state_dict()})
        shutil.rmtree(tmp_path / "checkpoint-4")
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_the_notebook_runs_from_a_folder_to_the_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = json.loads((EXAMPLES / "own_photos.ipynb").read_text())
    monkeypatch.chdir(tmp_path)
    result = notebook.run(stored, EPOCHS=1, BIRDS=4, SIZE=(32, 24))
    assert (tmp_path / "runs" / "photos" / "report.html").exists()

    def kinds(of: notebook.Notebook) -> list[list[str]]:
        return [[str(output["output_type"]) for output in cell.get("outputs", [])] for cell in of["cells"]]

    assert kinds(result) == kinds(stored), "the notebook in the repository has been run"
