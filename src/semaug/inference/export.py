"""A trained classifier as a folder to give away: weights, classes, settings, a model card, and ONNX.

The folder is read by :func:`semaug.inference.runs.load_classifier` as a run directory is, and as a hub folder by timm, too; its
model card shows how to use it without semaug. What only training needs (CovNet, the optimiser) is not in it.
"""

import copy
import importlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from semaug.data import birds
from semaug.inference.hub import hub_settings, load_with_timm, takes_size
from semaug.inference.runs import FORMAT, Classifier
from semaug.network.blocks import find_head
from semaug.util.errors import SemaugError
from semaug.util.files import write_atomically, write_json

TOLERANCE = 1e-4  # of the largest logit, and at least of 1
_ONNX_FILES = ("model.onnx", "model.onnx.data")
_ONNX_ONE_FILE_BYTES = 1_500_000_000  # a protobuf file holds at most 2 GB
_KEPT_SETTINGS = ("version", "method", "composite", "epochs", "seed", "select")  # no paths: they tell about the machine
_SCORES = {
    "top1": ("top-1 accuracy", "{:.2%}"),
    "top5": ("top-{k} accuracy", "{:.2%}"),
    "mean_class_accuracy": ("mean accuracy of the classes", "{:.2%}"),
    "cross_entropy": ("cross-entropy", "{:.4f}"),
    "calibration_error": ("expected calibration error", "{:.4f}"),
}


@dataclass(frozen=True)
class ExportReport:
    """The files that were written, and how far ONNX, and what timm loads, differ in their logits (None: not asked)."""

    folder: Path
    files: tuple[Path, ...]
    parameters: int
    onnx_difference: float | None
    hub_difference: float | None = None


def export(
    classifier: Classifier,
    folder: Path,
    onnx: bool = True,
    *,
    hub: bool = False,
    evaluation: Mapping[str, Any] | None = None,
    images: Sequence[Image.Image] | None = None,
) -> ExportReport:
    """Write `classifier` to `folder`; files of an earlier export there are replaced.

    With `hub` it is a folder that timm loads too, see :mod:`semaug.inference.hub`; a network that timm cannot build is an error.

    `evaluation` is for the model card: the scores (see :meth:`semaug.inference.evaluate.Scores.numbers`) with the "split" that
    they were measured on, and its "count" of images, as in a run's evaluation.json. ONNX, and what timm loads, are
    compared with the network on `images`, or on drawn birds.
    """
    _check_folder(folder)
    if evaluation is not None and "split" not in evaluation:
        raise ValueError("an evaluation must say on which split it was made")
    if onnx:
        _import_onnx()  # before anything is written
    settings = {**_settings(classifier), **(hub_settings(classifier) if hub else {})}
    folder.mkdir(parents=True, exist_ok=True)
    difference = None
    if onnx:
        difference = _export_onnx(classifier, folder, images)
    else:
        _remove_onnx(folder)
    _write_weights(classifier.model, folder / "model.safetensors")
    write_json(folder / "classes.json", list(classifier.classes))
    write_json(folder / "config.json", settings)
    write_atomically(folder / "README.md", _model_card(classifier, onnx, evaluation, hub).encode())
    names = ("README.md", "classes.json", "config.json", "model.safetensors", *_ONNX_FILES)
    return ExportReport(
        folder=folder,
        files=tuple(folder / name for name in names if (folder / name).exists()),
        parameters=sum(parameter.numel() for parameter in classifier.model.parameters()),
        onnx_difference=difference,
        hub_difference=_hub_difference(classifier, folder, images) if hub else None,
    )


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise SemaugError(f"cannot export to {folder}: it is not a folder")
    if (folder / "checkpoints").exists() or (folder / "metrics.jsonl").exists():
        raise SemaugError(f"{folder} is a run directory, which an export would overwrite; choose another folder")


