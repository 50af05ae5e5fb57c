"""Classifiers from runs, exported folders and ONNX files: equal logits, and errors for damaged or hostile files."""

import csv
import dataclasses
import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load, save_file

from semaug.cli.main import main
from semaug.data.images import Preprocessing
from semaug.data.samples import load_image
from semaug.inference import Classifier, export, load_classifier, open_classifier
from semaug.inference.manifest import sign
from semaug.inference.runs import read_metrics
from semaug.network.models import SmallNet, build_model
from semaug.util.errors import ModelError, SemaugError
from semaug.util.names import class_title


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the exported folder, to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


# ----------------------------------------------------------------------------------------------------------- parity


def test_run_hub_folder_timm_and_onnx_give_the_same_logits(run: Path, exported: Path, photos: Path) -> None:
    files = sorted((photos / "test").rglob("*.png"))
    classifier = load_classifier(run)
    pixels = torch.from_numpy(np.stack([classifier.preprocessing.pixels(load_image(file)) for file in files]))
    inputs = classifier.preprocessing.evaluation_input(pixels)
    by_timm = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(by_timm), is_training=False)
    prepared_by_timm = torch.stack([transform(load_image(file)) for file in files])
    torch.testing.assert_close(prepared_by_timm, inputs, atol=1e-5, rtol=0)
    with torch.inference_mode():
        expected = classifier.model(inputs)
        assert float((expected[0] - expected[-1]).abs().max()) > 1e-3  # different images, different logits
        assert torch.equal(load_classifier(exported).model(inputs), expected)
        torch.testing.assert_close(by_timm(prepared_by_timm), expected, atol=1e-4, rtol=1e-4)
        onnx = open_classifier(exported / "model.onnx")
        torch.testing.assert_close(onnx.model(inputs), expected, atol=1e-4, rtol=1e-4)
    assert by_timm.pretrained_cfg["label_names"] == list(classifier.classes)


def test_predict_and_evaluate_take_every_form_on_the_command_line(
    run: Path, exported: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "plain"), "--no-onnx", "--hub"]) == 0
    assert "timm loads it with logits that differ by at most" in capsys.readouterr().err
    answers, scores = [], []
    for model in (run, tmp_path / "plain", exported, exported / "model.onnx"):
        table, figures = tmp_path / "answers.csv", tmp_path / "scores.json"
        assert main(["predict", str(model), str(photos / "test"), "--output", str(table)]) == 0
        assert main(["evaluate", str(model), "--data", str(photos), "--json", str(figures)]) == 0
        with open(table, newline="") as file:
            answers.append(list(csv.DictReader(file)))
        scores.append(json.loads(figures.read_text()))
    for other in answers[1:]:
        for row, expected in zip(other, answers[0], strict=True):
            assert (row["path"], row["label"]) == (expected["path"], expected["label"])
            assert float(row["probability"]) == pytest.approx(float(expected["probability"]), abs=1e-4)
    assert all(other["top1"] == scores[0]["top1"] for other in scores)
    assert all(other["cross_entropy"] == pytest.approx(scores[0]["cross_entropy"], abs=1e-4) for other in scores)


