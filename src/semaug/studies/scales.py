"""The two scales: how a cell becomes the settings of a training run.

`full` is the paper's setting. `small` has the same cells on drawn birds with small networks, for a machine with two
cores: it shows that everything runs, and says nothing about the paper's claims.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from semaug.studies.cells import DATASETS, PAPER_FEATURES, Cell, ScaleName
from semaug.studies.worlds import WORLDS, world_folder
from semaug.training.methods import METHODS, Augmentation, method_on
from semaug.training.settings import TrainConfig, identifying
from semaug.util.errors import SemaugError


@dataclass(frozen=True)
class NetworkSpec:
    """A network of the paper, and its stand-in at small scale."""

    model: str
    small: str
    frozen: int = 0
    small_frozen: int = 0
    small_lr: float = 0.005
    small_epochs: int = 10


# timm's tv_in1k are torchvision's first ImageNet weights, those of the paper's time. torchvision now gives newer ones
# for MobileNetV2 and RegNetX-400MF. ViT's are the ImageNet-21k weights of its authors, as TransFG uses.
NETWORKS = {
    "ResNet-18": NetworkSpec("resnet18.tv_in1k", "resnet10t"),
    "ResNet-34": NetworkSpec("resnet34.tv_in1k", "resnet14t"),
    "ResNet-50": NetworkSpec("resnet50.tv_in1k", "small", frozen=10, small_frozen=2),
    "ResNet-101": NetworkSpec("resnet101.tv_in1k", "resnet26t"),
    "ResNet-152": NetworkSpec("resnet152.tv_in1k", "resnet34"),
    "ResNeXt-50": NetworkSpec("resnext50_32x4d.tv_in1k", "test_byobnet"),
    "DenseNet-161": NetworkSpec("densenet161.tv_in1k", "test_resnet"),
    "EfficientNet-B0": NetworkSpec("torchvision/efficientnet_b0", "test_efficientnet"),
    "MobileNetV2": NetworkSpec("torchvision/mobilenet_v2", "lcnet_035"),
    "RegNetX-400MF": NetworkSpec("torchvision/regnet_x_400mf", "test_convnext", small_lr=0.002),
    "P2P-Net": NetworkSpec("resnet50.tv_in1k", "small"),  # on ResNet-50
    "ViT-B/16": NetworkSpec("vit_base_patch16_224.orig_in21k", "test_vit", small_lr=0.001),
}
SMALL_STRENGTH = 0.3  # times the paper's λ0, as the demonstration has it: 3 instead of 10
SMALL_FEATURES = 64  # dimensions of the feature of "small"; CovNet's widths are in proportion
DEEP_EPOCHS, DEEP_LR = 4, 0.002  # at small scale, of the ResNets that stand in for the series of depths


@dataclass(frozen=True)
class Setup:
    """What the command line says about all runs."""

    scale: ScaleName
    output: Path
    data: Path | None = None
    epochs: int | None = None
    select: Literal["val", "test"] = "val"
    device: str | None = None

    @property
    def runs(self) -> Path:
        return self.output / "runs"


def stand_in(cell: Cell) -> str:
    """The model that stands in for a cell's network at small scale."""
    return cell.small_model or NETWORKS[cell.network].small


def data_note(dataset: str, setup: Setup) -> str:
    """What stands for a data set at small scale."""
    if setup.data is not None:
        return f"the folder {setup.data.name}"
    world = WORLDS[dataset]
    return f"{world.species} drawn species, seed {world.seed}, chance {100 / world.species:.1f} %"


def train_config(cell: Cell, setup: Setup, seed: int = 0) -> TrainConfig:
    """The settings of a cell's run; the same settings give the same run directory in every experiment."""
    config = _full(cell, setup) if setup.scale == "full" else _small(cell, setup)
    if setup.epochs is not None:
        config = replace(config, epochs=setup.epochs)
    config = replace(config, select=setup.select, device=setup.device)
    return replace(config, seed=seed, output=setup.runs / f"{run_stem(cell, config, setup)}-s{seed}")


def run_stem(cell: Cell, config: TrainConfig, setup: Setup) -> str:
    """The name of a cell's runs without the seed."""
    place = str(setup.data.resolve()) if setup.data is not None and setup.scale == "small" else cell.dataset
    data = [setup.scale, place, asdict(WORLDS[cell.dataset])]
    return stem((setup.scale, cell.dataset, str(config.model), config.method), config, data)


