"""The settings of the benchmark, and the table of variants that it measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from semaug.meta.gradient import Engine
from semaug.network.network import FrozenBlocks
from semaug.training.settings import TrainConfig, required
from semaug.util.errors import SettingError
from semaug.util.ranges import CountOrZero, Positive, Range, Seed, Side, check_ranges, setting

INTERVAL = 10  # half steps between two meta updates, in the variants that skip some
STEPS = INTERVAL // 2  # steps in a turn: one meta update of those variants
LEAST_REPETITIONS = 3
SLOW_STEP = 1.0  # seconds: a variant with slower steps takes turns of one step
SLOW_SHARE = 0.1  # of `seconds`: a variant with slower steps takes one turn only
SLOW_COMPARISON = 5.0  # seconds: with slower steps, double backward is left out of the comparison of gradients
LEARNING_RATE, STRENGTH = 0.003, 5.0
PLAIN = "plain"

UpdatePart = Literal["all", "backbone"]
"""The parameters that the pseudo update changes: all, or all but the head."""


@dataclass(frozen=True)
class Variant:
    """A kind of training step to measure."""

    name: str  # what the user types
    title: str  # what tables and charts show
    method: str | None  # name of the training method; None for a plain loop without a learner
    overrides: Mapping[str, Any] = field(default_factory=dict)  # settings of the augmentation


_PAPER, _PIPELINED = {"order": "paper"}, {"order": "pipelined"}
_TABLE = (
    Variant(PLAIN, "plain cross-entropy", None),
    Variant("isda", "ISDA", "isda"),
    Variant("paper", "paper, jvp", "learnable", _PAPER | {"engine": "jvp"}),
    Variant("paper-double-backward", "paper, double backward", "learnable", _PAPER | {"engine": "double_backward"}),
    Variant("pipelined", "pipelined", "learnable", _PIPELINED),
    Variant("paper-interval", f"paper, interval {INTERVAL}", "learnable", {**_PAPER, "interval": INTERVAL}),
    Variant("pipelined-interval", f"pipelined, interval {INTERVAL}", "learnable", {**_PIPELINED, "interval": INTERVAL}),
)
VARIANTS = {variant.name: variant for variant in _TABLE}
ENGINES: dict[Engine, str] = {"jvp": "paper", "double_backward": "paper-double-backward"}
"""For each engine a variant that uses it."""


@dataclass(frozen=True)
class BenchConfig:
    """Settings of the benchmark."""

    model: str | None = setting(None, "main")
    """Network: a timm name, torchvision/NAME, or "small", a built-in CNN. Default: resnet50 on a GPU, resnet18 on a
    CPU."""
    pixels: Side | None = setting(None, "main")
    """Side of the images. Default: 448 on a GPU, 64 on a CPU."""
    half: Annotated[int, Range(2, 1_000_000)] | None = setting(None, "main")
    """Images per half batch; a step uses two halves. Default: 64 on a GPU, 8 on a CPU."""
    classes: Annotated[int, Range(2, 1_000_000)] = setting(200, "main")
    """Number of classes."""
    frozen_blocks: CountOrZero | Literal["stem"] | None = setting(None, "main")
    """Freeze the stem and the first N blocks in the pseudo update; stem freezes the stem alone, 0 nothing. Default: 10
    for resnet50, as in the paper; 5 for resnet18; 0 for other models."""
    precision: Literal["fp32", "bf16", "fp16"] | None = setting(None, "main")
    """Precision of the backbone. Default: bf16 on a GPU, fp32 on a CPU."""
    compile: bool = setting(False, "hardware")
    """Compile the network's forward and backward pass with torch.compile, for plain training too. Takes minutes."""
    cudnn_search: bool = setting(False, "hardware")
    """Let cuDNN search for its fastest algorithms first. Training does not do this. Takes minutes for networks with
    many kinds of convolutions."""
    graphs: bool = setting(True, "hardware")
    """On a GPU, replay steps as CUDA graphs, those of plain training too. fp16 cannot be replayed."""
    p2p: bool = setting(False, "model")
    """Measure P2P-Net with the network as its backbone, instead of the network alone."""
    skip: tuple[str, ...] = setting((), "main")
    """Variants to leave out: isda, paper, paper-double-backward, pipelined, paper-interval, pipelined-interval."""
    repetitions: Annotated[int, Range(LEAST_REPETITIONS, 1_000_000)] | None = setting(None, "schedule")
    """Number of repetitions, at least 3; the time limit may end the measurement earlier. Default: 9 on a GPU, 5 on a
    CPU."""
    seconds: Positive | None = setting(None, "schedule")
    """Time limit: after 3 repetitions, none is started that would exceed it. A variant whose step takes over
    a second takes turns of one step instead of five, unless it has an interval. If its step takes over a tenth of the
    limit, it takes a single turn. The comparison of the meta-gradients takes some seconds more. Default: 60 on a GPU,
    45 on a CPU."""
    output: Path = setting(Path("runs/bench"), "output")
    """Folder for bench.json (all numbers) and bench.svg (a chart)."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""
    seed: Seed = setting(0, "schedule")
    """Seed of all random numbers."""

    def resolve(self) -> "BenchConfig":
        """Fill in the defaults and check all values; device, precision and compile follow the rules of training."""
        train = TrainConfig(device=self.device, precision=self.precision, compile=self.compile).resolve()
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
        config = replace(self, **{key: value for key, value in defaults.items() if getattr(self, key) is None})
        config._check()
        return config

    def _check(self) -> None:
        check_ranges(self)
        if PLAIN in self.skip:
            raise SettingError(f"{PLAIN!r} cannot be skipped: the other variants are measured against it")
        for name in self.skip:
            if name not in VARIANTS:
                raise SettingError(f"unknown variant {name!r}; the variants are {', '.join(VARIANTS)}")

    @property
    def variants(self) -> list[str]:
        """Names of the variants to measure."""
        return [name for name in VARIANTS if name not in self.skip]

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return str(self.device).startswith("cuda")

    @property
    def graphed(self) -> bool:
        """Whether steps are replayed as CUDA graphs."""
        return self.on_cuda and self.graphs and self.precision != "fp16"

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; None for fp32."""
        return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[str(self.precision)]

    def __str__(self) -> str:
        network = f"P2P-Net on {self.model}" if self.p2p else self.model
        parts = [
            f"{network}, {self.pixels} px, {self.half} + {self.half} images, {self.classes} classes",
            f"{frozen_text(required(self.frozen_blocks))}, {self.precision}",
        ]
        parts += ["compiled"] * self.compile + ["cuDNN searched"] * self.cudnn_search
        parts += ["CUDA graphs"] * self.graphed
        return ", ".join(parts)


def frozen_text(blocks: FrozenBlocks) -> str:
    """Say what is frozen in the pseudo update: "10 blocks frozen", for example."""
    if blocks == "stem":
        return "stem frozen"
    return f"{blocks or 'no'} block{'s' if blocks != 1 else ''} frozen"