def _write_weights(model: nn.Module, file: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save

    # clones: a file of safetensors holds no two names for one tensor
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    write_atomically(file, save(tensors))
    with safe_open(file, framework="pt") as written:
        assert set(written.keys()) == set(tensors)


def _settings(classifier: Classifier) -> dict[str, Any]:
    kept = {key: classifier.config[key] for key in _KEPT_SETTINGS if key in classifier.config}
    return {
        "format": FORMAT,
        "model": classifier.name,
        "preprocessing": asdict(classifier.preprocessing),
        "data": _data_name(classifier),
        **kept,
    }


def _data_name(classifier: Classifier) -> str | None:
    data = classifier.config.get("data")
    return None if data is None else Path(str(data)).name


# ------------------------------------------------------------------------------------------------------ model card


def _model_card(classifier: Classifier, onnx: bool, evaluation: Mapping[str, Any] | None, hub: bool) -> str:
    classes, data = len(classifier.classes), _data_name(classifier)
    parameters = sum(parameter.numel() for parameter in classifier.model.parameters())
    sections = [
        f"# {classifier.name}, {classes} classes",
        f"""An image classifier, trained with semaug.

- Architecture: `{classifier.name}` ({_library(classifier)}), {parameters / 1e6:.2f} million parameters
- Classes: {classes}, in `classes.json` in the order of the outputs
- Training data: {data or "not recorded"}
- Training method: {classifier.config.get("method", "not recorded")}
- Weights: `model.safetensors`""",
        "## Scores\n\n" + _scores(classifier, evaluation),
        "## Preprocessing\n\n" + _preprocessing(classifier),
        "## Use\n\n" + "\n\n".join([*([_use_with_timm()] if hub else []), _use_alone(classifier)]),
        f"""## Limits

- It answers with one of its {classes} classes whatever the picture shows: it has no class for anything else.
- The scores hold for images like those of the training data; other cameras, places or seasons can lower them.
- The scores are of one training run: with another seed they would be others.
- Probabilities are the network's own. Before decisions depend on them, check their calibration on your images.
- Weights may be bound by the terms of what they were trained on: of the training data, and of pretrained weights.""",
        f"## How to cite\n\nsemaug implements the method of\n\n```bibtex\n{_BIBTEX}\n```",
    ]
    if onnx:
        size = classifier.preprocessing.crop
        sections.insert(
            5,
            f"""### ONNX

`model.onnx` takes `images`, float32 (batch, 3, {size}, {size}), preprocessed as above (the `x` of the program), and
gives `logits` (batch, {classes}). The batch may have any size.""",
        )
    return (_FRONT_MATTER if hub else "") + "\n\n".join(sections) + "\n"


# what model hubs read: no licence, which is for whoever publishes the model to choose
_FRONT_MATTER = """---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm
- semaug
---
"""


_BIBTEX = """@article{pu2024learnable,
  title   = {Fine-grained Recognition with Learnable Semantic Data Augmentation},
  author  = {Pu, Yifan and Han, Yizeng and Wang, Yulin and Feng, Junlan and Deng, Chao and Huang, Gao},
  journal = {IEEE Transactions on Image Processing},
  volume  = {33},
  pages   = {3130--3144},
  year    = {2024},
  doi     = {10.1109/TIP.2024.3364500}
}"""


def _scores(classifier: Classifier, evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "Not measured."
    split, count = evaluation["split"], evaluation.get("count")
    heading = f"On the split “{split}”" + (f", {count} images" if count is not None else "") + ":\n"
    rows = [
        f"| {name.format(k=min(5, len(classifier.classes)))} | {layout.format(evaluation[key])} |"
        for key, (name, layout) in _SCORES.items()
        if key in evaluation
    ]
    lines = [heading, "| score | value |", "| --- | --- |", *rows]
    chosen_on = classifier.config.get("select", "val")
    if split == chosen_on:
        lines.append("\nThe best epoch was chosen on these very images: the scores are too good.")
    return "\n".join(lines)


def _preprocessing(classifier: Classifier) -> str:
    p = classifier.preprocessing
    resizing = (
        f"Resize both sides to {p.resize} pixels, not keeping the aspect ratio (bilinear, as Pillow does)."
        if p.shape == "squash"
        else f"Cut out the middle square, and resize it to {p.resize} pixels (bilinear, as Pillow does)."
    )
    return f"""1. Decode to RGB, and turn upright by the EXIF orientation.
2. {resizing}
3. Cut out the middle {p.crop} × {p.crop} pixels.
4. Scale to [0, 1], subtract the mean {list(p.mean)}, divide by the standard deviation {list(p.std)}."""


def _use_with_timm() -> str:
    return f"""With timm, in this folder (`hf-hub:NAME` instead of `local-dir:.` where it was uploaded):

```python
{_TIMM_PROGRAM}
```"""


_TIMM_PROGRAM = """import timm, torch
from PIL import Image, ImageOps

model = timm.create_model("local-dir:.", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
probabilities = model(transform(image)[None]).detach().softmax(1)[0]
print(model.pretrained_cfg["label_names"][probabilities.argmax()], float(probabilities.max()))"""


def _use_alone(classifier: Classifier) -> str:
    return f"With PyTorch{_with_semaug(classifier)}, in this folder:\n\n```python\n{_usage(classifier)}\n```"


def _usage(classifier: Classifier) -> str:
    """A program that classifies photo.jpg without semaug."""
    p = classifier.preprocessing
    start = (p.resize - p.crop) // 2
    squash = [f"image = image.resize(({p.resize}, {p.resize}), Image.Resampling.BILINEAR)"]
    aspect = [
        "left, top = (image.width - min(image.size)) // 2, (image.height - min(image.size)) // 2",
        "box = (left, top, left + min(image.size), top + min(image.size))",
        f"image = image.resize(({p.resize}, {p.resize}), Image.Resampling.BILINEAR, box=box)",
    ]
    return "\n".join(
        [
            f"import json, numpy, torch, {_library(classifier)}",
            "from PIL import Image, ImageOps",
            "from safetensors.torch import load_file",
            "",
            *_construction(classifier),
            'model.load_state_dict(load_file("model.safetensors"))',
            'image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")',
            *(squash if p.shape == "squash" else aspect),
            f"pixels = numpy.array(image)[{start}:{start + p.crop}, {start}:{start + p.crop}] / 255",
            f"x = torch.tensor((pixels - {list(p.mean)}) / {list(p.std)}).float().permute(2, 0, 1)[None]",
            "probabilities = model.eval()(x).detach().softmax(1)[0]",
            'classes = json.load(open("classes.json", encoding="utf-8"))',
            "print(classes[probabilities.argmax()], float(probabilities.max()))",
        ]
    )


def _library(classifier: Classifier) -> str:
    return type(classifier.model).__module__.partition(".")[0]


def _with_semaug(classifier: Classifier) -> str:
    """Whether semaug is needed to build the network: for its own small one, and for P2P-Net."""
    return " and semaug" if _library(classifier) == "semaug" else ", without semaug"


def _construction(classifier: Classifier) -> list[str]:
    name, classes = classifier.name.rpartition("/")[2], len(classifier.classes)
    crop = classifier.preprocessing.crop
    if _library(classifier) == "semaug":
        composite = classifier.config.get("composite")
        return [
            "from semaug.inference.runs import as_composite",
            "from semaug.network.models import build_model",
            "",
            f'model = as_composite({composite!r}, build_model("{classifier.name}", {classes}, {crop}), {classes})',
        ]
    if _library(classifier) == "timm":
        size = f", img_size={crop}" if takes_size(name, crop) else ""
        return [f'model = timm.create_model("{name}", num_classes={classes}{size})']
    head, _ = find_head(classifier.model)
    size = f", image_size={crop}" if name.startswith("vit_") else ""
    return [
        f'model = torchvision.models.get_model("{name}"{size})',
        f'features = model.get_submodule("{head}").in_features',
        f'model.set_submodule("{head}", torch.nn.Linear(features, {classes}))',
    ]


# ------------------------------------------------------------------------------------------------------------ ONNX


def _import_onnx() -> Any:
    try:
        for name in ("onnx", "onnxscript"):  # the exporter imports them, and would say less clearly what to do
            importlib.import_module(name)
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise SemaugError(
            f"export to ONNX needs {error.name}: pip install 'semaug[onnx]', or export without ONNX"
        ) from error


def _export_onnx(classifier: Classifier, folder: Path, images: Sequence[Image.Image] | None) -> float:
    """Write model.onnx once it has been found equal to the model; the largest difference of their logits."""
    model = copy.deepcopy(classifier.model).cpu().float().eval()
    inputs = _trial_inputs(classifier, images)
    weights = sum(value.nbytes for value in model.state_dict().values())
    with tempfile.TemporaryDirectory(dir=folder, prefix=".onnx-") as scratch:
        file = Path(scratch) / "model.onnx"
        try:
            torch.onnx.export(
                model,
                (inputs[:2],),  # a batch of 1 would be taken for a constant
                file,
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["logits"],
                external_data=weights > _ONNX_ONE_FILE_BYTES,
                verbose=False,
            )
        except Exception as error:  # the exporter has many kinds
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise SemaugError(f"{classifier.name} cannot be exported to ONNX: {reason}") from error
        difference = _difference(model, file, inputs)
        _remove_onnx(folder)
        for name in _ONNX_FILES:
            if (Path(scratch) / name).exists():
                (Path(scratch) / name).replace(folder / name)
    return difference


def _remove_onnx(folder: Path) -> None:
    for name in _ONNX_FILES:  # of an earlier export: it would not fit the new weights
        (folder / name).unlink(missing_ok=True)


def _trial_inputs(classifier: Classifier, images: Sequence[Image.Image] | None) -> Tensor:
    """Three inputs of the network."""
    size = max(32, classifier.preprocessing.resize)
    pictures = images or [Image.fromarray(birds.draw(kind, 0, size=size).image) for kind in birds.species(3)]
    pixels = np.stack([classifier.preprocessing.pixels(pictures[i % len(pictures)].convert("RGB")) for i in range(3)])
    return classifier.preprocessing.evaluation_input(torch.from_numpy(pixels)).contiguous()


@torch.inference_mode()
def _difference(model: nn.Module, file: Path, inputs: Tensor) -> float:
    """The largest difference of logits between ONNX and PyTorch, which must be small, on batches of 1 and of 3."""
    session = _import_onnx().InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return max(
        _small_difference(
            "ONNX model", torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0]), model(batch)
        )
        for batch in (inputs[:1], inputs[:3])
    )


def _small_difference(what: str, logits: Tensor, expected: Tensor) -> float:
    difference = float((logits - expected).abs().max())
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:  # not: NaN is a failure, too
        raise SemaugError(f"the {what} differs from the original by {difference:.1e} in its logits: not exported")
    return difference


@torch.inference_mode()
def _hub_difference(classifier: Classifier, folder: Path, images: Sequence[Image.Image] | None) -> float:
    """The largest difference of logits between the network and what timm loads from the folder, which must be small."""
    inputs = _trial_inputs(classifier, images)
    model = copy.deepcopy(classifier.model).cpu().float().eval()
    try:
        return _small_difference("model as timm loads it", load_with_timm(folder)(inputs), model(inputs))
    except Exception:
        (folder / "config.json").unlink()  # nobody is to load it
        raise
