"""The folders of timm's models on the model hubs: config.json in timm's format, and model.safetensors.

``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads such a folder, and ``hf-hub:NAME`` an uploaded one.
What :func:`semaug.inference.export.export` writes has semaug's own settings besides, which timm passes over.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from semaug.data.images import Preprocessing
from semaug.util.errors import SemaugError

if TYPE_CHECKING:
    from semaug.inference.runs import Classifier

_OWN_KEYS = ("first_conv", "classifier")  # of timm's description of the network: for those who train it further


def hub_settings(classifier: "Classifier") -> dict[str, Any]:
    """What timm reads of config.json; a :class:`SemaugError` for a network that timm cannot build."""
    from timm.models import is_model

    model, name = classifier.model, classifier.name.rpartition("/")[2]
    if not type(model).__module__.startswith("timm.") or not is_model(name):
        kind = type(model).__name__
        raise SemaugError(
            f"timm cannot build {classifier.name} ({kind}), so there is no hub folder of it; export without"
        )
    p = classifier.preprocessing
    own = getattr(model, "pretrained_cfg", None) or {}
    settings: dict[str, Any] = {
        "architecture": name.partition(".")[0],
        "num_classes": len(classifier.classes),
        "num_features": getattr(model, "num_features", None),
        "label_names": list(classifier.classes),
        "pretrained_cfg": {
            "num_classes": len(classifier.classes),
            "input_size": [3, p.crop, p.crop],
            "interpolation": "bilinear",
            "crop_pct": _crop_share(p),
            "crop_mode": "squash" if p.shape == "squash" else "center",
            "mean": list(p.mean),
            "std": list(p.std),
            **{key: own[key] for key in _OWN_KEYS if own.get(key)},
        },
    }
    if takes_size(name, p.crop):
        settings["model_args"] = {"img_size": p.crop}
    return settings


def _crop_share(preprocessing: Preprocessing) -> float:
    """The crop as a share of the resized image, such that timm, which rounds down, gets back to that very size."""
    crop, resize = preprocessing.crop, preprocessing.resize
    share = crop / resize
    return share if math.floor(crop / share) == resize else crop / (resize + 0.5)


def takes_size(name: str, crop: int) -> bool:
    """Whether a timm model is made for one size of image, which it then takes as an option."""
    import timm

    try:
        timm.create_model(name, img_size=crop)
    except TypeError:
        return False
    return True


def load_with_timm(folder: Path) -> nn.Module:
    """The network of a hub folder as timm itself loads it."""
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()
