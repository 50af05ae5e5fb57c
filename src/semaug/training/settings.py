"""Settings of a training run. The command line is generated from them."""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch

from semaug.data.images import NORMALIZATIONS, Normalization, Preprocessing, Shape, normalization_named
from semaug.data.readable import OnBadImage
from semaug.data.samples import Select
from semaug.inference.runs import origin_of_weights, read_description
from semaug.network.pretrained import pixel_statistics
from semaug.training.methods import METHODS, Augmentation, MethodName
from semaug.training.recipes import RECIPES, RecipeName, choose_recipe, describe_recipes
from semaug.training.tracking import Track
from semaug.util.devices import choose_device
from semaug.util.errors import SemaugError, SettingError
from semaug.util.ranges import (
    BelowOne,
    Border,
    Count,
    CountOrZero,
    NotNegative,
    Portion,
    Positive,
    Range,
    Seed,
    Share,
    Side,
    Workers,
    check_ranges,
    setting,
)

Value = TypeVar("Value")


Freeze = int | Literal["all"]
"""The frozen part of the network: the stem and the first N blocks, or all but the head."""


def required(value: Value | None) -> Value:
    """Return a setting that :meth:`TrainConfig.resolve` has set."""
    assert value is not None
    return value


@dataclass(frozen=True)
class TrainConfig:
    """Train a classifier of look-alike classes."""

    data: str = setting("birds", "main")
    """Name of a data set (birds, cub, aircraft, cars, nabirds, imagenet), or path of a folder or table of images."""
    data_root: Path | None = setting(None, "data", identifies=False)
    """Folder of the named data sets. Default: $SEMAUG_DATA, or ./data."""
    download: bool = setting(False, "data", identifies=False)
    """Download a named data set that is missing, if its host still offers it."""
    model: str | None = setting(None, "main")
    """Network: a timm name, or torchvision/NAME; with -v1 appended (resnet50-v1) for ResNet weights of Keras. Default:
    resnet50; on the embedded birds "small", a built-in CNN."""
    weights: Path | None = setting(None, "model")
    """Weights to start from: a finished run, or a .safetensors file. Other formats can hold code and are refused. If
    both runs draw validation images from the same data, both need the same seed. Default: those of `pretrained`."""
    pretrained: bool | None = setting(None, "model")
    """Start from the pretrained weights of timm or torchvision. Default: yes, except with your own weights, "small" or
    the birds."""
    method: MethodName = setting("isda", "main")
    """Training method. Default: isda, the best in our comparisons; the paper's is learnable."""
    recipe: RecipeName | None = field(
        default=None, metadata={"group": "schedule", "identifies": False, "help": describe_recipes()}
    )
    """Name of a row of :data:`semaug.training.recipes.RECIPES`, whose settings are defaults of those below."""
    epochs: Count | None = setting(None, "main")
    """Number of epochs. Default: 100, or the recipe's."""
    output: Path | None = setting(None, "main", identifies=False)
    """Run directory. Default: runs/DATA-MODEL-METHOD-SEED. An interrupted run there is resumed."""
    seed: Seed = setting(0, "schedule")
    """Seed of all random numbers."""
    resume: bool = setting(True, "output", identifies=False)
    """Resume an unfinished run in the run directory. If disabled, such a run is an error."""
    keep_checkpoints: bool = setting(False, "output", identifies=False)
    """Keep the checkpoints of a finished run: several times the size of the model, and needed only to restore it."""

    augmentation: Augmentation = field(default_factory=Augmentation)

    resize: Side | None = setting(None, "main")
    """Side in pixels of the square that images are resized to. Default: 600, or the recipe's."""
    crop: Side | None = setting(None, "main")
    """Side in pixels of the crop. Default: 448, or the recipe's."""
    shape: Shape = setting("squash", "data")
    """How images become square: squash resizes both sides, as in the paper; aspect takes the central square."""
    crop_scale: Portion | None = setting(None, "data")
    """Train on crops of random size, resized to `crop`, with at least this share of the image's area. For training from
    scratch (ImageNet: 0.08). Default: crops of a fixed size, or the recipe's."""
    padding: Border | None = setting(None, "data")
    """Width in pixels of a black border around training images, before the crop. Default: 0, or the recipe's."""
    normalize: Normalization | None = setting(None, "data")
    """Mean and deviation by which pixels are normalised: those of ImageNet (imagenet), of CLIP or DPN, or 0.5 (half);
    none leaves them from 0 to 1. Default: those of the weights that training starts from, or the recipe's, or
    imagenet."""

    freeze: Annotated[Freeze | None, Range(0, 10_000)] = setting(None, "model")
    """Do not train the stem and the first N blocks of the network; BatchNorm uses its stored statistics there. all: a
    linear probe. Features of centre crops and their mirror images are computed once and cached, and the head is trained
    on them, on a CPU in minutes. (`frozen_blocks` concerns the pseudo update of the meta loop alone.) Default: 0,
    nothing, or the recipe's."""
    drop_path: BelowOne | None = setting(None, "model")
    """Rate of drop path (stochastic depth) in the network's last block; it falls linearly towards the first. Default:
    0, or the recipe's."""

    batch_size: Count | None = setting(None, "main")
    """Images per update over all processes; a loaded batch has two such halves. Default: 64, or the recipe's."""
    micro_batch: Count | None = setting(None, "hardware")
    """Maximum number of images in one forward pass, to save memory; gradients are accumulated. Default: all of
    the batch."""
    optimizer: Literal["sgd", "adamw"] | None = setting(None, "schedule")
    """Optimiser of the network. Default: sgd, or the recipe's."""
    lr: Positive | None = setting(None, "main")
    """Learning rate of the network (of P2P-Net's backbone: a tenth of it), with cosine decay to zero. Default: from the
    batch size, 0.03 · B/64 for sgd, 0.0001 · √(B/64) for adamw, or the recipe's."""
    layer_decay: Portion | None = setting(None, "schedule")
    """Factor of the learning rate from each block of the network to the one before it, as in timm; biases and norms
    then have no weight decay. Default: 1, the same rate for all, or the recipe's."""
    momentum: BelowOne = setting(0.9, "schedule")
    """Momentum of sgd."""
    weight_decay: NotNegative | None = setting(None, "schedule")
    """Weight decay of the network. Default: 0 for sgd, 0.05 for adamw, or the recipe's."""
    warmup_epochs: NotNegative | None = setting(None, "schedule")
    """Warm-up: epochs over which the learning rate grows from zero; at most a tenth of all epochs. Default: 5, or the
    recipe's."""
    lr_decay: Literal["step", "epoch"] | None = setting(None, "schedule")
    """Whether the learning rate falls after every step or after every epoch. Default: step, or the recipe's."""
    label_smoothing: BelowOne = setting(0.0, "method")
    """Label smoothing: share of the label that is spread over all classes."""
    sampler: Literal["shuffle", "balanced", "square-root"] = setting("shuffle", "data")
    """How the images of an epoch are drawn: each once, in random order (shuffle), or with replacement, such that all
    classes are seen equally often (balanced), or in proportion to the square root of their number of images."""
    class_weights: Literal["none", "balanced", "square-root"] = setting("none", "method")
    """Weight of an image in the loss, if its class has n training images: in proportion to 1/n (balanced) or 1/√n
    (square-root). The mean weight of all training images is 1."""
    clip_norm: Positive | None = setting(None, "schedule")
    """Clip the gradient to this norm. Default: no clipping."""
    ema: BelowOne | None = setting(None, "model")
    """Decay of a moving average of the weights (0.999, for example), which is then evaluated and saved; smaller in the
    first steps. Default: 0, no average, or the recipe's."""
    sync_batch_norm: bool = setting(False, "model")
    """Under torchrun: let BatchNorm normalise over the images of all processes instead of each process's own."""
    validate_every: Count = setting(1, "schedule")
    """Validate every N epochs, and after the last one."""
    patience: Count | None = setting(None, "schedule")
    """Stop when the validation accuracy has not improved for this many epochs. Default: never."""

    val_fraction: Share = setting(0.1, "data")
    """Share of the training images to validate on, if the data set has no validation split."""
    val_per_class: CountOrZero | None = setting(None, "data")
    """Validate on this many training images of each class instead. Default:
    `val_fraction` of them."""
    select: Select = setting("val", "data")
    """Which epoch's weights are saved as the model. val: the best epoch on a validation split. last: the last epoch,
    trained on all training images and evaluated once, on the test split; use it for results to publish. test: the best
    epoch on the test split, as in much published code; its accuracy is too high, and comparable with such results
    only."""
    select_by: Literal["top1", "mean-of-classes"] = setting("top1", "data")
    """The accuracy by which the best epoch is chosen: the share of all images (top1), or the mean over the classes, in
    which a class of two images counts as much as one of a hundred."""
    best_of_test: bool = setting(False, "data")
    """With `select` last: also evaluate on the test split after every validated epoch, and store the best accuracy
    beside the last epoch's. Like that of `select` test, it is too high."""

    device: str | None = setting(None, "hardware", identifies=False)
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""
    precision: Literal["fp32", "bf16", "fp16"] | None = setting(None, "hardware")
    """Precision of the network. Default: bf16 on a GPU, fp32 on a CPU."""
    compile: bool = setting(False, "hardware", identifies=False)
    """Speed up the network with torch.compile; the first steps then take minutes."""
    graphs: bool = setting(True, "hardware", identifies=False)
    """On a GPU, replay training steps as CUDA graphs: the same numbers in less time."""
    workers: Workers = setting(2, "hardware", identifies=False)
    """Number of processes that decode images, for each process of torchrun."""
    cache: Path | None = setting(Path("~/.cache/semaug"), "data", identifies=False)
    """Folder for decoded images, shared by runs. None: in memory only."""
    on_bad_image: OnBadImage = setting("stop", "data", identifies=False)
    """Unreadable images: stop before training and list them, or skip them. With streamed images, stop does not check
    them in advance: the first one ends training."""
    track: Track | None = setting(None, "output", identifies=False)
    """Also log settings, metrics and evaluation to TensorBoard (OUTPUT/tensorboard) or Weights & Biases. Needs pip
    install '.[tensorboard]' or '.[wandb]'. Default: neither."""
    images_on: Literal["gpu", "ram", "stream"] | None = setting(None, "data", identifies=False)
    """Where decoded images are kept: GPU memory, RAM, or nowhere (stream: decode every epoch, for data larger than
    memory and disk). Default: gpu if they take less than half of its free memory, else ram."""

    def resolve(self) -> "TrainConfig":
        """The same settings with all defaults filled in.

        Raises:
            SettingError: If a setting is out of range.
        """
        check_ranges(self)
        embedded, method = self.data == "birds", METHODS[self.method]
        model = self.model or ("small" if embedded else "resnet50")
        default = self.weights is None and not embedded and model != "small"
        pretrained = default if self.pretrained is None else self.pretrained
        from_weights = pretrained or self.weights is not None
        automatic = choose_recipe(self.data, method.composite, self.freeze, model, from_weights)
        recipe = automatic if self.recipe is None else RECIPES[self.recipe]
        device = choose_device(self.device)
        name = f"{Path(self.data).stem}-{model.replace('/', '-')}-{self.method}-{self.seed}"
        defaults: dict[str, Any] = {
            **recipe.defaults(self.optimizer, self.batch_size),
            "recipe": recipe.name,
            "model": model,
            "pretrained": pretrained,
            "device": device,
            "precision": "bf16" if device.startswith("cuda") else "fp32",
            "output": Path("runs") / name,
        }
        if from_weights and "normalize" not in recipe.settings:
            defaults["normalize"] = _normalization(model, self.weights)
        if self.crop_scale is not None:
            defaults["padding"] = 0  # which crops of random size do not have
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        config = replace(self, augmentation=method.resolve(self.augmentation), **missing)
        config._check()
        return config

    def _check(self) -> None:
        method = METHODS[self.method]
        if self.freeze == "all":
            if not method.fits_features:
                names = ", ".join(name for name, row in METHODS.items() if row.fits_features)
                raise SettingError(f"`freeze` all trains on cached features; its methods are {names}")
            if self.padding or self.crop_scale or self.drop_path or self.layer_decay != 1:
                raise SettingError(
                    "`freeze` all computes features of centre crops and trains the head alone; leave out `padding`, "
                    "`crop_scale`, `drop_path`, `layer_decay`, and a `recipe` that sets them"
                )
        if method.composite is not None and self.layer_decay != 1:
            raise SettingError("`layer_decay` does not work with P2P-Net, which has two learning rates of its own")
        if self.select == "last" and self.patience is not None:
            raise SettingError("`patience` needs a validation split; `select` last has none")
        _ = self.preprocessing  # raises a SettingError if its sizes do not go together
        if self.best_of_test and self.select != "last":
            raise SettingError("`best_of_test` needs `select` last")
        if self.compile and self.device == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise SettingError("`compile` needs a C++ compiler on a CPU, and none is installed; train without it")

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of images."""
        sizes, (mean, std) = (required(self.resize), required(self.crop)), NORMALIZATIONS[required(self.normalize)]
        return Preprocessing(*sizes, self.shape, mean, std, required(self.padding), self.crop_scale)

    @property
    def autocast(self) -> torch.dtype | None:
        """Data type of mixed precision; None in full precision."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self.precision))

    def to_json(self) -> dict[str, Any]:
        """Settings by name, as they are after a round trip through JSON."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return settings


def identifying() -> frozenset[str]:
    """Names of the settings that must stay the same when a run is resumed; others say where and how fast it runs."""
    return frozenset(option.name for option in fields(TrainConfig) if option.metadata.get("identifies", True))


def _normalization(model: str, weights: Path | None) -> Normalization:
    """The normalisation that trained weights expect: of the run that they come from, or of timm's for this network."""
    statistics = pixel_statistics(model)
    if weights is not None and (origin := origin_of_weights(weights)) is not None:
        with suppress(SemaugError):  # a folder of another kind
            own = read_description(origin).preprocessing
            statistics = own.mean, own.std
    return (statistics and normalization_named(*statistics)) or "imagenet"
