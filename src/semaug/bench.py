"""What a training step costs on this machine, method by method, and how well the meta-gradient engines agree.

:func:`measure` times all methods in one run. They take turns within every repetition, so that a change of clock or load
meets all of them, and each repetition gives one ratio to plain training; figures are medians, and the spread is half of
the interquartile range. One step is two half steps (for plain training: two updates) on the halves of one batch, and a
turn is five steps: one whole cycle of a meta loop that runs every tenth half step.

Memory, on CUDA only, is the peak above what plain training holds between two steps (model, gradients, optimiser):
activations, and what a method holds from one step to the next (CovNet; in the pipelined order, the last half batch).

The images are noise and the weights those of initialisation, so a step costs what it costs in training, but nothing is
learned; as a step should not wait for the host, the check of values is off.

Then the meta-gradient of CovNet's θ_g is compared: that of either engine, in the precision of the run, with the other's
and with a reference in higher precision, at the same parameters, batch and random state, in training mode and not
compiled. Most of it goes through the head, where the engines hardly differ (on a ResNet less than a hundredth goes
through the backbone). So the comparison is made a second time with the head kept out of the pseudo update, which leaves
the backbone's part alone.
"""

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from semaug import methods
from semaug.blocks import find_head
from semaug.config import TrainConfig, given
from semaug.errors import UserError
from semaug.meta import LearnableAugmentation
from semaug.metagrad import Engine
from semaug.models import build_model
from semaug.network import Network
from semaug.progress import Progress
from semaug.views import random_state

INTERVAL = 10  # half steps between two meta updates in the methods that do not make one in each
STEPS = INTERVAL // 2  # in a turn
LEAST_REPETITIONS = 3
LEARNING_RATE, STRENGTH = 0.003, 5.0

PLAIN = "plain"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # name on the command line → title, settings of the augmentation
    PLAIN: ("plain cross-entropy", {}),
    "isda": ("ISDA", {}),
    "paper": ("paper order, jvp", {"order": "paper", "engine": "jvp"}),
    "paper-double-backward": ("paper order, double backward", {"order": "paper", "engine": "double_backward"}),
    "pipelined": ("pipelined", {"order": "pipelined"}),
    "paper-interval": (f"paper order, interval {INTERVAL}", {"order": "paper", "interval": INTERVAL}),
    "pipelined-interval": (f"pipelined, interval {INTERVAL}", {"order": "pipelined", "interval": INTERVAL}),
}
ENGINES: dict[Engine, str] = {"jvp": "paper", "double_backward": "paper-double-backward"}  # and a method that uses it

