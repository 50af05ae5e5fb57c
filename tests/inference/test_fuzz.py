"""Run directories, exported and hub folders, and ONNX files with anything in them: a result or one sentence."""

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fuzzing import examples, mutated, odd_json, outcome
from semaug.cli.main import main
from semaug.inference import open_classifier
from semaug.inference.manifest import sign

pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    """Another content for a while."""
    before, manifest = file.read_bytes(), (file.parent / "manifest.json").read_bytes()
    file.unlink()  # it may be mapped into memory
    file.write_bytes(content)
    if file.name != "manifest.json":
        sign(file.parent)  # otherwise the checksum alone would refuse it
    try:
        yield
    finally:
        file.unlink()
        file.write_bytes(before)
        (file.parent / "manifest.json").write_bytes(manifest)


def ends_well(*command: object) -> None:
    """The command succeeds, or prints one sentence that cannot control a terminal."""
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        code = main(list(map(str, command)))
    assert code in (0, 2)
    if code == 2:
        sentences = [line for line in errors.getvalue().splitlines() if line.startswith("semaug: ")]
        assert len(sentences) == 1
        assert all(line.isprintable() and len(line) < 10_000 for line in errors.getvalue().splitlines())


@pytest.fixture(scope="module")
def copied(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(run, tmp_path_factory.mktemp("copied") / "run"))


NAMES = ["config.json", "classes.json", "split.json", "manifest.json", "evaluation.json", "metrics.jsonl"]
COMMANDS = st.sampled_from(["evaluate", "predict", "export"] * 3 + ["report", "figures"])  # whose charts take seconds


@examples(40)
@given(data=st.data(), command=COMMANDS)
@pytest.mark.parametrize("name", NAMES)
def test_run_directories(
    copied: Path, photos: Path, tmp_path: Path, name: str, data: st.DataObject, command: str
) -> None:
    file = copied / name
    if name == "metrics.jsonl":
        content = data.draw(odd_json(json.loads(file.read_text().splitlines()[0]))) + b"\n"
    else:
        content = data.draw(odd_json(json.loads(file.read_bytes())))
    commands: dict[str, list[object]] = {
        "evaluate": ["evaluate", copied],
        "predict": ["predict", copied, photos / "test"],
        "export": ["export", copied, tmp_path / "exported", "--no-onnx"],
        "report": ["report", copied, "--output", tmp_path / "report.html"],
        "figures": ["figures", "diagnostics", copied, "--output", tmp_path / "figures"],
    }
    with replaced(file, content):
        ends_well(*commands[command])


@examples(30)
@given(data=st.data())
def test_weights(copied: Path, photos: Path, data: st.DataObject) -> None:
    content = (copied / "model.safetensors").read_bytes()
    with replaced(copied / "model.safetensors", data.draw(mutated(content, near=2000))):
        ends_well("predict", copied, photos / "test")


@examples(30)
@given(data=st.data(), value=st.sampled_from([float("nan"), float("inf"), 1e30, -3e38]))
def test_weights_of_absurd_size_are_not_exported(
    copied: Path, tmp_path: Path, data: st.DataObject, value: float
) -> None:
    tensors = load((copied / "model.safetensors").read_bytes())
    name = data.draw(st.sampled_from([name for name, tensor in tensors.items() if tensor.is_floating_point()]))
    tensors[name].view(-1)[0] = value
    with replaced(copied / "model.safetensors", save(tensors)):
        ends_well("export", copied, tmp_path / "exported", "--no-onnx")


@examples(30)
@given(data=st.data(), name=st.sampled_from(["config.json", "classes.json"]))
def test_hub_folders_and_onnx_files_with_other_settings(exported: Path, name: str, data: st.DataObject) -> None:
    with replaced(exported / name, data.draw(odd_json(json.loads((exported / name).read_bytes())))):
        outcome(open_classifier, exported)
        outcome(open_classifier, exported / "model.onnx")


@examples(30)
@given(data=st.data())
def test_onnx_files(exported: Path, data: st.DataObject) -> None:
    content = (exported / "model.onnx").read_bytes()
    with replaced(exported / "model.onnx", data.draw(mutated(content, near=3000))):
        outcome(open_classifier, exported / "model.onnx")
