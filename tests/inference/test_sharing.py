"""Models that are given away: one network as a run, as a hub folder in timm's hands, and as ONNX; and hostile ones."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load, save_file

from classifiers import tiny_classifier
from commands import OPTIONS, semaug
from photos import photo_folder
from semaug.data.images import Preprocessing
from semaug.data.samples import load_image
from semaug.inference import hub
from semaug.inference.export import export
from semaug.inference.runs import load_classifier
from semaug.inference.sharing import load_onnx, open_classifier
from semaug.util.errors import SemaugError

TIMM = ["--model", "test_resnet", *OPTIONS[2:]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = semaug("train", "--data", photos, "--output", folder, "--epochs", "1", *TIMM)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def shared(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub folder of the run, with ONNX in it, by the command line."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("shared") / "hub"
    done = semaug("export", run, folder, "--hub")
    assert done.returncode == 0, done.stderr
    assert "timm loads it with logits that differ by at most" in done.stderr
    assert {file.name for file in folder.iterdir()} == {
        "README.md", "classes.json", "config.json", "model.safetensors", "model.onnx",
    }  # fmt: skip
    return folder


def copied(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared, tmp_path / "copy"))


# ----------------------------------------------------------------------------------------------------------- parity


def test_run_hub_folder_timm_and_onnx_give_the_same_logits(run: Path, shared: Path, photos: Path) -> None:
    files = sorted((photos / "test").rglob("*.png"))
    classifier = load_classifier(run)
    pixels = torch.from_numpy(np.stack([classifier.preprocessing.pixels(load_image(file)) for file in files]))
    inputs = classifier.preprocessing.evaluation_input(pixels)
    by_timm = timm.create_model(f"local-dir:{shared}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(by_timm), is_training=False)
    prepared_by_timm = torch.stack([transform(load_image(file)) for file in files])
    torch.testing.assert_close(prepared_by_timm, inputs, atol=1e-5, rtol=0)
    with torch.inference_mode():
        expected = classifier.model(inputs)
        assert float((expected[0] - expected[-1]).abs().max()) > 1e-3  # different images, different answers
        assert torch.equal(load_classifier(shared).model(inputs), expected)
        torch.testing.assert_close(by_timm(prepared_by_timm), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(load_onnx(shared / "model.onnx").model(inputs), expected, atol=1e-4, rtol=1e-4)
    assert by_timm.pretrained_cfg["label_names"] == list(classifier.classes)


def test_predict_and_evaluate_take_all_of_them_by_the_command_line(
    run: Path, shared: Path, photos: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    assert semaug("export", run, plain, "--no-onnx").returncode == 0
    answers, scores = [], []
    for model in (run, plain, shared, shared / "model.onnx"):
        table, figures = tmp_path / "answers.csv", tmp_path / "scores.json"
        predicted = semaug("predict", model, photos / "test", "--output", table)
        assert predicted.returncode == 0, predicted.stderr
        evaluated = semaug("evaluate", model, "--data", photos, "--json", figures)
        assert evaluated.returncode == 0, evaluated.stderr
        with open(table, newline="") as file:
            answers.append(list(csv.DictReader(file)))
        scores.append(json.loads(figures.read_text()))
    for other in answers[1:]:
        for row, expected in zip(other, answers[0], strict=True):
            assert (row["path"], row["label"]) == (expected["path"], expected["label"])
            assert float(row["probability"]) == pytest.approx(float(expected["probability"]), abs=1e-4)
    assert all(other["top1"] == scores[0]["top1"] for other in scores)
    assert all(other["cross_entropy"] == pytest.approx(scores[0]["cross_entropy"], abs=1e-4) for other in scores)


def test_timm_loads_the_folder_where_semaug_is_not_installed(shared: Path) -> None:
    program = "import sys, timm; sys.modules['semaug'] = None; "
    program += "print(timm.create_model('local-dir:' + sys.argv[1], pretrained=True).num_classes)"
    done = subprocess.run([sys.executable, "-c", program, shared], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(len(json.loads((shared / "classes.json").read_text())))], done.stderr


def test_the_card_says_what_hubs_read_and_what_is_known(shared: Path) -> None:
    card = (shared / "README.md").read_text("utf-8")
    assert card.startswith("---\nlibrary_name: timm\n")
    for words in ("license", "/tmp", "/home"):
        assert words not in card
    for words in ("Training data:", "Training method: isda", "On the split “test”", "## Limits", "one training run"):
        assert words in card
    for words in ("## How to cite", "local-dir:.", "`model.onnx` takes"):
        assert words in card


@pytest.mark.parametrize(("resize", "crop"), [(600, 448), (40, 32), (256, 224), (512, 448), (232, 224), (41, 41)])
def test_timm_resizes_to_the_same_size(resize: int, crop: int) -> None:
    share = hub._crop_share(Preprocessing(resize, crop))
    assert int(crop / share) == resize
    assert share == pytest.approx(crop / resize, rel=0.02)


@pytest.mark.parametrize("every", range(1, 1025, 97))
def test_any_sizes_are_got_back(every: int) -> None:
    for resize in range(every, 1025, 31):
        assert int(every / hub._crop_share(Preprocessing(resize, every))) == resize


def test_a_transformer_keeps_its_size_of_image(tmp_path: Path) -> None:
    classifier = tiny_classifier(tmp_path / "run", "vit_tiny_patch16_224", resize=56, crop=48, shape="aspect")
    report = export(classifier, tmp_path / "hub", onnx=False, hub=True)
    assert report.hub_difference == pytest.approx(0, abs=1e-5)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["model_args"] == {"img_size": 48}


@pytest.mark.parametrize(
    ("name", "method"), [("small", "basic"), ("torchvision/resnet18", "basic"), ("test_resnet", "p2p")]
)
def test_what_timm_cannot_build_is_told_before_anything_is_written(tmp_path: Path, name: str, method: str) -> None:
    classifier = tiny_classifier(tmp_path / "run", name, method=method)
    with pytest.raises(SemaugError, match=f"timm cannot build {name}"):
        export(classifier, tmp_path / "hub", onnx=False, hub=True)
    assert not (tmp_path / "hub").exists()


# ----------------------------------------------------------------------------------------------------- hostile files


@pytest.mark.parametrize("name", ["config.json", "classes.json"])
def test_onnx_without_the_files_beside_it_is_one_sentence(
    shared: Path, tmp_path: Path, photos: Path, name: str
) -> None:
    folder = copied(shared, tmp_path)
    (folder / name).unlink()
    done = semaug("predict", folder / "model.onnx", photos / "test")
    assert done.returncode == 2
    assert done.stderr.startswith(f"semaug: {name} must lie beside ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_no_model_is_one_sentence(shared: Path, tmp_path: Path) -> None:
    folder = copied(shared, tmp_path)
    (folder / "model.onnx").write_bytes(b"\x80\x04code")
    with pytest.raises(SemaugError, match="cannot be read as ONNX"):
        open_classifier(folder / "model.onnx")
    with pytest.raises(SemaugError, match="there is no file"):
        open_classifier(folder / "other.onnx")
    with pytest.raises(SemaugError, match="neither a folder nor an ONNX file"):
        open_classifier(folder / "model.safetensors")


def test_onnx_must_be_what_the_files_beside_it_say(shared: Path, tmp_path: Path) -> None:
    folder = copied(shared, tmp_path)
    (folder / "classes.json").write_text('["a", "b"]')
    with pytest.raises(SemaugError, match=r"gives .* not what the files beside it say"):
        open_classifier(folder / "model.onnx")


@pytest.mark.parametrize("place", ["initializer", "subgraph", "constant"])
def test_onnx_may_not_name_other_files(shared: Path, tmp_path: Path, place: str) -> None:
    onnx = pytest.importorskip("onnx")
    folder = copied(shared, tmp_path)
    (tmp_path / "secret").write_bytes(bytes(64))
    model = onnx.load(folder / "model.onnx")
    outside = onnx.TensorProto(name="outside", dims=[16], data_type=1, data_location=1)
    outside.external_data.add(key="location", value="../secret")
    if place == "initializer":
        model.graph.initializer.append(outside)
    elif place == "constant":
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["made"], value=outside))
    else:
        inner = onnx.helper.make_graph([], "inner", [], [], [outside])
        model.graph.node.insert(0, onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(SemaugError, match=r"names another file than model\.onnx\.data"):
        open_classifier(folder / "model.onnx")


def test_a_large_onnx_file_is_not_read(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(shared, tmp_path)
    monkeypatch.setattr("semaug.inference.sharing.MAX_ONNX_BYTES", 1000)
    with pytest.raises(SemaugError, match="more than 1000 bytes"):
        open_classifier(folder / "model.onnx")


CHANGES = {
    "a list": ("config.json", "[]", "has format None"),
    "no JSON": ("config.json", "{", "cannot read"),
    "nested": ("config.json", "[" * 200_000, "nested too deeply|cannot read"),
    "timm's alone": ("config.json", '{"architecture": "test_resnet"}', "has format None"),
    "no network": ("config.json", {"model": 3}, "does not say which network"),
    "unknown network": ("config.json", {"model": "os/system"}, "unknown model"),
    "another network": ("config.json", {"model": "test_vit"}, "does not hold a test_vit"),
    "unknown weights": ("config.json", {"model": "test_resnet.nonsense"}, "test_resnet.nonsense|holds"),
    "no preprocessing": ("config.json", {"preprocessing": None}, "how images are prepared"),
    "odd preprocessing": ("config.json", {"preprocessing": {"resize": "40", "crop": 1}}, "how images are prepared"),
    "other keys": ("config.json", {"preprocessing": {"resize": 4, "crop": 1, "run": 1}}, "how images are prepared"),
    "huge images": ("config.json", {"preprocessing": {"resize": 10**9, "crop": 10**9}}, "how images are prepared"),
    "no deviation": ("config.json", {"preprocessing": {"resize": 40, "crop": 32, "std": [0, 0, 0]}}, "images are"),
    "no classes": ("classes.json", "[]", "must have 1 to"),
    "classes twice": ("classes.json", '["a", "a", "b"]', "none twice"),
    "a class that is none": ("classes.json", '["a", 1]', "not a list of names"),
    "many classes": ("classes.json", json.dumps([str(i) for i in range(100_001)]), "must have 1 to"),
    "other classes": ("classes.json", json.dumps([str(i) for i in range(7001)]), "nothing in .* is for the 7001"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_folder_ends_in_one_sentence(shared: Path, tmp_path: Path, change: str) -> None:
    folder = copied(shared, tmp_path)
    file, content, sentence = CHANGES[change]
    if isinstance(content, dict):
        content = json.dumps({**json.loads((folder / file).read_text()), **content})
    (folder / file).write_text(content)
    with pytest.raises(SemaugError, match=sentence) as told:
        open_classifier(folder)
    assert "\n" not in str(told.value)


def test_weights_that_are_code_or_damaged_are_refused(shared: Path, tmp_path: Path) -> None:
    folder = copied(shared, tmp_path)
    tensors = load((folder / "model.safetensors").read_bytes())  # not mapped: the file is written anew below
    (folder / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(SemaugError, match="cannot read weights"):
        open_classifier(folder)
    save_file({**tensors, "more": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(SemaugError, match="does not hold a test_resnet as it says"):
        open_classifier(folder)


def test_a_large_settings_file_is_not_read(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(shared, tmp_path)
    monkeypatch.setattr("semaug.util.files.MAX_JSON_BYTES", 50)
    with pytest.raises(SemaugError, match="more than 50 bytes"):
        open_classifier(folder)
