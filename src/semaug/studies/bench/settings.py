"""What is measured, and on what."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from semaug.meta.gradient import Engine
from semaug.training.settings import TrainConfig, given
from semaug.util.errors import SemaugError

INTERVAL = 10  # half steps between two meta updates in the methods that do not make one in each
STEPS = INTERVAL // 2  # in a turn
LEAST_REPETITIONS = 3
SLOW_STEP = 1.0  # seconds: a method whose step takes longer takes turns of one step
SLOW_SHARE = 0.1  # of --seconds: a slow method whose step takes longer is measured in one repetition
SLOW_COMPARISON = 5.0  # seconds: double backward is not compared where its step took longer
LEARNING_RATE, STRENGTH = 0.003, 5.0

PLAIN = "plain"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # name on the command line → title, settings of the augmentation
    PLAIN: ("plain cross-entropy", {}),
    "isda": ("ISDA", {}),
    "paper": ("paper, jvp", {"order": "paper", "engine": "jvp"}),
    "paper-double-backward": ("paper, double backward", {"order": "paper", "engine": "double_backward"}),
    "pipelined": ("pipelined", {"order": "pipelined"}),
    "paper-interval": (f"paper, interval {INTERVAL}", {"order": "paper", "interval": INTERVAL}),
    "pipelined-interval": (f"pipelined, interval {INTERVAL}", {"order": "pipelined", "interval": INTERVAL}),
}
ENGINES: dict[Engine, str] = {"jvp": "paper", "double_backward": "paper-double-backward"}  # and a method that uses it

Part = Literal["all", "backbone"]  # of the pseudo update

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class BenchConfig:
    """Measure what a training step costs, method by method."""

    model: str | None = None
    """timm name, torchvision/NAME, or "small", a small network of our own; resnet50 on a GPU, resnet18 on a CPU."""
    pixels: int | None = None
    """Side of the images: 448 on a GPU, 64 on a CPU if not given."""
    half: int | None = None
    """Images per half batch; a step sees two halves. 64 on a GPU, 8 on a CPU if not given."""
    classes: int = 200
    """Number of classes."""
    frozen_blocks: int | None = None
    """The stem and this many blocks keep out of the pseudo update; 10 for resnet50, as in the paper, 5 for resnet18,
    0 for other models if not given."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """bf16 on a GPU, fp32 on a CPU if not given."""
    compile: bool = False
    """Speed up the network's forward and backward pass, plain training's too, by torch.compile; it takes minutes."""
    cudnn_search: bool = False
    """Let cuDNN search for its fastest algorithms first, which training does not do: with many kinds of convolutions it
    takes minutes."""
    skip: tuple[str, ...] = ()
    """Methods to leave out: isda, paper, paper-double-backward, pipelined, paper-interval, pipelined-interval."""
    repetitions: int | None = None
    """Turns of each method, at least 3, but see --seconds; 9 on a GPU, 5 on a CPU if not given."""
    seconds: float | None = None
    """No further repetition begins that would end later than this, but there are 3 in any case. A method whose step
    takes over a second takes turns of one step instead of five, unless it has an interval, and a single turn if its
    step takes over a tenth of this time too. Comparing the meta-gradients takes some seconds more. 60 on a GPU, 45 on a
    CPU if not given."""
    output: Path = Path("runs/bench")
    """Folder for bench.json (all figures) and bench.svg (a chart)."""
    device: str | None = None
    """cuda if there is one, else cpu."""
    seed: int = 0
    """Seed of all random numbers."""

    def filled(self) -> "BenchConfig":
        """The same configuration with every default made explicit; device, precision and compile as in training."""
        train = TrainConfig(device=self.device, precision=self.precision, compile=self.compile).filled()
        devices = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if train.device not in devices:
            raise SemaugError(
                f"--device must be cpu or cuda, or one of several GPUs such as cuda:0, not {train.device!r}"
            )
        gpu = train.device != "cpu"
        model = self.model or ("resnet50" if gpu else "resnet18")
        defaults: dict[str, Any] = {
            "model": model,
            "pixels": 448 if gpu else 64,
            "half": 64 if gpu else 8,
            "frozen_blocks": {"resnet50": 10, "resnet18": 5}.get(model, 0),
            "repetitions": 9 if gpu else 5,
            "seconds": 60.0 if gpu else 45.0,
            "device": train.device,
            "precision": train.precision,
        }
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        config = replace(self, **missing)
        config._check()
        return config

    def _check(self) -> None:
        for name, least in (
            ("pixels", 1),
            ("half", 2),
            ("classes", 2),
            ("frozen_blocks", 0),
            ("repetitions", LEAST_REPETITIONS),
        ):
            if getattr(self, name) < least:
                raise SemaugError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if not (math.isfinite(given(self.seconds)) and given(self.seconds) > 0):
            raise SemaugError(f"--seconds must be a positive number, not {self.seconds:g}")
        if PLAIN in self.skip:
            raise SemaugError(f"{PLAIN!r} cannot be skipped: the other methods are measured against it")
        for name in self.skip:
            if name not in METHODS:
                raise SemaugError(f"unknown method {name!r}; the methods are {', '.join(METHODS)}")

    @property
    def methods(self) -> list[str]:
        return [name for name in METHODS if name not in self.skip]

    @property
    def autocast(self) -> torch.dtype | None:
        return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[str(self.precision)]

    def __str__(self) -> str:
        parts = [
            f"{self.model}, {self.pixels} px, {self.half} + {self.half} images, {self.classes} classes",
            f"{self.frozen_blocks or 'no'} block{'s' if self.frozen_blocks != 1 else ''} frozen, {self.precision}",
        ]
        return ", ".join(
            [*parts, *(["compiled"] if self.compile else []), *(["cuDNN searched"] if self.cudnn_search else [])]
        )