OUT_OF_MEMORY = "out of memory"
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
    skip: tuple[str, ...] = ()
    """Methods to leave out: isda, paper, paper-double-backward, pipelined, paper-interval, pipelined-interval."""
    repetitions: int | None = None
    """Turns of each method, at least 3; 9 on a GPU, 5 on a CPU if not given."""
    seconds: float | None = None
    """No further repetition begins that would end later than this, but there are 3 in any case; comparing the
    meta-gradients takes some seconds more. 60 on a GPU, 45 on a CPU if not given."""
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
            raise UserError(
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
                raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if not (math.isfinite(given(self.seconds)) and given(self.seconds) > 0):
            raise UserError(f"--seconds must be a positive number, not {self.seconds:g}")
        if PLAIN in self.skip:
            raise UserError(f"{PLAIN!r} cannot be skipped: the other methods are measured against it")
        for name in self.skip:
            if name not in METHODS:
                raise UserError(f"unknown method {name!r}; the methods are {', '.join(METHODS)}")

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
        return ", ".join([*parts, *(["compiled"] if self.compile else [])])


# ----------------------------------------------------------------------------------------------------------- results


@dataclass
class Timing:
    """What was measured of one method."""

    title: str
    seconds: list[float] = field(default_factory=list)  # per step, one for each repetition
    memory: int | None = None  # bytes
    failure: str | None = None  # one sentence


@dataclass(frozen=True)
class Agreement:
    """Cosine of two meta-gradients, and their distance relative to the length of the second."""

    part: Part
    of: str
    against: str
    cosine: float
    relative_error: float


@dataclass(frozen=True)
class Result:
    """What :func:`measure` found; `config` has all defaults filled in."""

    config: BenchConfig
    device: str
    timings: dict[str, Timing]
    reference: str | None  # what the reference for the meta-gradients is
    agreements: list[Agreement]
    notes: list[str]

    @property
    def repetitions(self) -> int:
        return max(len(timing.seconds) for timing in self.timings.values())

    def ratio(self, name: str) -> tuple[float, float] | None:
        """Median and spread of a method's time relative to plain training's in the same repetition."""
        own, plain = self.timings[name], self.timings[PLAIN]
        if own.failure or plain.failure:
            return None
        return median_and_spread([a / b for a, b in zip(own.seconds, plain.seconds, strict=True)])

    def memory_ratio(self, name: str) -> float | None:
        """A method's peak of memory relative to plain training's."""
        own, plain = self.timings[name].memory, self.timings[PLAIN].memory
        return own / plain if own is not None and plain else None

    def heading(self) -> list[str]:
        """What was measured, and where."""
        count = torch.get_num_threads()
        cuda = str(self.config.device).startswith("cuda")
        threads = "" if cuda else f", {count} thread{'s' if count != 1 else ''}"
        return [str(self.config), f"{self.device}{threads}, torch {torch.__version__}"]

    def to_json(self) -> dict[str, Any]:
        """All of it in plain types; times in milliseconds, memory in bytes."""
        images = 2 * given(self.config.half)
        rows: dict[str, Any] = {}
        for name, timing in self.timings.items():
            rows[name] = {"title": timing.title, "failure": timing.failure}
            if timing.failure:
                continue
            middle, spread = median_and_spread(timing.seconds)
            ratio, ratio_spread = self.ratio(name) or (None, None)
            rows[name] |= {
                "ms_per_step": 1e3 * middle,
                "ms_per_step_spread": 1e3 * spread,
                "ms_per_image": 1e3 * middle / images,
                "ratio": ratio,
                "ratio_spread": ratio_spread,
                "ms_per_step_by_repetition": [1e3 * seconds for seconds in timing.seconds],
            }
            if timing.memory is not None:
                rows[name] |= {"peak_memory": timing.memory, "peak_memory_ratio": self.memory_ratio(name)}
        cuda = str(self.config.device).startswith("cuda")
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "device": self.device,
            "threads": None if cuda else torch.get_num_threads(),
            "settings": {**asdict(self.config), "output": str(self.config.output)},
            "repetitions": self.repetitions,
            "steps_per_repetition": STEPS,
            "images_per_step": images,
            "methods": rows,
            "meta_gradient": {"reference": self.reference, "agreement": [asdict(row) for row in self.agreements]},
            "notes": self.notes,
        }

    def table(self) -> Group:
        """Tables for a person: costs, then the agreement of the meta-gradients."""
        parts: list[Any] = [self._costs()]
        failures = [
            f"{t.title}: {t.failure}" for t in self.timings.values() if t.failure and t.failure != OUT_OF_MEMORY
        ]
        if self.agreements:
            parts.append(self._agreement())
        return Group(*parts, *(Text(sentence) for sentence in [*failures, *self.notes]))

    def _costs(self) -> Table:
        memory = any(timing.memory is not None for timing in self.timings.values())
        table = Table(
            title=f"{self.repetitions} repetitions of {STEPS} steps", box=box.SIMPLE_HEAD, title_justify="left"
        )
        table.add_column("method", no_wrap=True)
        for heading in ("ms per step", "ms per image", "ratio to plain", *(["peak GB", "ratio"] if memory else [])):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, timing in self.timings.items():
            if timing.failure:
                table.add_row(timing.title, _short(timing.failure))
                continue
            middle, spread = median_and_spread([1e3 * seconds for seconds in timing.seconds])
            ratio = self.ratio(name)
            cells = [
                f"{_digits(middle)} ± {_digits(spread)}",
                _digits(middle / (2 * given(self.config.half))),
                "–" if ratio is None else f"{ratio[0]:.2f} ± {ratio[1]:.2f}",
            ]
            if memory:
                share = self.memory_ratio(name)
                cells += [
                    "–" if timing.memory is None else _gigabytes(timing.memory),
                    "–" if share is None else f"{share:.2f}",
                ]
            table.add_row(timing.title, *cells)
        return table

    def _agreement(self) -> Table:
        table = Table(
            title="meta-gradient of CovNet: cosine and relative error", box=box.SIMPLE_HEAD, title_justify="left"
        )
        for heading in ("part", "engine", "against"):
            table.add_column(heading, no_wrap=True)
        for heading in ("cosine", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.agreements:
            table.add_row(row.part, row.of, row.against, f"{row.cosine:.6f}", f"{row.relative_error:.1e}")
        return table

    def chart(self) -> str:
        """Ratios to plain training, with their spread, as an SVG that stands by itself."""
        from jinja2 import Environment, StrictUndefined

        from semaug.report.charts import Measured, measured_bars

        rows = []
        for name, timing in self.timings.items():
            ratio, muted = self.ratio(name), name in (PLAIN, "isda")
            if ratio is None:
                rows.append(Measured(timing.title, None, 0.0, _short(timing.failure), muted))
                continue
            memory = "" if timing.memory is None else f" · {_gigabytes(timing.memory)} GB"
            rows.append(Measured(timing.title, *ratio, f"{ratio[0]:.2f} ± {ratio[1]:.2f}{memory}", muted))
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        title = "Time of a training step, relative to plain cross-entropy"
        return environment.from_string(_CHART).render(chart=measured_bars(rows), title=title, lines=self.heading())


# colours as in the report's style sheet
_CHART = """\
{% set height = chart.bottom + 116 %}
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ chart.width }} {{ height }}" width="{{ chart.width }}" \
height="{{ height }}" role="img" aria-label="{{ title }}">
<style>
  svg { color-scheme: light dark; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #5a6069; }
  .page { fill: #fcfcfa; } .title { font-size: 16px; font-weight: 600; } .title, .name { fill: #1c1e21; }
  .grid { stroke: #e8eaed; } .one, .whisker { stroke: #1c1e21; } .bar { fill: #0072b2; } .muted { fill: #8a929c; }
  .one { stroke-dasharray: 3 3; opacity: .55; } .whisker { stroke-width: 1.5; fill: none; }
  .end { text-anchor: end; } .mid { text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    text { fill: #a3abb5; } .page { fill: #15171a; } .title, .name { fill: #e6e8eb; } .grid { stroke: #2a2e34; }
    .one, .whisker { stroke: #e6e8eb; } .bar { fill: #2f8cc4; } .muted { fill: #6d7580; }
  }
</style>
<rect class="page" width="100%" height="100%"/>
<text class="title" x="20" y="32">{{ title }}</text>
{% for line in lines %}
<text x="20" y="{{ 54 + 18 * loop.index0 }}">{{ line }}</text>
{% endfor %}
<g transform="translate(0 84)">
{% for tick in chart.ticks %}
  <line class="grid" x1="{{ tick.at | round(1) }}" x2="{{ tick.at | round(1) }}" y1="0" y2="{{ chart.bottom }}"/>
  <text class="mid" x="{{ tick.at | round(1) }}" y="{{ chart.bottom + 18 }}">{{ tick.text }}</text>
{% endfor %}
{% for bar in chart.bars %}
  <text class="name end" x="{{ chart.left - 10 }}" y="{{ bar.y + 15 }}">{{ bar.row.label }}</text>
{% if bar.row.value is none %}
  <text x="{{ chart.left + 10 }}" y="{{ bar.y + 15 }}">{{ bar.row.text }}</text>
{% else %}
  <rect class="bar{{ ' muted' if bar.row.muted }}" x="{{ chart.left }}" y="{{ bar.y }}" \
width="{{ (bar.end - chart.left) | round(1) }}" height="{{ chart.thickness }}" rx="2"/>
  <path class="whisker" d="M{{ bar.low | round(1) }} {{ bar.y + 5 }}v10m0 -5H{{ bar.high | round(1) }}m0 -5v10"/>
  <text class="name" x="{{ chart.right + 20 }}" y="{{ bar.y + 15 }}">{{ bar.row.text }}</text>
{% endif %}
{% endfor %}
  <line class="one" x1="{{ chart.one | round(1) }}" x2="{{ chart.one | round(1) }}" y1="0" y2="{{ chart.bottom }}"/>
</g>
</svg>
"""


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and half of the interquartile range."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    import timm

    import semaug

    found = {"torch": torch.__version__, "timm": timm.__version__, "semaug": semaug.__version__}
    return {name: str(version) for name, version in found.items()} | {"python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """What the GPU or CPU is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # Linux; elsewhere Python knows
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _short(failure: str | None) -> str:
    """A failure in a word or two; the sentence itself may be long."""
    return "–" if failure is None else failure if failure == OUT_OF_MEMORY else "failed"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}" if count >= 1e10 else f"{count / 1e9:.2f}"


def _digits(value: float) -> str:
    """A number with about three digits that matter."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --------------------------------------------------------------------------------------------------------- measuring


def bench(config: BenchConfig) -> Result:
    """Measure as configured, and write bench.json and bench.svg."""
    from semaug.runs import write_atomically, write_json

    try:  # a folder that cannot be had is better known before measuring
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {config.output}: {error.strerror or error}") from error
    result = measure(config)
    write_json(config.output / "bench.json", result.to_json())
    write_atomically(config.output / "bench.svg", result.chart().encode())
    return result


def measure(config: BenchConfig) -> Result:
    """Time every method and compare the meta-gradients, with progress on standard error."""
    config = config.filled()
    images, labels = _batch(config)
    progress = Progress()
    name = device_name(images.device)
    progress.say(f"{config}, on {name}")
    with _settings(config):
        timings = _time(config, images, labels, progress)
        failures = [f"{timing.title}: {timing.failure}" for timing in timings.values() if timing.failure]
        if len(failures) == len(timings):
            raise UserError(f"no method could be measured ({'; '.join(failures)})")
        engines = [e for e, method in ENGINES.items() if method in timings and timings[method].failure is None]
        reference, agreements, notes = _compare(config, engines, images, labels, progress)
    return Result(config, name, timings, reference, agreements, notes)


@contextmanager
def _settings(config: BenchConfig) -> Iterator[None]:
    """Let cuDNN choose its fastest algorithms, and torch.compile keep a version for each of the methods' networks."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        if config.compile:
            from torch._dynamo import config as dynamo

            # Versions are counted by code, which the networks of all methods share; and no shape ever changes here.
            limit = dynamo.recompile_limit * len(config.methods)
            with dynamo.patch(recompile_limit=limit, automatic_dynamic_shapes=False):
                yield
        else:
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def _batch(config: BenchConfig) -> tuple[Tensor, Tensor]:
    """Noise and labels; sees that the model takes such images and can be split, or every method would fail alike."""
    torch.manual_seed(config.seed)
    side = given(config.pixels)
    try:
        images = torch.randn(2 * given(config.half), 3, side, side, device=config.device)
        if images.is_cuda:
            images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(config.classes, (len(images),), device=images.device)
        Network(_model(config), given(config.frozen_blocks)).prepare(images)
    except ValueError as error:
        raise UserError(str(error)) from error
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{config.model} does not run on such images ({config}): {_sentence(error)}") from error
    return images, labels


def _model(config: BenchConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    model = build_model(given(config.model), config.classes, given(config.pixels)).to(given(config.device))
    return model.to(memory_format=torch.channels_last) if str(config.device).startswith("cuda") else model


def _optimizer(model: nn.Module, part: Part = "all") -> Optimizer:
    head = set(find_head(model)[1].parameters()) if part == "backbone" else set()
    parameters = [parameter for parameter in model.parameters() if parameter not in head]
    return SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def _step(config: BenchConfig, name: str) -> Step:
    """A method's training step on a network of its own."""
    model = _model(config)
    optimizer = _optimizer(model)
    if name == PLAIN:
        return _plain_step(config, model, optimizer)
    scaler = GradScaler(torch.device(given(config.device)).type) if config.autocast == torch.float16 else None
    return _learner(config, name, model, optimizer, config.autocast, scaler, config.compile).step


def _learner(
    config: BenchConfig,
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    autocast: torch.dtype | None,
    scaler: GradScaler | None,
    compile: bool = False,
) -> LearnableAugmentation:
    settings = methods.Augmentation(strength=STRENGTH, frozen_blocks=given(config.frozen_blocks), **METHODS[name][1])
    method: methods.Method = "isda" if name == "isda" else "learnable"
    torch.manual_seed(config.seed)
    learner = methods.make_learner(
        method, settings, model, optimizer, compile=compile, autocast=autocast, scaler=scaler
    )
    learner.check_values = False
    return learner


def _plain_step(config: BenchConfig, model: nn.Module, optimizer: Optimizer) -> Step:
    network: Callable[[Tensor], Tensor] = torch.compile(model, backend="inductor") if config.compile else model
    autocast = config.autocast
    kind = torch.device(given(config.device)).type
    scaler = GradScaler(kind, enabled=autocast == torch.float16)

    def step(images: Tensor, labels: Tensor) -> None:
        for half, half_labels in zip(images.tensor_split(2), labels.tensor_split(2), strict=True):
            with torch.autocast(kind, autocast, enabled=autocast is not None):
                logits = network(half)
            loss = F.cross_entropy(logits.float(), half_labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def _time(config: BenchConfig, images: Tensor, labels: Tensor, progress: Progress) -> dict[str, Timing]:
    """Turns of all methods, in an order that shifts from one repetition to the next, after a warm-up."""
    timings = {name: Timing(METHODS[name][0]) for name in config.methods}
    steps: dict[str, Step] = {}
    held: dict[str, int] = {}  # bytes between two turns
    warm = 2 if config.compile else 1  # rounds before it counts
    rounds = warm + given(config.repetitions)
    deadline = time.monotonic() + given(config.seconds)
    with progress.task("measuring", rounds * len(timings)) as advance:
        for number in range(rounds):
            started = time.monotonic()
            shift = number % len(timings)
            for place, name in enumerate([*timings][shift:] + [*timings][:shift], start=1):
                timing = timings[name]
                if timing.failure is None:
                    try:
                        before = _allocated(images.device)
                        if name not in steps:
                            steps[name] = _step(config, name)
                        # The pipelined order differentiates one half step late: warm, it has done so.
                        seconds, peak = _turn(steps[name], images, labels, STEPS if number >= warm else STEPS + 1)
                    except (RuntimeError, ValueError) as error:
                        timing.failure = _sentence(error)
                    else:
                        if number == 0:
                            held[name] = _allocated(images.device) - before
                        if number >= warm:
                            timing.seconds.append(seconds)
                            timing.memory = peak if peak is None else max(peak, timing.memory or 0)
                    if timing.failure is not None:  # only now is the error, and what it refers to, gone
                        steps.pop(name, None)
                        _free(images.device)
                advance(number * len(timings) + place, rounds * len(timings))
            now = time.monotonic()
            if number + 1 >= warm + LEAST_REPETITIONS and now + (now - started) > deadline:
                break
    for name, timing in timings.items():
        if timing.memory is not None:
            timing.memory += held[name] - held.get(PLAIN, held[name])
    steps.clear()
    _free(images.device)
    return timings


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _turn(step: Step, images: Tensor, labels: Tensor, count: int) -> tuple[float, int | None]:
    """Seconds per step of some steps, and on CUDA their peak of memory in bytes above what was held before."""
    cuda = torch.cuda if images.is_cuda else None
    if cuda is not None:
        cuda.synchronize(images.device)
        cuda.reset_peak_memory_stats(images.device)
    held = 0 if cuda is None else cuda.memory_allocated(images.device)
    started = time.perf_counter()
    for _ in range(count):
        step(images, labels)
    if cuda is not None:
        cuda.synchronize(images.device)
    seconds = (time.perf_counter() - started) / count
    return seconds, None if cuda is None else cuda.max_memory_allocated(images.device) - held


def _sentence(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return lines[0] if lines else type(error).__name__


def _free(device: torch.device) -> None:
    """Give back the memory of what is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------ meta-gradient


def _compare(
    config: BenchConfig, engines: Sequence[Engine], images: Tensor, labels: Tensor, progress: Progress
) -> tuple[str | None, list[Agreement], list[str]]:
    """What the reference is, how the engines' meta-gradients agree with it and each other, and what went wrong."""
    found: dict[tuple[Part, str], Tensor] = {}
    notes: list[str] = []
    random = False

    def attempt(part: Part, engine: Engine, title: str, dtype: torch.dtype | None = None) -> bool:
        nonlocal random
        try:
            found[part, title], drawn = _meta_gradient(config, part, engine, images, labels, dtype)
            random = random or drawn
        except (RuntimeError, ValueError) as error:
            notes.append(f"meta-gradient by {title}: {_sentence(error)}")
        _free(images.device)
        return (part, title) in found

    network = Network(_model(config), given(config.frozen_blocks))
    late_backbone = set(network.late_parameters().values()) - set(network.head.parameters())
    parts: list[Part] = ["all", "backbone"] if late_backbone else ["all"]
    exact = torch.float64 if images.device.type == "cpu" and config.precision == "fp32" else torch.float32
    references = [(engine, f"{_spoken(engine)} in fp{exact.itemsize * 8}") for engine in reversed(ENGINES)]
    reference: str | None = None
    total = len(parts) * (len(engines) + 1)
    with progress.task("comparing meta-gradients", total) as advance:
        for number, part in enumerate(parts):
            for done, engine in enumerate(engines, start=1):
                attempt(part, engine, _spoken(engine))
                advance(number * (len(engines) + 1) + done, total)
            if not found or random:
                continue
            with _without_tf32():
                for engine, title in references:  # double backward, or jvp where it does not fit
                    if attempt(part, engine, title, exact):
                        reference = title
                        references = [(engine, title)]
                        break
            advance((number + 1) * (len(engines) + 1), total)
    if random:
        notes.append(
            f"{config.model} draws random numbers, which are others in another precision: no reference was computed"
        )
    pairs = [(_spoken("jvp"), _spoken("double_backward"))]
    pairs += [(_spoken(engine), reference) for engine in engines if reference is not None]
    agreements = [
        _agreement(part, *pair, *(found[part, title] for title in pair))
        for part in parts
        for pair in pairs
        if all((part, title) in found for title in pair)
    ]
    return reference, agreements, notes


def _spoken(engine: Engine) -> str:
    return engine.replace("_", " ")


def _meta_gradient(
    config: BenchConfig, part: Part, engine: Engine, images: Tensor, labels: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, bool]:
    """The meta-gradient of the first half step, one vector for all of CovNet, and whether random numbers were drawn.

    `dtype`: compute all of it in this precision, instead of in that of the run.
    """
    model, autocast, scaler = _model(config), config.autocast, None
    if dtype is not None:
        model, images, autocast = model.to(dtype), images.to(dtype), None
    elif autocast == torch.float16:  # a small scale: the first step must not overflow
        scaler = GradScaler(images.device.type, init_scale=2.0**10)
    learner = _learner(config, ENGINES[engine], model, _optimizer(model, part), autocast, scaler)
    if dtype is not None:
        learner.source.to(dtype)
    parameters = list(learner.source.parameters())
    gradients: list[Tensor] = []

    def keep(*_: Any) -> None:
        gradients.append(torch.cat([given(parameter.grad).flatten().double() for parameter in parameters]).cpu())

    assert learner.meta_optimizer is not None
    learner.meta_optimizer.register_step_pre_hook(keep)
    before = random_state(images.device)
    learner.step(images, labels)
    after = random_state(images.device)
    if len(gradients) < 2 or not gradients[0].isfinite().all():  # the scaler leaves out a step that overflows
        raise RuntimeError("it is not finite")
    drawn = any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return gradients[0], drawn


def _agreement(part: Part, of: str, against: str, first: Tensor, second: Tensor) -> Agreement:
    cosine = float(first @ second / (first.norm() * second.norm()).clamp_min(1e-300))
    return Agreement(part, of, against, cosine, float((first - second).norm() / second.norm().clamp_min(1e-300)))


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Convolutions and matrix products on CUDA in fp32 proper."""
    owners = (cast(Any, torch.backends.cudnn).conv, torch.backends.cuda.matmul)
    before = [owner.fp32_precision for owner in owners]
    for owner in owners:
        owner.fp32_precision = "ieee"
    try:
        yield
    finally:
        for owner, precision in zip(owners, before, strict=True):
            owner.fp32_precision = precision
