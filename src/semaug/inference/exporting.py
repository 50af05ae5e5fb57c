"""Export of a trained classifier: a folder with weights, classes, settings, ONNX and a model card.

:func:`semaug.inference.load_classifier` reads the folder like a run directory. With `hub`, timm loads it too:
``timm.create_model("local-dir:FOLDER", pretrained=True)``, or ``hf-hub:NAME`` after an upload. The model card shows how
to use it without semaug. What only training needs (CovNet, the optimiser) is not in it.
"""

import copy
import hashlib
import importlib
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from semaug.data import birds
from semaug.data.images import Preprocessing
from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import SCORES
from semaug.inference.manifest import NAME, Manifest, checksum, read_manifest, sign
from semaug.inference.onnx_model import MAX_ONNX_BYTES, OnnxModel, import_onnx
from semaug.inference.runs import FORMAT, read_calibration
from semaug.network.blocks import find_head
from semaug.network.models import V1
from semaug.util.errors import FileError, ModelError
from semaug.util.files import write_atomically, write_json
from semaug.util.locks import locked
from semaug.util.names import some
from semaug.util.untrusted import read_bytes

MAX_LOGIT = 1e6  # far beyond those of a trained classifier
TOLERANCE = 1e-4  # of logits, relative to the largest one if that is above 1
_ONNX_FILES = ("model.onnx", "model.onnx.data")
_FILES = ("README.md", "calibration.json", "classes.json", "config.json", NAME, "model.safetensors", *_ONNX_FILES)
_SCRATCH = ".onnx-"  # how the name of a folder for unfinished files begins
_ONE_FILE_BYTES = 1_500_000_000  # a protobuf file holds at most 2 GB
# No paths: they would reveal something about the training machine.
_SETTINGS = ("version", "method", "composite", "epochs", "seed", "select")


@dataclass(frozen=True)
class ExportReport:
    """The files of an export, and the largest difference in logits of ONNX and of timm (None: not requested)."""

    files: tuple[Path, ...]
    onnx_difference: float | None
    hub_difference: float | None


