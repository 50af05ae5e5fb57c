"""How well the meta-gradients of the engines agree."""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from semaug.meta.gradient import Engine
from semaug.network.network import Network
from semaug.network.views import random_state
from semaug.studies.bench.result import Agreement, Timing
from semaug.studies.bench.settings import ENGINES, SLOW_COMPARISON, BenchConfig, Part
from semaug.studies.bench.timing import free, make_learner, make_model, make_optimizer, sentence
from semaug.training.settings import given
from semaug.util.progress import Progress

HALF = 8
"""At most so many images of a half batch: enough to compare, and cheap enough for fp32 and double backward."""


def compare(
    config: BenchConfig, timings: Mapping[str, Timing], images: Tensor, labels: Tensor, progress: Progress
) -> tuple[str | None, list[Agreement], list[str]]:
    """What the reference is, how the engines' meta-gradients agree with it and each other, and what went wrong."""
    reason = _left_out(timings)
    allowed = [engine for engine in ENGINES if reason is None or engine != "double_backward"]
    engines = [engine for engine in allowed if (own := timings.get(ENGINES[engine])) and own.failure is None]
    half = min(given(config.half), HALF)
    images, labels = images[: 2 * half], labels[: 2 * half]
    found: dict[tuple[Part, str], Tensor] = {}
    notes = [] if reason is None else [f"double backward was left out of the comparison of meta-gradients: {reason}"]
    random = False

    def attempt(part: Part, engine: Engine, title: str, dtype: torch.dtype | None = None) -> bool:
        nonlocal random
        try:
            found[part, title], drawn = _meta_gradient(config, part, engine, images, labels, dtype)
            random = random or drawn
        except (RuntimeError, ValueError) as error:
            notes.append(f"meta-gradient by {title}: {sentence(error)}")
        free(images.device)
        return (part, title) in found

    network = Network(make_model(config), given(config.frozen_blocks))
    late_backbone = set(network.late_parameters().values()) - set(network.head.parameters())
    parts: list[Part] = ["all", "backbone"] if late_backbone else ["all"]
    exact = torch.float64 if images.device.type == "cpu" and config.precision == "fp32" else torch.float32
    references = [(engine, f"{_spoken(engine)} in fp{exact.itemsize * 8}") for engine in reversed(allowed)]
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


def _left_out(timings: Mapping[str, Timing]) -> str | None:
    """Why double backward is not compared; that it failed in the timing is no reason, as the comparison is smaller."""
    timing = timings.get(ENGINES["double_backward"])
    if timing is None:
        return "it was skipped"
    if timing.failure is None and (seconds := statistics.median(timing.seconds)) > SLOW_COMPARISON:
        return f"it took {seconds:.1f} s per step"
    return None


def _spoken(engine: Engine) -> str:
    return engine.replace("_", " ")


def _meta_gradient(
    config: BenchConfig, part: Part, engine: Engine, images: Tensor, labels: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, bool]:
    """The meta-gradient of the first half step, one vector for all of CovNet, and whether random numbers were drawn.

    `dtype`: compute all of it in this precision, instead of in that of the run.
    """
    model, autocast, scaler = make_model(config), config.autocast, None
    if dtype is not None:
        model, images, autocast = model.to(dtype), images.to(dtype), None
    elif autocast == torch.float16:  # a small scale: the first step must not overflow
        scaler = GradScaler(images.device.type, init_scale=2.0**10)
    learner = make_learner(config, ENGINES[engine], model, make_optimizer(model, part), autocast, scaler)
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
