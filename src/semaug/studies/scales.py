"""The two scales: how a cell becomes the settings of a training run.

`full` has the paper's settings. `small` has the same cells on drawn birds with small networks, for a machine with two
cores: it shows that everything runs, and says nothing about the paper's claims.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from semaug.data.birds import VERSION, Birds
from semaug.data.readers import KNOWN
from semaug.data.samples import Select
from semaug.studies.cells import DATASETS, PAPER_FEATURES, Cell, ScaleName
from semaug.training.methods import METHODS, Augmentation, method_on
from semaug.training.settings import TrainConfig, identifying
from semaug.util.files import write_json


@dataclass(frozen=True)
class NetworkSpec:
    """A network of the paper, and its stand-in at small scale."""

    model: str
    small: str
    frozen: int = 0  # blocks
    small_frozen: int = 0
    small_lr: float = 0.005
    composite: str | None = None  # the composite model around it


# timm's tv_in1k are torchvision's first ImageNet weights, those of the paper's time. For MobileNetV2 and RegNetX-400MF
# torchvision now has newer ones. ViT's are the ImageNet-21k weights of its authors, which TransFG uses.
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
    "P2P-Net": NetworkSpec("resnet50.tv_in1k", "small", composite="p2p"),
    "ViT-B/16": NetworkSpec("vit_base_patch16_224.orig_in21k", "test_vit", small_lr=0.001),
}


@dataclass(frozen=True)
class World:
    """Drawn birds that stand in for a data set at small scale; each seed has other species."""

    species: int
    seed: int
    train: int = 40  # images of each species
    test: int = 20
    size: int = 64  # pixels


WORLDS = {
    "cub": World(12, 0),
    "aircraft": World(10, 1),
    "cars": World(12, 2),
    "nabirds": World(14, 3),
    "imagenet": World(16, 4),
}
_SMALL_STRENGTH = 0.3  # times the paper's λ0, as in the demonstration: 3 instead of 10
_SMALL_FEATURES = 64  # dimensions of the feature of "small"; CovNet's widths are in proportion
_SMALL_EPOCHS = 10
_DEEP_EPOCHS, _DEEP_LR = 4, 0.002  # at small scale, of the ResNets of various depths


@dataclass(frozen=True)
class Setup:
    """Settings that all runs of a reproduction share."""

    scale: ScaleName
    output: Path  # folder of the runs and the report
    data: Path | None = None  # folder of the paper's data sets; at small scale, of images instead of the drawn birds
    epochs: int | None = None  # of every run; None for the scale's own number
    select: Select = "val"  # how the epoch to keep is chosen
    best_of_test: bool = False  # also report the best epoch on the test split; needs `select` "last"
    device: str | None = None  # where to train; None for cuda if available


def stand_in(cell: Cell) -> str:
    """Name the model that stands in for a cell's network at small scale."""
    return cell.small_model or NETWORKS[cell.network].small


def data_note(dataset: str, setup: Setup) -> str:
    """Describe the stand-in for a data set at small scale."""
    if setup.data is not None:
        return f"the folder {setup.data.name}"
    world = WORLDS[dataset]
    return f"{world.species} drawn species, seed {world.seed}, chance {100 / world.species:.1f} %"


def train_config(cell: Cell, setup: Setup, seed: int = 0) -> TrainConfig:
    """Make the settings of a cell's run; equal settings have the same run directory, in whatever experiment."""
    config = _full(cell, setup) if setup.scale == "full" else _small(cell, setup)
    if setup.epochs is not None:
        config = replace(config, epochs=setup.epochs)
    config = replace(config, select=setup.select, best_of_test=setup.best_of_test, device=setup.device)
    folder = str(setup.data.resolve()) if setup.data is not None and setup.scale == "small" else cell.dataset
    data = [setup.scale, folder, asdict(WORLDS[cell.dataset])]
    name = stem((setup.scale, cell.dataset, str(config.model), config.method), config, data)
    return replace(config, seed=seed, output=setup.output / "runs" / f"{name}-s{seed}")


def stem(parts: Sequence[str], config: TrainConfig, data: Any) -> str:
    """Name a run without its seed: readable parts, and a digest of its data and of all settings that identify it."""
    settings = {name: value for name, value in asdict(config).items() if name in identifying()} | {"data": data}
    del settings["seed"]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return "-".join([*parts, digest]).replace("/", "-")


def method_of(cell: Cell) -> str:
    """Name the training method of a cell, on the network's composite model if it has one."""
    return method_on(NETWORKS[cell.network].composite, cell.method).name


