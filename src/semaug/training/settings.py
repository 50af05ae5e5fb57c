"""The settings of a training run; the command line is made from them."""

import shutil
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from semaug.training.methods import METHODS, Augmentation, MethodName
from semaug.util.errors import SemaugError

Value = TypeVar("Value")


def given(value: Value | None) -> Value:
    """A setting that :meth:`TrainConfig.filled` has filled in."""
    assert value is not None
    return value


def _free(default: Value) -> Value:
    """A setting that does not identify a run: it may change when the run is resumed."""
    return field(default=default, metadata={"identifies": False})


@dataclass(frozen=True)
class TrainConfig:
    """Train a classifier of look-alike classes."""

    data: str = "birds"
    """Name of a data set (birds, cub, aircraft, cars, nabirds, imagenet), or path of a folder or table of images."""
    data_root: Path | None = _free(None)
    """Folder that holds the named data sets; $SEMAUG_DATA, or ./data, if not given."""
    download: bool = _free(False)
    """Fetch a named data set that is not there, where its host still offers it."""
    model: str | None = None
    """timm name, or torchvision/NAME; resnet50 if not given (a small network of our own on the embedded birds)."""
    weights: Path | None = None
    """Weights to start from: a .safetensors file, or a .pth file (which is read without unpickling)."""
    pretrained: bool | None = None
    """Start from the library's ImageNet weights; yes if not given, except with --weights, for our own small network, or
    on the embedded birds."""
    method: MethodName = "isda"
    """How to train: isda did best in our comparisons (docs/learning-the-covariance.md); learnable is the paper's."""
    epochs: int | None = None
    """100 as in the paper if not given, 300 for P2P-Net; 15 on the embedded birds."""
    output: Path | None = _free(None)
    """The run directory; runs/DATA-MODEL-METHOD-SEED if not given. A run that was broken off there goes on."""
    seed: int = 0
    """Seed of all random numbers."""
    resume: bool = _free(True)
    """Go on with an unfinished run in the output directory; otherwise it is an error that there is one."""

    augmentation: Augmentation = field(default_factory=Augmentation)

    resize: int | None = None
    """Side of the square that images are resized to: 600 as in the paper; 96 on the embedded birds."""
    crop: int | None = None
    """Side of the crop: 448 as in the paper; 88 on the embedded birds."""
    shape: Literal["squash", "aspect"] = "squash"
    """Resize both sides (the paper), or keep the aspect ratio and take the middle square."""

    batch_size: int | None = None
    """Images per update, of all processes together; a loaded batch holds two such halves. 64 as in the paper; 16 on the
    embedded birds."""
    micro_batch: int | None = None
    """At most this many images go through the network at once; gradients are summed: the same batch on a small GPU."""
    optimizer: Literal["sgd", "adamw"] | None = None
    """Optimiser of the network: SGD as in the paper; AdamW on the embedded birds, from scratch."""
    lr: float | None = None
    """Learning rate of the network, with cosine decay to zero: 0.03 for SGD as in the paper, 0.005 for AdamW; for
    P2P-Net 0.002, that of its new layers, of which the backbone has a tenth."""
    momentum: float = 0.9
    """Momentum (SGD)."""
    weight_decay: float | None = None
    """Weight decay of the network: 0 for SGD as in the paper (0.0005 for P2P-Net), 0.05 for AdamW."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate grows from zero (at most a tenth of all)."""
    label_smoothing: float = 0.0
    """Share of the label that goes to all classes alike."""
    clip_norm: float | None = None
    """Largest norm of the gradient."""
    ema: float | None = None
    """Decay of a running average of the weights, which is then what is evaluated and kept (0.999, say)."""
    sync_batch_norm: bool = False
    """Under torchrun, let BatchNorm normalise by the images of all processes; otherwise by those of each."""
    patience: int | None = None
    """Stop when the validation accuracy has not risen for this many epochs."""

    val_fraction: float = 0.1
    """Share of the training images held out to choose the best epoch, where the data has no validation split."""
    val_per_class: int | None = None
    """Hold out this many images of each class instead."""
    select: Literal["val", "test"] = "val"
    """Choose the best epoch on the validation split. "test" trains on all images and chooses on the test split, as
    much published code does: the figure is then too good, and good for comparison with such figures only."""

    device: str | None = _free(None)
    """cuda if there is one, else cpu."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """bf16 on a GPU, fp32 on a CPU if not given."""
    compile: bool = _free(False)
    """Speed up the network's forward and backward pass by torch.compile; the first steps then take minutes."""
    workers: int = _free(2)
    """Processes that decode images: when the cache is built, or all the time with --images-on stream (for each process
    that torchrun starts)."""
    cache: Path | None = _free(Path("~/.cache/semaug"))
    """Folder of decoded images, shared by runs; --cache None keeps them in memory only."""
    on_bad_image: Literal["stop", "skip"] = _free("stop")
    """Images that cannot be read are listed before training starts. stop: train only when there are none; skip: go on
    without them. With --images-on stream they are looked for with skip alone; otherwise the first one ends training."""
    track: Literal["tensorboard", "wandb"] | None = _free(None)
    """Show settings, metrics of each epoch and the final evaluation in TensorBoard (OUTPUT/tensorboard) or Weights &
    Biases too; a run that goes on, goes on there. Needs pip install 'semaug[tensorboard]' or 'semaug[wandb]'."""
    images_on: Literal["gpu", "ram", "stream"] | None = _free(None)
    """Where decoded images lie during training: on the GPU if they take less than half of its memory. stream: nowhere;
    they are decoded again in every epoch, just ahead of the step, for data that is larger than memory or disk."""

    def filled(self) -> "TrainConfig":
        """The same configuration with every default made explicit."""
        embedded, method = self.data == "birds", METHODS[self.method]
        adamw = self.optimizer == "adamw" or (self.optimizer is None and embedded)
        model = self.model or ("small" if embedded else "resnet50")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = f"{Path(self.data).stem}-{model.replace('/', '-')}-{self.method}-{self.seed}"
        defaults: dict[str, Any] = {
            "model": model,
            "pretrained": self.weights is None and not embedded and model != "small",
            "epochs": 15 if embedded else method.defaults.get("epochs", 100),
            "resize": 96 if embedded else 600,
            "crop": 88 if embedded else 448,
            "batch_size": 16 if embedded else 64,
            "optimizer": "adamw" if adamw else "sgd",
            "lr": 0.005 if adamw else method.defaults.get("lr", 0.03),
            "weight_decay": 0.05 if adamw else method.defaults.get("weight_decay", 0.0),
            "device": device,
            "precision": "bf16" if device.startswith("cuda") else "fp32",
            "output": Path("runs") / name,
        }
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        augmentation = self.augmentation
        if (
            embedded and method.composite is None and augmentation.strength is None
        ):  # learned from scratch, features spread more
            augmentation = replace(augmentation, strength=3.0)
        config = replace(self, augmentation=method.resolve(augmentation), **missing)
        config._check()
        return config

    def _check(self) -> None:
        for condition, message in (
            (given(self.epochs) < 1, f"--epochs must be at least 1, not {self.epochs}"),
            (given(self.batch_size) < 1, f"--batch-size must be at least 1, not {self.batch_size}"),
            (self.micro_batch is not None and self.micro_batch < 1, "--micro-batch must be at least 1"),
            (not given(self.lr) > 0, f"--lr must be positive, not {self.lr}"),
            (not 0 < self.val_fraction < 1, f"--val-fraction must lie between 0 and 1, not {self.val_fraction}"),
            (self.ema is not None and not 0 < self.ema < 1, f"--ema must lie between 0 and 1, not {self.ema}"),
        ):
            if condition:
                raise SemaugError(message)
        if self.compile and self.device == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise SemaugError("--compile needs a C++ compiler on a CPU, and there is none; leave out --compile")
        if str(self.device).startswith("cuda") and not torch.cuda.is_available():
            raise SemaugError("there is no CUDA device here; leave out --device or say --device cpu")


def identifying() -> frozenset[str]:
    """Names of the settings that identify a run.

    Returns:
        The fields of :class:`TrainConfig` that must be the same when a run is resumed; the others say where and how
        fast it runs.
    """
    return frozenset(setting.name for setting in fields(TrainConfig) if setting.metadata.get("identifies", True))