def test_damaged_metrics_are_one_sentence(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n\n{"epoch": 2}\n')
    assert [row["epoch"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(SemaugError, match=r"cannot read .*metrics\.jsonl line 2"):
        read_metrics(tmp_path)


# ----------------------------------------------------------------------------------------------------- hostile files


@pytest.mark.parametrize("name", ["config.json", "classes.json"])
def test_onnx_without_the_files_beside_it_is_one_sentence(
    folder: Path, photos: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / name).unlink()
    assert main(["predict", str(folder / "model.onnx"), str(photos / "test")]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"semaug: there is no file {folder / name}; it must be beside ")


def test_a_file_that_is_not_a_model_is_one_sentence(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"\x80\x04code")
    sign(folder)
    with pytest.raises(SemaugError, match="cannot be read as ONNX"):
        open_classifier(folder / "model.onnx")
    with pytest.raises(SemaugError, match="there is no file"):
        open_classifier(folder / "other.onnx")
    with pytest.raises(SemaugError, match="neither a folder nor an ONNX file"):
        open_classifier(folder / "model.safetensors")


def test_onnx_must_match_the_files_beside_it(folder: Path) -> None:
    (folder / "classes.json").write_text('["a", "b"]')
    sign(folder)
    with pytest.raises(ModelError, match=r"returns \(2, 3\) outputs, not \(2, 2\)"):
        open_classifier(folder / "model.onnx")
    config = json.loads((folder / "config.json").read_text())
    config["preprocessing"]["crop"] = 24
    (folder / "config.json").write_text(json.dumps(config))
    sign(folder)
    with pytest.raises(ModelError, match=r"does not run on images of size \(3, 24, 24\)"):
        open_classifier(folder / "model.onnx")


@pytest.mark.parametrize("place", ["initializer", "subgraph", "constant"])
def test_onnx_must_not_refer_to_other_files(folder: Path, tmp_path: Path, place: str) -> None:
    onnx = pytest.importorskip("onnx")
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
    sign(folder)
    with pytest.raises(SemaugError, match=r"refers to another file than model\.onnx\.data"):
        open_classifier(folder / "model.onnx")


def hostile_onnx(kind: str) -> Any:
    """A network of ONNX operators that exported networks do not have, or that exceeds limits."""
    onnx = pytest.importorskip("onnx")
    make, number = onnx.helper, onnx.TensorProto.FLOAT
    # the logits are "mean", which a network changes into "logits"; "nothing" is 0
    nodes = [make.make_node("ReduceMean", ["images"], ["mean"], axes=[2, 3], keepdims=0)]
    constants, functions, result = {"nothing": np.zeros((1, 1), np.float32)}, [], number
    opsets = [make.make_opsetid("", 17), make.make_opsetid("own", 1)]

    def value(name: str, kind: int = number, shape: Any = None) -> Any:
        return make.make_tensor_value_info(name, kind, shape)

    def add(operator: str, *inputs: str, to: str = "logits", **options: Any) -> None:
        nodes.append(make.make_node(operator, inputs, [to], **options))

    if kind == "loop":
        step = [make.make_node("Identity", ["on"], ["again"]), make.make_node("Sin", ["x"], ["y"])]
        begin = [value("i", onnx.TensorProto.INT64, []), value("on", onnx.TensorProto.BOOL, []), value("x")]
        body = make.make_graph(step, "body", begin, [value("again", onnx.TensorProto.BOOL, []), value("y")])
        constants |= {"steps": np.array(2**63 - 1), "on": np.array(True)}
        add("Loop", "steps", "on", "mean", body=body)
    elif kind == "functions":  # 2^30 operators when expanded
        for i in range(30):
            inner = ("Sin", "") if i == 0 else (f"F{i - 1}", "own")
            calls = [make.make_node(inner[0], [a], [b], domain=inner[1]) for a, b in (("x", "z"), ("z", "y"))]
            functions.append(make.make_function("own", f"F{i}", ["x"], ["y"], calls, opsets))
        add("F29", "mean", domain="own")
    elif kind == "memory":
        constants["size"] = np.array([2**50])
        add("Expand", "nothing", "size", to="big")
        add("ReduceSum", "big", to="sum")
        add("Add", "mean", "sum")
    elif kind in ("time", "time of a batch"):  # in the latter only many images take long
        width, products = (500, 500) if kind == "time" else (100, 50)
        constants["width"] = np.array([width, width])
        add("Shape", "images", start=0, end=1, to="count")
        add("Mul", "count", "width", to="size")
        add("Expand", "nothing", "size", to="product0")
        for i in range(products):
            add("MatMul", f"product{i}", "product0", to=f"product{i + 1}")
        add("ReduceSum", f"product{products}", to="sum")
        add("Add", "mean", "sum")
    elif kind == "nodes":
        for i in range(20):
            add("Sin", "mean", to=f"sin{i}")
        add("Identity", "mean")
    elif kind == "batch":
        add("Softmax", "mean", axis=0)
    elif kind == "chance":
        add("RandomNormalLike", "mean")
    elif kind == "text":
        nodes.append(make.make_node("Cast", ["mean"], ["logits"], to=onnx.TensorProto.STRING))
        result = onnx.TensorProto.STRING
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    images = value("images", number, ["n", 3, "height", "width"])
    graph = make.make_graph(nodes, "network", [images], [value("logits", result)], tensors)
    return make.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("loop", "has loops, branches or functions"),
        ("functions", "has loops, branches or functions"),
        ("memory", "does not run on images of size"),
        ("time", "takes more than 0.2 s for 2 images"),
        ("nodes", "has more than 20 operators"),
        ("batch", "depend on the other images of its batch, or on chance"),
        ("chance", "depend on the other images of its batch, or on chance"),
        ("text", "returns object, and not numbers"),
    ],
)
def test_onnx_with_hostile_operators_is_one_sentence(
    folder: Path, kind: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.onnx").write_bytes(hostile_onnx(kind).SerializeToString())
    sign(folder)
    if kind == "time":
        monkeypatch.setattr("semaug.inference.onnx_model.IMAGE_SECONDS", 0.1)
    if kind == "nodes":
        monkeypatch.setattr("semaug.inference.onnx_model.MAX_NODES", 20)
    with pytest.raises(ModelError, match=sentence):
        open_classifier(folder / "model.onnx")
    assert capfd.readouterr().err == ""


def test_every_run_of_an_onnx_file_has_a_time_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.onnx").write_bytes(hostile_onnx("time of a batch").SerializeToString())
    sign(folder)
    classifier = open_classifier(folder / "model.onnx")
    pixels = torch.zeros(16, classifier.preprocessing.resize, classifier.preprocessing.resize, 3, dtype=torch.uint8)
    assert classifier.logits(pixels[:1]).shape == (1, 3)
    monkeypatch.setattr("semaug.inference.onnx_model.IMAGE_SECONDS", 0.01)
    with pytest.raises(ModelError, match="takes more than 0.16 s for 16 images and is not used"):
        classifier.logits(pixels)


def test_a_large_onnx_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semaug.inference.onnx_model.MAX_ONNX_BYTES", 1000)
    with pytest.raises(SemaugError, match="more than 1000 bytes"):
        open_classifier(folder / "model.onnx")


CHANGES = {
    "a list": ("config.json", "[]", "its content should be an object"),
    "no JSON": ("config.json", "{", "cannot read"),
    "nested": ("config.json", "[" * 200_000, "nested too deeply|cannot read"),
    "only timm's": ("config.json", '{"architecture": "test_resnet"}', "has format None"),
    "no network": ("config.json", {"model": 3}, "model should be text"),
    "unknown network": ("config.json", {"model": "os/system"}, "unknown model"),
    "another network": ("config.json", {"model": "test_vit"}, "do not fit a test_vit"),
    "unknown weights": ("config.json", {"model": "test_resnet.nonsense"}, "test_resnet.nonsense"),
    "no preprocessing": ("config.json", {"preprocessing": None}, "preprocessing should be an object"),
    "odd preprocessing": (
        "config.json",
        {"preprocessing": {"resize": "40", "crop": 1}},
        "resize should be a whole",
    ),
    "other keys": ("config.json", {"preprocessing": {"resize": 4, "crop": 1, "run": 1}}, "the preprocessing of images"),
    "huge images": (
        "config.json",
        {"preprocessing": {"resize": 10**9, "crop": 10**9}},
        "from 1 to 8192",
    ),
    "no deviation": (
        "config.json",
        {"preprocessing": {"resize": 40, "crop": 32, "std": [0, 0, 0]}},
        "above 0",
    ),
    "half a character": ("config.json", '{"model": "\\ud800"}', "half a character"),
    "huge name": ("config.json", {"model": "x" * 10_000}, "more than 1000 characters"),
    "many epochs": ("config.json", {"epochs": 10**9}, "epochs should be from 1 to 1000000"),
    "a number as data": ("config.json", {"data": 3}, "data should be text"),
    "long class": ("classes.json", json.dumps(["a" * 2000]), "more than 1000 characters"),
    "no classes": ("classes.json", "[]", "must have 1 to"),
    "classes twice": ("classes.json", '["a", "a", "b"]', "none twice"),
    "a class that is not a name": ("classes.json", '["a", 1]', "1 should be text"),
    "many classes": ("classes.json", json.dumps([str(i) for i in range(100_001)]), "must have 1 to"),
    "other classes": ("classes.json", json.dumps([str(i) for i in range(7001)]), "no tensor in .* fits the 7001"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_folder_is_one_sentence(folder: Path, change: str) -> None:
    file, content, sentence = CHANGES[change]
    if isinstance(content, dict):
        content = json.dumps({**json.loads((folder / file).read_text()), **content})
    (folder / file).write_text(content)
    sign(folder)
    with pytest.raises(SemaugError, match=sentence) as caught:
        open_classifier(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["predict", "evaluate", "export"])
def test_images_that_are_too_small_for_the_network_are_one_sentence(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder, small = tmp_path / "run", Preprocessing(1, 1)
    export(Classifier(SmallNet(3).eval(), ("a", "b", "c"), Preprocessing(40, 32), "small", {}), folder, onnx=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "preprocessing": dataclasses.asdict(small)}))
    classes = sorted(class_title(path.name) for path in (photos / "test").iterdir())
    (folder / "classes.json").write_text(json.dumps(classes))
    sign(folder)
    options = {"predict": [photos / "test"], "evaluate": ["--data", photos], "export": [tmp_path / "new", "--no-onnx"]}
    assert main([command, str(folder), *map(str, options[command])]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert re.match(r"semaug: small does not run on (\d+ )?images of 1 px: ", line)


@pytest.mark.parametrize("network", ["vit_7b_patch16_dinov3", "torchvision/regnet_y_128gf"])  # 27 GB and 2.6 GB
def test_no_memory_is_taken_for_a_network_that_the_weights_do_not_fit(folder: Path, network: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model"], config["preprocessing"]["crop"] = network, 32
    (folder / "config.json").write_text(json.dumps(config))
    sign(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=f"do not fit a {network}"):
        load_classifier(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_a_network_that_reads_values_while_it_is_built_is_loaded(tmp_path: Path) -> None:
    model = build_model("torchvision/regnet_y_400mf", 2, 32).eval()
    preprocessing = Preprocessing(40, 32)
    export(Classifier(model, ("a", "b"), preprocessing, "torchvision/regnet_y_400mf", {}), tmp_path, onnx=False)
    assert torch.equal(load_classifier(tmp_path).model.fc.weight, model.fc.weight)


def test_weights_of_another_type_and_tables_for_large_images_are_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "model.safetensors"
    weights = load(file.read_bytes())
    save_file({name: tensor.to(torch.int64) for name, tensor in weights.items()}, file)
    sign(folder)
    with pytest.raises(ModelError, match="conv1.*has the type int64"):
        load_classifier(folder)
    save_file(weights, file)
    sign(folder)
    monkeypatch.setattr("semaug.inference.classifier.MAX_BUFFER_BYTES", 100)
    with pytest.raises(ModelError, match="needs tables of more than"):
        load_classifier(folder)
    monkeypatch.setattr("semaug.inference.manifest.MAX_FILE_BYTES", 20_000)
    with pytest.raises(SemaugError, match="more than 20000 bytes"):
        load_classifier(folder)


def test_weights_that_are_code_or_damaged_are_refused(folder: Path) -> None:
    tensors = load((folder / "model.safetensors").read_bytes())  # not memory-mapped: the file is overwritten below
    (folder / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    sign(folder)
    with pytest.raises(SemaugError, match="cannot read weights"):
        open_classifier(folder)
    save_file({**tensors, "more": torch.zeros(3)}, folder / "model.safetensors")
    sign(folder)
    with pytest.raises(SemaugError, match="do not fit a test_resnet"):
        open_classifier(folder)


def test_a_large_settings_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semaug.util.untrusted.MAX_JSON_BYTES", 50)
    with pytest.raises(SemaugError, match="more than 50 bytes"):
        open_classifier(folder)