def export(
    classifier: Classifier,
    folder: Path,
    onnx: bool = True,
    *,
    hub: bool = False,
    evaluation: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a classifier to a folder; files of an earlier export are replaced, except a model card that was edited.

    Args:
        classifier: The classifier.
        folder: The folder; created if necessary. It must not be a run directory.
        onnx: Write model.onnx too, and compare its logits with the network's.
        hub: Write a folder that timm loads, and compare the logits of what it loads.
        evaluation: Scores for the model card by name, with the "split" on which they were measured and, optionally,
            the "count" of its images, as in a run's evaluation.json; measured without the temperature.

    Returns:
        The files, and the differences in logits.

    Raises:
        FileError: If the folder is a file or a run directory, its README.md was edited, or another process writes to
            it.
        ModelError: If the weights are damaged, the network cannot be exported to ONNX, timm cannot build it, or the
            logits differ.
        MissingPackageError: If a package for ONNX is not installed.
        ValueError: If the evaluation does not name its split.

    Example:
        >>> export(load_classifier(Path("runs/birds")), Path("exported"), onnx=False)  # doctest: +SKIP
    """
    if folder.exists() and not folder.is_dir():
        raise FileError(f"cannot export to {folder}: it is not a folder")
    if (folder / "checkpoints").exists() or (folder / "metrics.jsonl").exists():
        raise FileError(f"{folder} is a run directory, which an export would overwrite; choose another `folder`")
    manifest: Manifest = read_manifest(folder) if (folder / NAME).exists() else {"files": {}}
    exported = {NAME: "", **manifest["files"]} if manifest["files"] and "run" not in manifest else {}
    others = (name for name in _FILES if name not in exported and (folder / name).exists())
    foreign = [name for name in others if (folder / name).stat().st_size]
    if foreign:
        raise FileError(f"{folder} holds {some(foreign)}, not from an export; choose another `folder`")
    card = folder / "README.md"
    if card.exists() and checksum(card) != exported.get(card.name):
        raise FileError(f"{card} was edited and would be replaced; move it, or choose another `folder`")
    if evaluation is not None and "split" not in evaluation:
        raise ValueError("an evaluation must name the split on which it was made")
    if onnx:
        import_onnx("onnx", "onnxscript", "onnxruntime")
    model = copy.deepcopy(classifier.model).cpu().float().eval()
    inputs = _example_inputs(classifier.preprocessing)
    try:
        with torch.inference_mode():
            largest = float(model(inputs).abs().max())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{classifier.name} does not run on images of {inputs.shape[-1]} px: {reason}") from error
    if not largest <= MAX_LOGIT:  # `not`: NaN fails, too
        raise ModelError(f"the weights are damaged: logits are as large as {largest:.1e}; nothing is exported")
    options, config = _build_options(classifier), classifier.config
    settings = {
        "format": FORMAT,
        "model": classifier.name,
        "preprocessing": asdict(classifier.preprocessing),
        "data": None if config.get("data") is None else Path(str(config["data"])).name,
        **{key: config[key] for key in _SETTINGS if key in config},
        **(_hub_settings(classifier, options) if hub else {}),
    }
    calibration = None if classifier.folder is None else read_calibration(classifier.folder)
    data = None if classifier.folder is None else read_manifest(classifier.folder).get("data")
    text = _model_card(classifier, settings=settings, options=options, hub=hub, onnx=onnx, evaluation=evaluation)
    with locked(folder):
        for leftover in folder.glob(f"{_SCRATCH}*/"):  # of exports that were killed
            if not leftover.is_symlink() and {file.name for file in leftover.iterdir()} <= set(_ONNX_FILES):
                shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
            onnx_difference = _write_onnx(model, inputs, Path(scratch), len(classifier.classes)) if onnx else None
            # Until the export is complete, no file is loaded, because checksums are missing; and it can be repeated.
            card.unlink(missing_ok=True)
            digest = hashlib.sha256(text.encode()).hexdigest()
            write_json(folder / NAME, {"files": {**dict.fromkeys(_FILES, ""), card.name: digest}})
            for name in _ONNX_FILES:
                (folder / name).unlink(missing_ok=True)
            for part in Path(scratch).iterdir():
                part.replace(folder / part.name)
        # clones: safetensors does not store two names for one tensor
        state = classifier.model.state_dict()
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
        write_atomically(folder / "model.safetensors", save(tensors))
        write_json(folder / "classes.json", list(classifier.classes))
        write_json(folder / "config.json", settings)
        (folder / "calibration.json").unlink(missing_ok=True)
        if calibration is not None:  # without what was measured before and after
            kept = {key: calibration[key] for key in ("temperature", "images", "right", "wrong")}
            write_json(folder / "calibration.json", kept)
        write_atomically(card, text.encode())
        sign(folder, card.name, data=data)
        return ExportReport(
            files=tuple(folder / name for name in _FILES if (folder / name).exists()),
            onnx_difference=onnx_difference,
            hub_difference=_hub_difference(model, inputs, folder) if hub else None,
        )


def _library(classifier: Classifier) -> str:
    return "semaug" if classifier.name.endswith(V1) else type(classifier.model).__module__.partition(".")[0]


def _model_card(classifier: Classifier, **content: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("semaug.inference")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    library = _library(classifier)
    card = environment.get_template("model_card.md").render(
        classifier=classifier,
        name=classifier.name.rpartition("/")[2],
        classes=len(classifier.classes),
        library=library,
        head=find_head(classifier.model)[0] if library == "torchvision" else None,
        parameters=sum(parameter.numel() for parameter in classifier.model.parameters()),
        p=classifier.preprocessing,
        scores=SCORES,
        **content,
    )
    return card + "\n"


def _example_inputs(preprocessing: Preprocessing) -> Tensor:
    """Three drawn birds as inputs of the network."""
    size = max(32, preprocessing.resize)
    images = [Image.fromarray(birds.draw(kind, 0, size=size).image) for kind in birds.species(3)]
    pixels = np.stack([preprocessing.pixels(image) for image in images])
    return preprocessing.evaluation_input(torch.from_numpy(pixels)).contiguous()


@torch.inference_mode()
def _difference(name: str, exported: nn.Module, model: nn.Module, inputs: Tensor) -> float:
    """The largest difference in logits, which must be small."""
    expected = model(inputs)
    difference = float((exported(inputs) - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):  # `not`: NaN fails, too
        raise ModelError(f"the {name} differs from the original by {difference:.1e} in its logits: not exported")
    return difference


def _write_onnx(model: nn.Module, inputs: Tensor, folder: Path, classes: int) -> float:
    """Write model.onnx to an empty folder; returns the largest difference of its logits from the model's."""
    file = folder / _ONNX_FILES[0]
    # The exporter of torch 2.11 writes a loop for a network in the layout channels last.
    contiguous = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    try:
        torch.onnx.export(
            contiguous,
            (inputs[:2],),  # the exporter would take a batch size of 1 for a constant
            file,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["images"],
            output_names=["logits"],
            external_data=sum(value.nbytes for value in model.state_dict().values()) > _ONE_FILE_BYTES,
            verbose=False,
        )
    except Exception as error:  # the exporter raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{type(model).__name__} cannot be exported to ONNX: {reason}") from error
    _remove_traces(file)
    exported = OnnxModel(file, inputs.shape[-1], classes)
    return max(_difference("ONNX model", exported, model, inputs[:count]) for count in (1, 3))


def _remove_traces(file: Path) -> None:
    """Remove the exporter's debugging notes: lines of source code, with paths of this machine."""
    onnx = importlib.import_module("onnx")
    model = onnx.load_model_from_string(read_bytes(file, MAX_ONNX_BYTES))
    for part in (model, model.graph, *model.graph.node):
        part.ClearField("metadata_props")
    file.write_bytes(model.SerializeToString())


def _build_options(classifier: Classifier) -> dict[str, int]:
    """The image size, for networks that fix it when they are built, as the keyword argument of their library."""
    name, crop = classifier.name.rpartition("/")[2], classifier.preprocessing.crop
    if _library(classifier) == "torchvision" and name.startswith("vit_"):
        return {"image_size": crop}
    if _library(classifier) == "timm":
        import timm

        try:
            timm.create_model(name, img_size=crop)
            return {"img_size": crop}
        except TypeError:
            pass
    return {}


def _hub_settings(classifier: Classifier, options: dict[str, int]) -> dict[str, Any]:
    """The entries of config.json that timm reads; it ignores the settings of semaug beside them."""
    from timm.models import is_model

    model, name, p = classifier.model, classifier.name.rpartition("/")[2], classifier.preprocessing
    if not type(model).__module__.startswith("timm.") or not is_model(name):
        kind = type(model).__name__
        raise ModelError(f"timm cannot build {classifier.name} ({kind}): export it without `hub`")
    own = getattr(model, "pretrained_cfg", None) or {}
    return {
        "architecture": name.partition(".")[0],
        "num_classes": len(classifier.classes),
        "num_features": getattr(model, "num_features", None),
        "label_names": list(classifier.classes),
        "pretrained_cfg": {
            "num_classes": len(classifier.classes),
            "input_size": [3, p.crop, p.crop],
            "interpolation": "bilinear",
            "crop_pct": _crop_share(p.resize, p.crop),
            "crop_mode": "squash" if p.shape == "squash" else "center",
            "mean": list(p.mean),
            "std": list(p.std),
            **{key: own[key] for key in ("first_conv", "classifier") if own.get(key)},  # for further training
        },
        **({"model_args": options} if options else {}),
    }


def _crop_share(resize: int, crop: int) -> float:
    """The crop as a share of the resized image, such that timm, which rounds down, gets back exactly that size."""
    share = crop / resize
    return share if math.floor(crop / share) == resize else crop / (resize + 0.5)


def _hub_difference(model: nn.Module, inputs: Tensor, folder: Path) -> float:
    import timm

    try:
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return _difference("model that timm loads", loaded, model, inputs)
    except Exception:
        (folder / "config.json").unlink()  # so that nobody loads the folder
        raise
