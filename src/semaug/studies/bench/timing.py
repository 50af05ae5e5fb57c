"""Time and memory of a training step, variant by variant."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from semaug import p2p
from semaug.inference.classifier import as_composite
from semaug.isda.strength import StrengthOption
from semaug.meta.graphs import WARM_UP
from semaug.meta.learner import LearnableAugmentation
from semaug.meta.optimizers import make_optimizer
from semaug.network.blocks import find_head
from semaug.network.models import build_model
from semaug.network.network import Network
from semaug.p2p import P2PNet
from semaug.studies.bench import settings
from semaug.studies.bench.result import Timing, sentence
from semaug.studies.bench.settings import PLAIN, STEPS, VARIANTS, BenchConfig, UpdatePart
from semaug.training.methods import Augmentation, method_on, parameter_groups
from semaug.training.methods import make_learner as learner_of
from semaug.training.settings import required
from semaug.util.errors import ModelError, SettingError
from semaug.util.progress import Progress

_Step = Callable[[Tensor, Tensor], object]


def make_batch(config: BenchConfig) -> tuple[Tensor, Tensor]:
    """Make images of noise (2 · half, 3, pixels, pixels) and labels (2 · half,), and check that the network takes them.

    Raises:
        SettingError: The network cannot be split as configured.
        ModelError: The network does not run on such images.
    """
    torch.manual_seed(config.seed)
    side = required(config.pixels)
    try:
        images = torch.randn(2 * required(config.half), 3, side, side, device=config.device)
        if images.is_cuda:
            images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(config.classes, (len(images),), device=images.device)
        head = "head" if config.p2p else None
        composite = p2p.composite() if config.p2p else None
        Network(_make_model(config), required(config.frozen_blocks), head, composite=composite).prepare(images)
    except ValueError as error:
        raise SettingError(str(error)) from error
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"{config.model} does not run on such images ({config}): {sentence(error)}") from error
    release_memory()  # else the network that was tried counts as memory of the first variants
    return images, labels


def make_learner(
    config: BenchConfig, name: str, part: UpdatePart = "all", dtype: torch.dtype | None = None, as_timed: bool = False
) -> LearnableAugmentation:
    """Make the learner of a variant on a network of its own.

    Args:
        config: Settings with all defaults filled in.
        name: Name of a variant other than plain training.
        part: What the optimiser updates.
        dtype: Precision of the whole computation; None for the configured one.
        as_timed: Whether to compile the ordinary pass and to use CUDA graphs, if configured.

    Returns:
        The learner, without its check of values, which would wait for the GPU.
    """
    variant, autocast, scaler = VARIANTS[name], config.autocast, None
    model = _make_model(config)
    if dtype is not None:
        model, autocast = model.to(dtype), None
    if autocast == torch.float16:  # a small scale: the first step must not overflow
        scaler = GradScaler(torch.device(required(config.device)).type, init_scale=2.0**10)
    strength: StrengthOption = "auto" if as_timed else settings.STRENGTH
    augmentation = Augmentation(strength, frozen_blocks=required(config.frozen_blocks), **variant.overrides)
    torch.manual_seed(config.seed)
    method = method_on("p2p" if config.p2p else None, required(variant.method)).name
    learner = learner_of(
        method, augmentation, model, _make_optimizer(config, model, part),
        autocast=autocast, scaler=scaler, compile=as_timed and config.compile, graphs=as_timed and config.graphed,
    )  # fmt: skip
    if dtype is not None:
        learner.source.to(dtype)
    learner.check_values = False
    if as_timed:
        learner.set_progress(0.5)
    return learner


def time_variants(config: BenchConfig, images: Tensor, labels: Tensor, progress: Progress) -> dict[str, Timing]:
    """Measure all variants in turn, after a warm-up.

    Every repetition gives each variant one turn, in an order that rotates. A very slow variant takes part in the first
    repetition only.

    Args:
        config: Settings with all defaults filled in.
        images: Images of one batch.
        labels: Their labels.
        progress: Where to show progress.

    Returns:
        The measurement of each variant, or the reason why it failed.
    """
    running = [_Measurement(config, name) for name in config.variants]
    warm_up = 2 if config.compile else 1  # rounds before times count
    total = (warm_up + required(config.repetitions)) * len(running)
    deadline = time.monotonic() + required(config.seconds)
    with _backend_settings(config), progress.task("measuring", total) as advance:
        for number in range(warm_up + required(config.repetitions)):
            started = time.monotonic()
            shift = number % len(running)
            for place, measurement in enumerate(running[shift:] + running[:shift], start=1):
                measurement.take_turn(images, labels, warm_up=number < warm_up)
                advance(number * len(running) + place, total)
            now = time.monotonic()
            enough = number + 1 >= warm_up + settings.LEAST_REPETITIONS and now + (now - started) > deadline
            if enough or (number >= warm_up and all(measurement.finished for measurement in running)):
                break
    plain = next((measurement.held for measurement in running if measurement.name == PLAIN), 0)
    for measurement in running:
        if measurement.timing.memory is not None:
            measurement.timing.memory += measurement.held - plain
    timings = {measurement.name: measurement.timing for measurement in running}
    running.clear()
    release_memory()
    return timings


class _Measurement:
    """A variant while it is measured."""

    def __init__(self, config: BenchConfig, name: str) -> None:
        self.config, self.name = config, name
        self.timing = Timing(VARIANTS[name].title)
        self.step: _Step | None = None
        self.very_slow = False
        self.held = 0  # bytes between two turns

    @property
    def finished(self) -> bool:
        return self.timing.failure is not None or (self.very_slow and bool(self.timing.seconds))

    def take_turn(self, images: Tensor, labels: Tensor, warm_up: bool) -> None:
        """Run some steps and record their time and memory, or the reason why they fail.

        Args:
            images: A batch of images.
            labels: Their labels.
            warm_up: Whether these steps only warm up, and determine how many steps a turn has.
        """
        timing = self.timing
        if self.finished:
            return
        try:
            before, first = _allocated(images.device), self.step is None
            peak: int | None
            self.step = self.step or _step(self.config, self.name)
            if warm_up:
                timing.steps, seconds, peak = _warm_up(self.config, self.name, self.step, images, labels)
                self.very_slow = seconds > max(settings.SLOW_STEP, settings.SLOW_SHARE * required(self.config.seconds))
            else:
                seconds, peak = _turn(self.step, images, labels, timing.steps)
                timing.seconds.append(seconds)
                timing.memory = peak if peak is None else max(peak, timing.memory or 0)
            if first:
                self.held = _allocated(images.device) - before
                if self.config.graphed:  # a replay allocates nothing: the peak is that of the capture
                    timing.memory = (peak or 0) - before - self.held
        except (RuntimeError, ValueError) as error:
            timing.failure = sentence(error)
        if timing.failure is not None:  # after the `except`, when the error no longer refers to tensors
            self.step = None
            release_memory()


def _step(config: BenchConfig, name: str) -> _Step:
    if name != PLAIN:
        return make_learner(config, name, as_timed=True).step
    model, autocast = _make_model(config), config.autocast
    optimizer = _make_optimizer(config, model)
    network: Callable[[Tensor], Any] = torch.compile(model, backend="inductor") if config.compile else model
    kind = torch.device(required(config.device)).type
    scaler = GradScaler(kind, enabled=autocast == torch.float16)

    def plain_step(images: Tensor, labels: Tensor) -> None:
        for half, half_labels in zip(images.tensor_split(2), labels.tensor_split(2), strict=True):
            with torch.autocast(kind, autocast, enabled=autocast is not None):
                outputs = network(half)
            if isinstance(model, P2PNet):
                loss = model.loss(outputs, half_labels)
            else:
                loss = F.cross_entropy(outputs.float(), half_labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if isinstance(model, P2PNet):
                model.update_templates(outputs)

    return _PlainGraph(plain_step) if config.graphed else plain_step


class _PlainGraph:
    """A step without results as a CUDA graph, on one batch that never changes."""

    def __init__(self, step: _Step) -> None:
        self.step, self.count = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.count += 1
        if self.count <= WARM_UP:
            self.step(images, labels)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(images.device), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step(images, labels)
        self.graph.replay()


def _make_model(config: BenchConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    model = build_model(required(config.model), config.classes, required(config.pixels))
    model = as_composite("p2p" if config.p2p else None, model, config.classes).to(required(config.device))
    return model.to(memory_format=torch.channels_last) if config.on_cuda else model


def _make_optimizer(config: BenchConfig, model: nn.Module, part: UpdatePart = "all") -> Optimizer:
    head = set(find_head(model, "head" if config.p2p else None)[1].parameters()) if part == "backbone" else set()
    groups = parameter_groups(model, settings.LEARNING_RATE)
    groups = [{**group, "params": [p for p in group["params"] if p not in head]} for group in groups]
    return make_optimizer(SGD, groups, capturable=config.precision != "fp16", momentum=0.9)


@contextmanager
def _backend_settings(config: BenchConfig) -> Iterator[None]:
    """Set cuDNN's search, and let torch.compile hold a version for each variant's network."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = config.cudnn_search
    try:
        if config.compile:
            from torch._dynamo import config as dynamo

            # Versions are counted by code, which the networks of all variants share. No shape ever changes here.
            limit = dynamo.recompile_limit * len(config.variants)
            with dynamo.patch(recompile_limit=limit, automatic_dynamic_shapes=False):
                yield
        else:
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def _warm_up(config: BenchConfig, name: str, step: _Step, images: Tensor, labels: Tensor) -> tuple[int, float, int]:
    """Return the number of steps that a turn should have, the seconds of a step, and the peak memory in all.

    The shorter of the first two steps counts, so that neither one-time work nor a stall makes a variant look slow. The
    pipelined order differentiates one half step late: at interval 1 it has done so in the first step, at a longer
    interval after one step more than a turn has.
    """
    seconds = min(_turn(step, images, labels, 1)[0] for _ in range(2))
    single = VARIANTS[name].overrides.get("interval", 1) == 1
    steps = 1 if single and seconds > settings.SLOW_STEP else STEPS
    # Before a kind of step is captured, some run as they are; with an interval, a kind comes once in two turns.
    count = (WARM_UP + 2) * (1 if single else STEPS) if config.graphed else steps - 1
    held = _allocated(images.device)
    peak = _turn(step, images, labels, count)[1] if count else None
    return steps, seconds, held + (peak or 0)


def _turn(step: _Step, images: Tensor, labels: Tensor, count: int) -> tuple[float, int | None]:
    """Take some steps; return seconds per step, and on CUDA the peak memory in bytes above what was held before."""
    cuda = torch.cuda if images.is_cuda else None
    if cuda is not None:
        cuda.synchronize(images.device)
        cuda.reset_peak_memory_stats(images.device)
    held = _allocated(images.device)
    started = time.perf_counter()
    for _ in range(count):
        step(images, labels)
    if cuda is not None:
        cuda.synchronize(images.device)
    seconds = (time.perf_counter() - started) / count
    return seconds, None if cuda is None else cuda.max_memory_allocated(images.device) - held


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def release_memory() -> None:
    """Return GPU memory of tensors that nothing refers to."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
