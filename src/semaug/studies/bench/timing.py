"""The cost of a training step, method by method."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from semaug.meta.learner import LearnableAugmentation
from semaug.network.blocks import find_head
from semaug.network.models import build_model
from semaug.network.network import Network
from semaug.studies.bench.result import OUT_OF_MEMORY, Timing
from semaug.studies.bench.settings import (
    LEARNING_RATE,
    LEAST_REPETITIONS,
    METHODS,
    PLAIN,
    SLOW_SHARE,
    SLOW_STEP,
    STEPS,
    STRENGTH,
    BenchConfig,
    Part,
    Step,
)
from semaug.training import methods
from semaug.training.settings import given
from semaug.util.errors import SemaugError
from semaug.util.progress import Progress


@contextmanager
def _settings(config: BenchConfig) -> Iterator[None]:
    """Have cuDNN search as configured, and torch.compile keep a version for each of the methods' networks."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = config.cudnn_search
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


def make_batch(config: BenchConfig) -> tuple[Tensor, Tensor]:
    """Noise and labels; sees that the model takes such images and can be split, or every method would fail alike."""
    torch.manual_seed(config.seed)
    side = given(config.pixels)
    try:
        images = torch.randn(2 * given(config.half), 3, side, side, device=config.device)
        if images.is_cuda:
            images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(config.classes, (len(images),), device=images.device)
        Network(make_model(config), given(config.frozen_blocks)).prepare(images)
    except ValueError as error:
        raise SemaugError(str(error)) from error
    except (RuntimeError, AssertionError) as error:
        raise SemaugError(f"{config.model} does not run on such images ({config}): {sentence(error)}") from error
    return images, labels


def make_model(config: BenchConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    model = build_model(given(config.model), config.classes, given(config.pixels)).to(given(config.device))
    return model.to(memory_format=torch.channels_last) if str(config.device).startswith("cuda") else model


def make_optimizer(model: nn.Module, part: Part = "all") -> Optimizer:
    head = set(find_head(model)[1].parameters()) if part == "backbone" else set()
    parameters = [parameter for parameter in model.parameters() if parameter not in head]
    return SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def _step(config: BenchConfig, name: str) -> Step:
    """A method's training step on a network of its own."""
    model = make_model(config)
    optimizer = make_optimizer(model)
    if name == PLAIN:
        return _plain_step(config, model, optimizer)
    scaler = GradScaler(torch.device(given(config.device)).type) if config.autocast == torch.float16 else None
    return make_learner(config, name, model, optimizer, config.autocast, scaler, config.compile).step


def make_learner(
    config: BenchConfig,
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    autocast: torch.dtype | None,
    scaler: GradScaler | None,
    compile: bool = False,
) -> LearnableAugmentation:
    settings = methods.Augmentation(strength=STRENGTH, frozen_blocks=given(config.frozen_blocks), **METHODS[name][1])
    method = "isda" if name == "isda" else "learnable"
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


def time_methods(config: BenchConfig, images: Tensor, labels: Tensor, progress: Progress) -> dict[str, Timing]:
    """Turns of all methods, in an order that shifts from one repetition to the next, after a warm-up.

    A method that is very slow takes part in the first repetition only.
    """
    with _settings(config):
        return _time_methods(config, images, labels, progress)


def _time_methods(config: BenchConfig, images: Tensor, labels: Tensor, progress: Progress) -> dict[str, Timing]:
    timings = {name: Timing(METHODS[name][0]) for name in config.methods}
    steps: dict[str, Step] = {}
    once: dict[str, bool] = {}  # whether a method takes part in the first repetition only
    limit = max(SLOW_STEP, SLOW_SHARE * given(config.seconds))
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
                if timing.failure is None and not (once.get(name) and timing.seconds):
                    try:
                        before = _allocated(images.device)
                        if name not in steps:
                            steps[name] = _step(config, name)
                        if number < warm:
                            timing.steps, seconds = _warm_up(name, steps[name], images, labels)
                            once[name] = seconds > limit
                        else:
                            seconds, peak = _turn(steps[name], images, labels, timing.steps)
                    except (RuntimeError, ValueError) as error:
                        timing.failure = sentence(error)
                    else:
                        if number == 0:
                            held[name] = _allocated(images.device) - before
                        if number >= warm:
                            timing.seconds.append(seconds)
                            timing.memory = peak if peak is None else max(peak, timing.memory or 0)
                    if timing.failure is not None:  # only now is the error, and what it refers to, gone
                        steps.pop(name, None)
                        free(images.device)
                advance(number * len(timings) + place, rounds * len(timings))
            if number >= warm and all(timing.failure or once[name] for name, timing in timings.items()):
                break
            now = time.monotonic()
            if number + 1 >= warm + LEAST_REPETITIONS and now + (now - started) > deadline:
                break
    for name, timing in timings.items():
        if timing.memory is not None:
            timing.memory += held[name] - held.get(PLAIN, held[name])
    steps.clear()
    free(images.device)
    return timings


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _warm_up(name: str, step: Step, images: Tensor, labels: Tensor) -> tuple[int, float]:
    """Steps that a turn of a method should have, and seconds of a step.

    Of the first two steps the shorter one counts, so that neither what happens once nor a stall makes a method slow.
    The pipelined order differentiates one half step late: at interval 1 it has done so in the first step, at a longer
    interval after one step more than a turn has.
    """
    seconds = min(_turn(step, images, labels, 1)[0] for _ in range(2))
    if seconds > SLOW_STEP and METHODS[name][1].get("interval", 1) == 1:
        return 1, seconds
    _turn(step, images, labels, STEPS - 1)
    return STEPS, seconds


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


def sentence(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return lines[0] if lines else type(error).__name__


def free(device: torch.device) -> None:
    """Give back the memory of what is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
