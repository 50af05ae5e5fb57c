"""Exported folders: read back by semaug, by the program of their model card, and by ONNX Runtime."""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from classifiers import CLASSES, tiny_classifier
from semaug.data import birds
from semaug.data.samples import load_image
from semaug.inference import export as module
from semaug.inference.export import export
from semaug.inference.runs import load_classifier
from semaug.util.errors import SemaugError


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory):
    return tiny_classifier(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo that is not square, and is turned by its EXIF orientation."""
    file = tmp_path_factory.mktemp("photo") / "photo.jpg"
    picture = Image.fromarray(birds.draw(birds.species(2)[0], 0, size=64).image).crop((0, 0, 63, 50))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(file, exif=exif)
    return file


def pixels(classifier, photo):
    return torch.tensor(classifier.preprocessing.pixels(load_image(photo)))[None]


# ---------------------------------------------------------------------------------------------------------- folder


def test_an_exported_folder_is_loaded_like_a_run(classifier, photo, tmp_path):
    report = export(classifier, tmp_path / "new" / "out", onnx=False)
    again = load_classifier(tmp_path / "new" / "out")
    assert again.classes == classifier.classes
    assert again.preprocessing == classifier.preprocessing
    shown = pixels(classifier, photo)
    assert torch.equal(again.probabilities(shown), classifier.probabilities(shown))
    assert {file.name for file in report.files} == {"README.md", "classes.json", "config.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "new" / "out").iterdir()} == {file.name for file in report.files}
    assert report.onnx_difference is None
    assert report.parameters == sum(p.numel() for p in classifier.model.parameters())


def test_the_weights_are_those_of_the_model_and_nothing_else(classifier, tmp_path):
    export(classifier, tmp_path, onnx=False)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == classifier.model.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in classifier.model.state_dict().items())


def test_tensors_that_share_memory_are_exported(classifier, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    module._write_weights(model, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_paths_of_the_training_machine_are_left_out(classifier, tmp_path):
    export(classifier, tmp_path, onnx=False)
    for name in ("config.json", "README.md"):
        text = (tmp_path / name).read_text("utf-8")
        assert "someone" not in text
        assert "warblers" in text


def test_a_run_directory_and_a_file_are_not_overwritten(classifier, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SemaugError, match="run directory"):
        export(classifier, tmp_path)
    with pytest.raises(SemaugError, match="not a folder"):
        export(classifier, tmp_path / "metrics.jsonl")


def test_an_export_again_leaves_no_old_onnx(classifier, tmp_path):
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).touch()
    export(classifier, tmp_path, onnx=False)
    assert not list(tmp_path.glob("*.onnx*"))


# ------------------------------------------------------------------------------------------------------ model card


@pytest.fixture
def run_program_of_card(monkeypatch, capsys):
    """What a model card's program prints, run in its folder where semaug cannot be imported."""

    def run(folder, photo):
        card = (folder / "README.md").read_text("utf-8")
        program = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)
        (folder / "photo.jpg").write_bytes(photo.read_bytes())
        monkeypatch.chdir(folder)
        if "without semaug" in card:
            monkeypatch.setitem(sys.modules, "semaug", None)
        exec(program, {})
        label, probability = capsys.readouterr().out.split()
        return label, float(probability)

    return run


@pytest.mark.parametrize(
    ("name", "shape", "method"),
    [
        ("test_resnet", "squash", "learnable"),
        ("timm/test_vit", "aspect", "learnable"),
        ("torchvision/mobilenet_v3_small", "aspect", "learnable"),
        ("small", "squash", "basic"),
        ("torchvision/resnet18", "squash", "p2p+learnable"),
    ],
)
def test_the_program_of_the_model_card_predicts_the_same(tmp_path, photo, run_program_of_card, name, shape, method):
    classifier = tiny_classifier(tmp_path / "run", name, method=method, shape=shape, resize=41)
    export(classifier, tmp_path / "out", onnx=False)
    label, probability = run_program_of_card(tmp_path / "out", photo)
    probabilities = classifier.probabilities(pixels(classifier, photo))[0]
    assert probability == pytest.approx(float(probabilities.max()), abs=1e-5)
    assert label == CLASSES[int(probabilities.argmax())]