def _full(cell: Cell, setup: Setup) -> TrainConfig:
    spec, imagenet = NETWORKS[cell.network], cell.dataset == "imagenet"
    config = TrainConfig(
        cell.dataset,
        setup.data,
        model=spec.model,
        method=method_of(cell),
        pretrained=not imagenet,
        recipe="p2p" if spec.composite else "fine-tune-cnn",  # the paper's, for transformers too
    )
    if spec.composite:  # the recipe is that of P2P-Net's release
        augmentation = Augmentation(strength=cell.strength, frozen_blocks=0)
        return replace(config, augmentation=METHODS[config.method].relevant(augmentation))
    augmentation = Augmentation(
        strength=cell.strength,
        strength_power=cell.power,
        width=cell.width,
        depth=cell.depth,
        meta_lr=cell.meta_lr or (0.0005 if imagenet else 0.001),
        meta_momentum=cell.momentum,
        frozen_blocks=(0 if imagenet else spec.frozen) if cell.frozen is None else cell.frozen,
        interval=100 if imagenet else 1,
    )
    return replace(
        config,
        epochs=120 if imagenet else 100,
        resize=256 if imagenet else 600,
        crop=224 if imagenet else 448,
        shape="aspect" if imagenet else "squash",
        crop_scale=0.08 if imagenet else None,
        batch_size=256 if imagenet else 64,
        optimizer="sgd",
        lr=0.1 if imagenet else 0.03,
        weight_decay=1e-4 if imagenet else 0.0,
        warmup_epochs=0.0 if imagenet else 5.0,
        images_on="stream" if imagenet else None,  # 250 GB decoded
        workers=max(2, (os.cpu_count() or 2) // max(1, torch.cuda.device_count())) if imagenet else 2,
        augmentation=METHODS[method_of(cell)].relevant(augmentation),
    )


def _small(cell: Cell, setup: Setup) -> TrainConfig:
    spec, model, method = NETWORKS[cell.network], stand_in(cell), method_of(cell)
    deep = model.startswith("resnet")
    own = spec.small_frozen if model == spec.small else 0
    augmentation = Augmentation(
        strength=round(_SMALL_STRENGTH * cell.strength, 4),
        strength_power=cell.power,
        width=None if cell.width is None else cell.width * _SMALL_FEATURES // PAPER_FEATURES,
        depth=cell.depth,
        meta_lr=cell.meta_lr or 0.001,
        meta_momentum=cell.momentum,
        frozen_blocks=own if cell.frozen is None else cell.frozen,
    )
    return TrainConfig(
        data=str((setup.data or _world_folder(setup.output, cell.dataset)).resolve()),
        model=model,
        method=method,
        pretrained=False,
        recipe="fine-tune-cnn",
        epochs=_DEEP_EPOCHS if deep else _SMALL_EPOCHS,
        resize=56,
        crop=48,  # a multiple of the transformer's patch
        batch_size=16,
        optimizer="adamw",
        lr=_DEEP_LR if deep else spec.small_lr,
        weight_decay=0.05,
        workers=0,
        cache=None,
        augmentation=METHODS[method].relevant(augmentation),
    )


def missing_data(dataset: str, setup: Setup) -> str:
    """Say why a data set cannot be used at the scale of `setup`; empty if it can."""
    if setup.scale == "small":
        alone = setup.data is not None and dataset != "cub"
        return f"the folder of images stands in for {DATASETS['cub']} only" if alone else ""
    root = setup.data or Path(os.environ.get("SEMAUG_DATA") or "data")
    known = KNOWN[dataset]
    folders = [root / folder for folder in known.folders]
    try:
        if any(known.recognise(folder) or (folder.is_dir() and folder != root) for folder in folders):
            return ""
    except OSError as error:
        return f"{DATASETS[dataset]} cannot be read: {error.strerror or error}"
    return f"needs {DATASETS[dataset]}, which is not in {root}"


def _world_folder(output: Path, dataset: str) -> Path:
    world = WORLDS[dataset]
    return output / "data" / f"birds-{world.species}-{world.seed}"


def draw_world(output: Path, dataset: str) -> None:
    """Draw a data set's stand-in below `output` as train/SPECIES and test/SPECIES, unless it exists."""
    world, folder = WORLDS[dataset], _world_folder(output, dataset)
    if folder.is_dir():
        return
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for split, count in (("train", world.train), ("test", world.test)):
        birds = Birds(world.species, count, split, world.size, world.seed)
        for i, label in enumerate(birds.labels):
            file = unfinished / split / birds.classes[label] / f"{i:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(birds.drawing(i).image).save(file)
    write_json(unfinished / "world.json", {"version": VERSION, **asdict(world)})
    unfinished.replace(folder)