def stem(parts: Sequence[str], config: TrainConfig, data: Any) -> str:
    """The name of a run without the seed: readable parts, and a digest of all that matters."""
    settings = asdict(config) | {"data": data}
    for key in ("seed", *(name for name in vars(config) if name not in identifying())):
        del settings[key]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return "-".join([*parts, digest]).replace("/", "-")


def method_of(cell: Cell) -> str:
    """The name of a cell's training method: on P2P-Net, that with P2P-Net around the network."""
    return method_on("p2p" if cell.network == "P2P-Net" else None, cell.method).name


def _full(cell: Cell, setup: Setup) -> TrainConfig:
    if cell.network == "P2P-Net":  # all else is the default of its methods
        augmentation = METHODS[cell.method].relevant(Augmentation())
        method, spec = method_of(cell), NETWORKS[cell.network]
        return TrainConfig(
            cell.dataset, setup.data, model=spec.model, method=method, pretrained=True, augmentation=augmentation
        )
    spec = NETWORKS[cell.network]
    imagenet = cell.dataset == "imagenet"
    config = TrainConfig(
        data=cell.dataset,
        data_root=setup.data,
        model=spec.model,
        method=cell.method,
        pretrained=not imagenet,
        epochs=120 if imagenet else 100,
        resize=256 if imagenet else 600,
        crop=224 if imagenet else 448,
        shape="aspect" if imagenet else "squash",
        batch_size=256 if imagenet else 64,
        optimizer="sgd",
        lr=0.1 if imagenet else 0.03,
        weight_decay=1e-4 if imagenet else 0.0,
        images_on="stream" if imagenet else None,  # 250 GB decoded
        workers=max(2, (os.cpu_count() or 2) // max(1, torch.cuda.device_count())) if imagenet else 2,
    )
    augmentation = Augmentation(
        strength=cell.strength,
        strength_power=cell.power,
        width=cell.width,
        depth=cell.depth,
        meta_lr=(0.0005 if imagenet else 0.001) if cell.rate is None else cell.rate * 0.03,
        frozen_blocks=(0 if imagenet else spec.frozen) if cell.frozen is None else cell.frozen,
        interval=100 if imagenet else 1,
    )
    return replace(config, augmentation=METHODS[cell.method].relevant(augmentation))


def _small(cell: Cell, setup: Setup) -> TrainConfig:
    spec, model = NETWORKS[cell.network], stand_in(cell)
    deep = model.startswith("resnet")
    lr = DEEP_LR if deep else spec.small_lr
    own = spec.small_frozen if model == spec.small else 0
    config = TrainConfig(
        data=str((setup.data or world_folder(setup.output, cell.dataset)).resolve()),
        model=model,
        method=method_of(cell),
        pretrained=False,
        epochs=DEEP_EPOCHS if deep else spec.small_epochs,
        resize=56,
        crop=48,  # a multiple of the transformer's patch
        batch_size=16,
        optimizer="adamw",
        lr=lr,
        weight_decay=0.05,
        workers=0,
        cache=None,
    )
    augmentation = Augmentation(
        strength=round(SMALL_STRENGTH * cell.strength, 4),
        strength_power=cell.power,
        width=None if cell.width is None else cell.width * SMALL_FEATURES // PAPER_FEATURES,
        depth=cell.depth,
        meta_lr=0.001 if cell.rate is None else cell.rate * lr,
        frozen_blocks=own if cell.frozen is None else cell.frozen,
    )
    return replace(config, augmentation=METHODS[cell.method].relevant(augmentation))


def missing_data(dataset: str, setup: Setup) -> str:
    """Why a data set cannot be used, in one sentence; empty if it can."""
    if setup.scale == "small":
        alone = setup.data is not None and dataset != "cub"
        return f"one folder was given, and it stands for {DATASETS['cub']} only" if alone else ""
    from semaug.data.readers import KNOWN

    root = setup.data or Path(os.environ.get("SEMAUG_DATA") or "data")
    known = KNOWN[dataset]
    folders = [root / folder for folder in known.folders]
    try:
        if any(known.recognise(folder) or (folder.is_dir() and folder != root) for folder in folders):
            return ""
    except OSError as error:
        return f"{DATASETS[dataset]} cannot be read: {error.strerror or error}"
    return f"needs {DATASETS[dataset]}, which is not in {root}"


def check_data(setup: Setup) -> None:
    """See that a folder that was named is there."""
    if setup.data is not None and not setup.data.is_dir():
        raise SemaugError(f"there is no folder {setup.data}")
