"""Exported folders: loaded by semaug, by the programs of the model card, by timm and by ONNX Runtime."""

import copy
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from classifiers import CLASSES, tiny_classifier
from semaug.cli.main import main
from semaug.data import birds
from semaug.data.samples import load_image
from semaug.inference import exporting as module
from semaug.inference.classifier import load_classifier
from semaug.inference.exporting import export
from semaug.util.errors import FileError, MissingPackageError, ModelError, SemaugError


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo that is not square and is rotated by its EXIF orientation."""
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
    batch = pixels(classifier, photo)
    assert torch.equal(again.probabilities(batch), classifier.probabilities(batch))
    names = {"README.md", "classes.json", "config.json", "manifest.json", "model.safetensors"}
    assert {file.name for file in report.files} == names
    assert {file.name for file in (tmp_path / "new" / "out").iterdir()} == {file.name for file in report.files}
    assert report.onnx_difference is None


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("at", ["save", "write_json", "sign"])
def test_an_export_that_was_killed_is_not_loaded_and_can_be_repeated(classifier, tmp_path, monkeypatch, at, over):
    folder, write = tmp_path / "out", module.write_json
    if over:
        export(replace(classifier, classes=classifier.classes[::-1]), folder, onnx=False)
    (folder / ".onnx-abc").mkdir(parents=True)  # of another export that was killed
    (folder / ".onnx-abc" / "model.onnx").write_text("unfinished")

    def killed(path, *content, **_):
        if at != "write_json" or path.name != "manifest.json":
            raise KeyboardInterrupt
        write(path, *content)

    with monkeypatch.context() as patch:
        patch.setattr(module, at, killed)
        with pytest.raises(KeyboardInterrupt):
            export(classifier, folder, onnx=False)
    with pytest.raises(SemaugError):
        load_classifier(folder)
    export(classifier, folder, onnx=False)
    assert load_classifier(folder).classes == classifier.classes
    assert not (folder / ".onnx-abc").exists()


def test_the_weights_are_exactly_those_of_the_model(classifier, tmp_path):
    export(classifier, tmp_path, onnx=False)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == classifier.model.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in classifier.model.state_dict().items())


def test_tensors_that_share_memory_are_exported(classifier, tmp_path):
    model = copy.deepcopy(classifier.model)
    model.register_parameter("tied", next(model.parameters()))
    export(replace(classifier, model=model), tmp_path, onnx=False)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_paths_of_the_training_machine_are_left_out(classifier, tmp_path):
    export(classifier, tmp_path, onnx=False)
    for name in ("config.json", "README.md"):
        text = (tmp_path / name).read_text("utf-8")
        assert "someone" not in text
        assert "warblers" in text


def test_the_config_of_an_exported_folder_does_not_pass_for_that_of_a_run(classifier, tmp_path, capsys):
    """Its settings of training are few: the others, the image size among them, would silently be the defaults."""
    export(classifier, tmp_path / "exported", onnx=False)
    assert main(["train", "--config", str(tmp_path / "exported" / "config.json"), "--print-config"]) == 2
    assert "belongs to an exported folder and lacks most settings; use that of the run" in capsys.readouterr().err


def test_a_run_directory_and_a_file_are_not_overwritten(classifier, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(FileError, match="run directory"):
        export(classifier, tmp_path)
    with pytest.raises(FileError, match="not a folder"):
        export(classifier, tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("value", [1e30, math.nan])
def test_damaged_weights_are_not_exported(classifier, tmp_path, value):
    model = copy.deepcopy(classifier.model)
    with torch.no_grad():
        list(model.parameters())[-1][0] = value
    with pytest.raises(ModelError, match="the weights are damaged: logits are as large as .*; nothing is exported"):
        export(replace(classifier, model=model), tmp_path / "out", onnx=False)
    assert not (tmp_path / "out").exists()


def test_a_second_export_removes_old_onnx_files(classifier, tmp_path):
    export(classifier, tmp_path, onnx=False)
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).touch()
    export(classifier, tmp_path, onnx=False)
    assert not list(tmp_path.glob("*.onnx*"))


# ------------------------------------------------------------------------------------------------------ model card


@pytest.fixture
def run_program_of_card(monkeypatch, capsys):
    """Run a program of a model card in its folder, without semaug if it says so, and return what it prints."""

    def run(folder, photo, number=0):
        card = (folder / "README.md").read_text("utf-8")
        program = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[number]
        (folder / "photo.jpg").write_bytes(photo.read_bytes())
        monkeypatch.chdir(folder)
        if "without semaug" in card:
            monkeypatch.setitem(sys.modules, "semaug", None)
        exec(program, {})
        label, probability = capsys.readouterr().out.rsplit(maxsplit=1)
        return label, float(probability)

    return run


@pytest.mark.parametrize(
    ("name", "shape", "method"),
    [
        ("test_resnet", "squash", "learnable"),
        ("timm/test_vit", "aspect", "learnable"),
        ("torchvision/mobilenet_v3_small", "aspect", "learnable"),
        ("small", "squash", "basic"),
        ("resnet26-v1", "squash", "basic"),
        ("torchvision/resnet18", "squash", "p2p+learnable"),
    ],
)
def test_the_program_of_the_model_card_gives_the_same_prediction(
    tmp_path, photo, run_program_of_card, name, shape, method
):
    classifier = tiny_classifier(tmp_path / "run", name, method=method, shape=shape, resize=41)
    export(classifier, tmp_path / "out", onnx=False)
    label, probability = run_program_of_card(tmp_path / "out", photo)
    probabilities = classifier.probabilities(pixels(classifier, photo))[0]
    assert probability == pytest.approx(float(probabilities.max()), abs=1e-5)
    assert label == CLASSES[int(probabilities.argmax())]


def test_the_model_card_shows_scores_with_their_split(classifier, tmp_path):
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
    assert "| top-1 accuracy | 87.65 % |" in card
    assert "| top-4 accuracy | 100.00 % |" in card
    assert "| expected calibration error | 0.0321 |" in card
    assert "too good" not in card
    assert "model.onnx" not in card
    for phrase in ("Limits", "learnable", "not keeping the aspect ratio", "10.1109/TIP.2024.3364500"):
        assert phrase in card


def test_the_model_card_says_if_the_epoch_was_selected_on_the_split(classifier, tmp_path):
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


# ------------------------------------------------------------------------------------------------------------ timm


def test_both_programs_of_a_hub_card_give_the_same_prediction(exported, run, photo, run_program_of_card, tmp_path):
    classifier = load_classifier(run)
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    probabilities = classifier.probabilities(pixels(classifier, photo))[0]
    expected = classifier.classes[int(probabilities.argmax())], pytest.approx(float(probabilities.max()), abs=1e-4)
    for number in (0, 1):  # with timm, then with PyTorch
        assert run_program_of_card(folder, photo, number) == expected


def test_the_hub_card_has_the_front_matter_of_hubs_and_all_sections(exported):
    card = (exported / "README.md").read_text("utf-8")
    assert card.startswith("---\nlibrary_name: timm\n")
    for phrase in ("license", "/tmp", "/home"):
        assert phrase not in card
    for phrase in ("Training data:", "Training method: isda", "On the split “test”", "## Limits", "one training run"):
        assert phrase in card
    for phrase in ("## How to cite", "local-dir:.", "`model.onnx` takes"):
        assert phrase in card
    assert "\n\n\n" not in card


@pytest.mark.parametrize(("resize", "crop"), [(600, 448), (40, 32), (256, 224), (512, 448), (232, 224), (41, 41)])
def test_timm_resizes_to_the_same_size(resize, crop):
    share = module._crop_share(resize, crop)
    assert int(crop / share) == resize
    assert share == pytest.approx(crop / resize, rel=0.02)


def test_timm_gets_back_any_size():
    sizes = [(resize, crop) for crop in range(1, 1025, 97) for resize in range(crop, 1025, 31)]
    assert [int(crop / module._crop_share(resize, crop)) for resize, crop in sizes] == [resize for resize, _ in sizes]


def test_a_transformer_has_its_image_size_in_the_settings(tmp_path):
    classifier = tiny_classifier(tmp_path / "run", "vit_tiny_patch16_224", resize=56, crop=48, shape="aspect")
    report = export(classifier, tmp_path / "hub", onnx=False, hub=True)
    assert report.hub_difference == pytest.approx(0, abs=1e-5)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["model_args"] == {"img_size": 48}


@pytest.mark.parametrize(
    ("name", "method"), [("small", "basic"), ("torchvision/resnet18", "basic"), ("test_resnet", "p2p")]
)
def test_a_network_that_timm_cannot_build_is_an_error_before_anything_is_written(tmp_path, name, method):
    classifier = tiny_classifier(tmp_path / "run", name, method=method)
    with pytest.raises(ModelError, match=f"timm cannot build {name}"):
        export(classifier, tmp_path / "hub", onnx=False, hub=True)
    assert not (tmp_path / "hub").exists()


def test_a_hub_folder_that_timm_loads_differently_cannot_be_loaded(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    with pytest.raises(ModelError, match="model that timm loads differs from the original"):
        export(classifier, tmp_path, onnx=False, hub=True)
    assert not (tmp_path / "config.json").exists()


# ------------------------------------------------------------------------------------------------------------ ONNX


@pytest.mark.parametrize(
    ("name", "size", "method"),
    [
        ("small", 32, "learnable"),
        ("torchvision/resnet18", 64, "learnable"),
        ("test_vit", 32, "learnable"),
        ("test_efficientnet", 32, "learnable"),
        ("test_efficientnet", 64, "p2p"),
    ],
)
def test_onnx_gives_the_same_logits_for_any_batch_size(tmp_path, name, size, method):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    classifier = tiny_classifier(tmp_path / "run", name, method=method, resize=size + 8, crop=size)
    report = export(classifier, tmp_path / "out")
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
    paths = str(Path(torch.__file__).parents[1]), str(Path(module.__file__).parents[1])
    assert not any(path.encode() in (tmp_path / "out" / "model.onnx").read_bytes() for path in paths)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_an_error_before_anything_is_written(classifier, tmp_path, monkeypatch, package):
    pytest.importorskip("onnxruntime")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}: pip install '\.\[onnx\]'"):
        export(classifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def fake_onnx(classifier, monkeypatch):
    """Replace the exporter and ONNX Runtime by the model itself, with an error in its logits."""

    def install(error):
        monkeypatch.setattr(module, "import_onnx", lambda *packages: None)
        monkeypatch.setattr(torch.onnx, "export", lambda model, args, file, **options: file.touch())
        monkeypatch.setattr(
            module, "OnnxModel", lambda file, crop, classes: lambda inputs: classifier.model(inputs) + error
        )

    return install


@pytest.mark.parametrize("error", [0.01, math.nan])
def test_onnx_that_differs_is_not_exported(classifier, tmp_path, fake_onnx, error):
    fake_onnx(error)
    with pytest.raises(ModelError, match="differs from the original"):
        export(classifier, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_the_exporter_is_one_sentence(classifier, tmp_path, monkeypatch, fake_onnx):
    def fail(*args, **options):
        raise RuntimeError("no such operator\nlong story")

    fake_onnx(0.0)
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ModelError, match=r"cannot be exported to ONNX: no such operator$"):
        export(classifier, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_does_not_change_the_classifier(classifier, tmp_path, fake_onnx):
    fake_onnx(0.0)
    before = {name: value.clone() for name, value in classifier.model.state_dict().items()}
    report = export(classifier, tmp_path)
    assert report.onnx_difference == pytest.approx(0, abs=1e-6)
    assert (tmp_path / "model.onnx").exists()
    assert all(torch.equal(value, before[name]) for name, value in classifier.model.state_dict().items())