def test_the_model_card_tells_scores_with_their_split(classifier, tmp_path):
    evaluation = {
        "split": "test",
        "count": 321,
        "top1": 0.8765,
        "top5": 1.0,
        "calibration_error": 0.0321,
        "classes": [],
    }
    export(classifier, tmp_path, onnx=False, evaluation=evaluation)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "On the split “test”, 321 images" in card
    assert "| top-1 accuracy | 87.65% |" in card
    assert "| top-4 accuracy | 100.00% |" in card
    assert "| expected calibration error | 0.0321 |" in card
    assert "too good" not in card
    assert "model.onnx" not in card
    for words in ("Limits", "learnable", "not keeping the aspect ratio", "10.1109/TIP.2024.3364500"):
        assert words in card


def test_the_model_card_tells_when_the_split_was_selected_on(classifier, tmp_path):
    chosen_on_test = replace(classifier, config={**classifier.config, "select": "test"})
    export(chosen_on_test, tmp_path, onnx=False, evaluation={"split": "test", "top1": 1.0})
    assert "too good" in (tmp_path / "README.md").read_text("utf-8")
    with pytest.raises(ValueError, match="split"):
        export(classifier, tmp_path, onnx=False, evaluation={"top1": 1.0})


def test_a_model_card_without_scores_says_so(classifier, tmp_path):
    bare = replace(classifier, config={})
    export(bare, tmp_path, onnx=False)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "Not measured" in card
    assert "Training data: not recorded" in card


# ------------------------------------------------------------------------------------------------------------ ONNX


@pytest.mark.parametrize(
    ("name", "size", "method"),
    [
        ("torchvision/resnet18", 64, "learnable"),
        ("vit_tiny_patch16_224", 32, "learnable"),
        ("mobilenetv2_100", 64, "learnable"),
        ("mobilenetv2_100", 64, "p2p"),
    ],
)
def test_onnx_gives_the_same_logits_for_any_batch(tmp_path, photo, name, size, method):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    classifier = tiny_classifier(tmp_path / "run", name, method=method, resize=size + 8, crop=size)
    report = export(classifier, tmp_path / "out", images=[load_image(photo)])
    assert report.onnx_difference is not None
    assert report.onnx_difference < 1e-4
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in report.files}
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 5):
        inputs = np.random.default_rng(batch).normal(size=(batch, 3, size, size)).astype(np.float32)
        with torch.inference_mode():
            expected = classifier.model(torch.from_numpy(inputs)).numpy()
        [logits] = session.run(["logits"], {"images": inputs})
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    assert "model.onnx" in (tmp_path / "out" / "README.md").read_text("utf-8")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages_are_named_before_anything_is_written(classifier, tmp_path, monkeypatch, package):
    pytest.importorskip("onnxruntime")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SemaugError, match=rf"{package}: pip install 'semaug\[onnx\]'"):
        export(classifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class FakeSession:
    """An ONNX Runtime whose logits are off by a given amount."""

    def __init__(self, model, off):
        self.model, self.off = model, off

    def InferenceSession(self, file, providers):
        return self

    def run(self, names, inputs):
        with torch.inference_mode():
            return [self.model(torch.from_numpy(inputs["images"])).numpy() + np.float32(self.off)]


@pytest.mark.parametrize("off", [0.01, math.nan])
def test_onnx_that_differs_is_not_exported(classifier, tmp_path, monkeypatch, off):
    monkeypatch.setattr(module, "_import_onnx", lambda: FakeSession(classifier.model, off))
    monkeypatch.setattr(torch.onnx, "export", lambda model, args, file, **options: file.touch())
    with pytest.raises(SemaugError, match="differs from the original"):
        export(classifier, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_onnx_cannot_express_is_an_error(classifier, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no such operator\nlong story")

    monkeypatch.setattr(module, "_import_onnx", lambda: None)
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(SemaugError, match=r"cannot be exported to ONNX: no such operator$"):
        export(classifier, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_classifier_is_left_as_it_was(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_import_onnx", lambda: FakeSession(classifier.model, 0.0))
    monkeypatch.setattr(torch.onnx, "export", lambda model, args, file, **options: file.touch())
    before = {name: value.clone() for name, value in classifier.model.state_dict().items()}
    report = export(classifier, tmp_path)
    assert report.onnx_difference == pytest.approx(0, abs=1e-6)
    assert (tmp_path / "model.onnx").exists()
    assert all(torch.equal(value, before[name]) for name, value in classifier.model.state_dict().items())
