"""How well the meta-gradients of the two engines agree.

Each engine's gradient for CovNet is compared with the other engine's and with a reference in higher precision, at the
same parameters, batch and random state, in training mode and without compilation. Most of the gradient passes through
the head, where the engines hardly differ (on a ResNet less than a hundredth passes through the backbone). The
comparison is therefore repeated with the head left out of the pseudo update, which leaves the backbone's part alone.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from semaug.meta.gradient import Engine
from semaug.network.randomness import random_state
from semaug.studies.bench.result import Agreement, Timing, sentence
from semaug.studies.bench.settings import ENGINES, SLOW_COMPARISON, BenchConfig, UpdatePart
from semaug.studies.bench.timing import make_learner, release_memory
from semaug.training.settings import required

_HALF = 8  # images of a half batch, at most: enough to compare, and cheap enough for double backward in fp32


def compare_engines(
    config: BenchConfig, timings: Mapping[str, Timing], images: Tensor, labels: Tensor
) -> tuple[str | None, list[Agreement], list[str]]:
    """Compare the meta-gradients of the engines with each other and with a reference.

    Args:
        config: Settings with all defaults filled in.
        timings: The measured times; double backward is left out if it was skipped or slow.
        images: Images of one batch.
        labels: Their labels.

    Returns:
        The name of the reference, the agreement of each pair, and notes about what was left out or failed.
    """
    slow, reason = timings.get(ENGINES["double_backward"]), None  # a failed timing is no reason: this batch is smaller
    if slow is None:
        reason = "it was skipped"
    elif slow.failure is None and (seconds := statistics.median(slow.seconds)) > SLOW_COMPARISON:
        reason = f"it took {seconds:.1f} s per step"
    allowed = [engine for engine in ENGINES if reason is None or engine != "double_backward"]
    engines = [engine for engine in allowed if (own := timings.get(ENGINES[engine])) and own.failure is None]
    notes = [] if reason is None else [f"double backward was left out of the comparison of meta-gradients: {reason}"]
    half = min(required(config.half), _HALF)
    gradients: dict[tuple[UpdatePart, str], Tensor] = {}
    random = False

    def attempt(part: UpdatePart, engine: Engine, title: str, dtype: torch.dtype | None = None) -> bool:
        nonlocal random
        try:
            batch = images[: 2 * half], labels[: 2 * half]
            gradients[part, title], drawn = _meta_gradient(config, part, engine, *batch, dtype)
            random = random or drawn
        except (RuntimeError, ValueError) as error:
            notes.append(f"meta-gradient by {title}: {sentence(error)}")
        release_memory()
        return (part, title) in gradients

    network = make_learner(config, ENGINES["jvp"]).network
    late_backbone = set(network.late_parameters().values()) - set(network.head.parameters())
    parts: list[UpdatePart] = ["all", "backbone"] if late_backbone else ["all"]
    exact = torch.float64 if not config.on_cuda and config.precision == "fp32" else torch.float32
    references = [(engine, f"{_title(engine)} in fp{exact.itemsize * 8}") for engine in reversed(allowed)]
    reference: str | None = None
    for part in parts:
        for engine in engines:
            attempt(part, engine, _title(engine))
        if gradients and not random:
            with _without_tf32():
                for engine, title in references:  # double backward, or jvp if memory is short
                    if attempt(part, engine, title, exact):
                        reference, references = title, [(engine, title)]
                        break
    if random:
        notes.append(f"{config.model} draws random numbers, which differ between precisions: no reference was computed")
    pairs = [(_title("jvp"), _title("double_backward"))]
    pairs += [(_title(engine), reference) for engine in engines if reference is not None]
    agreements = []
    for part, (of, against) in itertools.product(parts, pairs):
        if (part, of) in gradients and (part, against) in gradients:
            first, second = gradients[part, of], gradients[part, against]
            cosine = float(first @ second / (first.norm() * second.norm()).clamp_min(1e-300))
            error = float((first - second).norm() / second.norm().clamp_min(1e-300))
            agreements.append(Agreement(part, of, against, cosine, error))
    return reference, agreements, notes


def _title(engine: Engine) -> str:
    return engine.replace("_", " ")


def _meta_gradient(
    config: BenchConfig, part: UpdatePart, engine: Engine, images: Tensor, labels: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, bool]:
    """Return the meta-gradient of the first half step as one vector, and whether random numbers were drawn."""
    learner = make_learner(config, ENGINES[engine], part, dtype)
    parameters = list(learner.source.parameters())
    gradients: list[Tensor] = []

    def keep(*_: Any) -> None:
        gradients.append(torch.cat([required(parameter.grad).flatten().double() for parameter in parameters]).cpu())

    required(learner.meta_optimizer).register_step_pre_hook(keep)
    before = random_state(images.device)
    learner.step(images if dtype is None else images.to(dtype), labels)
    after = random_state(images.device)
    if len(gradients) < 2 or not gradients[0].isfinite().all():  # the scaler leaves out a step that overflows
        raise RuntimeError("it is not finite")
    drawn = any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return gradients[0], drawn


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute convolutions and matrix products on CUDA in full fp32."""
    owners = (cast(Any, torch.backends.cudnn).conv, torch.backends.cuda.matmul)
    before = [owner.fp32_precision for owner in owners]
    for owner in owners:
        owner.fp32_precision = "ieee"
    try:
        yield
    finally:
        for owner, precision in zip(owners, before, strict=True):
            owner.fp32_precision = precision
