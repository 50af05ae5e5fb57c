"""What an experiment measures besides training runs: time per step, CovNet's size, pictures, the theorem.

Results are kept in `OUTPUT/extras` under a digest of what they depend on, so that they are not measured twice.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semaug.studies.cells import DATASETS, Experiment
from semaug.studies.presets import table_covnet, theorem_preset
from semaug.studies.presets.figure_frozen_blocks import BLOCKS, SMALL_BLOCKS
from semaug.studies.results import finished_runs
from semaug.studies.scales import Setup, train_config
from semaug.training.settings import given
from semaug.util.errors import SemaugError
from semaug.util.files import read_json, write_json

Extra = dict[str, Any]
"""`lines` to read, `numbers` by name, and what a kind of section draws."""


def has_extra(experiment: Experiment) -> bool:
    """Whether an experiment has something to measure after its runs."""
    return bool(experiment.times or experiment.picture or experiment.kind == "theorem")


def missing_hardware(experiment: Experiment, setup: Setup) -> str:
    """What an experiment's measurement lacks on this machine; empty if nothing."""
    import torch

    on_cpu = setup.device == "cpu" or (setup.device is None and not torch.cuda.is_available())
    return (
        "the time per step at full scale needs a GPU" if experiment.times and setup.scale == "full" and on_cpu else ""
    )


def cheap_extra(experiment: Experiment) -> Extra:
    """What is only counted, and needs no time."""
    return {"shapes": _shapes()} if experiment.shapes else {}


def known_extra(experiment: Experiment, setup: Setup) -> Extra:
    """What an earlier call measured; empty if none did."""
    found = cheap_extra(experiment)
    if has_extra(experiment):
        file = _file(experiment, setup)
        found |= read_json(file) if file.is_file() else {}
    return found


def measure_extra(experiment: Experiment, setup: Setup) -> Extra:
    """Measure, unless it was measured before."""
    file = _file(experiment, setup)
    if not file.is_file():
        work: Callable[[], Extra]
        if experiment.kind == "theorem":
            work = lambda: _theorem(setup)  # noqa: E731
        elif experiment.picture is not None:
            work = lambda: _pictures(experiment, setup)  # noqa: E731
        else:
            work = lambda: _times(experiment, setup)  # noqa: E731
        with _threads(experiment, setup):
            found = work()
        write_json(file, found)
    return known_extra(experiment, setup)


@contextmanager
def _threads(experiment: Experiment, setup: Setup) -> Iterator[None]:
    """Small tensors are not faster on several threads, and much slower where the cores have other work."""
    import torch

    before = torch.get_num_threads()
    if experiment.kind == "theorem" or setup.scale == "small":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _file(experiment: Experiment, setup: Setup) -> Path:
    parts: list[Any] = [experiment.name, setup.scale]
    if experiment.picture is not None:
        runs = [run for cell in experiment.at(setup.scale) for run in finished_runs(cell, setup)]
        parts += [[run.run.name, run.top1] for run in runs]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
    return setup.output / "extras" / f"{setup.scale}-{experiment.name}-{digest}.json"


# ------------------------------------------------------------------------------------------------ CovNet's size


def _shapes() -> dict[str, list[str]]:
    """Operations and parameters in 10⁶ of the shapes of the paper's table, by the setting of their cell."""
    counted = {}
    for depth, width in table_covnet.PAPER:
        operations, parameters = table_covnet.shape(depth, width)
        counted[f"{depth} × {width}"] = [f"{operations / 1e6:.2f}", f"{parameters / 1e6:.2f}"]
    return counted


# ------------------------------------------------------------------------------------------------ time per step


def _times(experiment: Experiment, setup: Setup) -> Extra:
    """Time of a step relative to plain training, with both engines, for each number of frozen blocks."""
    from semaug.studies.bench import METHODS, BenchConfig
    from semaug.studies.bench.settings import ENGINES, PLAIN
    from semaug.studies.bench.timing import make_batch, time_methods
    from semaug.util.progress import Progress

    config = train_config(experiment.at(setup.scale)[0], setup).filled()
    wanted = {PLAIN, *ENGINES.values()}
    rows = []
    for blocks in BLOCKS if setup.scale == "full" else SMALL_BLOCKS:
        settings = BenchConfig(
            model=config.model,
            pixels=config.crop,
            half=config.batch_size,
            classes=200 if setup.scale == "full" else 12,
            frozen_blocks=blocks,
            skip=tuple(name for name in METHODS if name not in wanted),
            seconds=60.0 if setup.scale == "full" else 10.0,
            device=config.device,
        ).filled()
        timings = time_methods(settings, *make_batch(settings), Progress())
        rows.append({"frozen": blocks, **_ratios(timings, {"plain": PLAIN, **ENGINES})})
    where = f"{config.model}, {config.crop} px, {given(config.batch_size)} + {given(config.batch_size)} images"
    lines = [f"Time per step: {where}, on {config.device}; medians over repetitions, ratios to plain training."]
    return {"times": rows, "lines": lines + [_time_line(row) for row in rows]}


def _time_line(row: dict[str, Any]) -> str:
    parts = []
    for name, title in (("plain", "plain training"), ("jvp", "jvp"), ("double_backward", "double backward")):
        timing = row[name]
        parts.append(
            f"{title} {timing['failure']}"
            if "failure" in timing
            else f"{title} {timing['ms']:.1f} ms (× {timing['ratio']:.2f})"
        )
    return f"{row['frozen']} frozen: {', '.join(parts)}"


def _ratios(timings: Any, methods: dict[Any, str]) -> dict[str, Any]:
    from semaug.studies.bench import median_and_spread

    if timings[methods["plain"]].failure:
        raise SemaugError(f"plain training could not be timed: {timings[methods['plain']].failure}")
    plain = timings[methods["plain"]].seconds
    found: dict[str, Any] = {}
    for name, method in methods.items():
        timing = timings[method]
        if timing.failure:
            found[name] = {"failure": timing.failure}
            continue
        milliseconds, spread = median_and_spread([1e3 * seconds for seconds in timing.seconds])
        ratio, ratio_spread = median_and_spread([a / b for a, b in zip(timing.seconds, plain, strict=False)])
        found[name] = {"ms": milliseconds, "ms_spread": spread, "ratio": ratio, "ratio_spread": ratio_spread}
    return found


# ----------------------------------------------------------------------------------------------------- pictures


def _pictures(experiment: Experiment, setup: Setup) -> Extra:
    """The pictures of an experiment, one for each data set whose runs are finished."""
    pictures, lines, missing = [], [], []
    for dataset in dict.fromkeys(cell.dataset for cell in experiment.cells):
        cells = [cell for cell in experiment.at(setup.scale) if cell.dataset == dataset]
        runs = {cell.method: finished[0].run for cell in cells if (finished := finished_runs(cell, setup))}
        if len(runs) < len(cells):
            missing.append(DATASETS[dataset])
            continue
        figure = _figure(experiment, runs)
        pictures.append(
            {
                "title": f"{DATASETS[dataset]}: {figure.title}" if len(experiment.cells) > 3 else figure.title,
                "caption": figure.caption,
                "html": figure.html,
                "png": "data:image/png;base64," + base64.b64encode(figure.png).decode() if figure.png else "",
                "numbers": json.loads(json.dumps(figure.numbers, default=str)),
            }
        )
    if not pictures:
        raise SemaugError("its runs have not finished")
    if missing:
        lines.append(f"No picture of {', '.join(missing)}: the runs are not there.")
    return {"pictures": pictures, "lines": lines}


def _figure(experiment: Experiment, runs: dict[Any, Path]) -> Any:
    from semaug.report import figures  # type: ignore[attr-defined, unused-ignore]

    if experiment.picture == "neighbours":
        return figures.neighbours(runs)
    if experiment.picture == "tsne":
        return figures.tsne(runs)
    return figures.augmentations(runs["learnable"])


# ------------------------------------------------------------------------------------------------------ theorem


def _theorem(setup: Setup) -> Extra:
    import warnings

    from semaug.studies import theorem

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about parts of torch
        result = theorem.measure(**theorem_preset.OPTIONS[setup.scale])
    curves = {
        name: {
            "lengths": curve.lengths,
            "meta": curve.meta,
            "relative": curve.relative,
            "slope": curve.slope,
            "relative_slope": curve.relative_slope,
        }
        for name, curve in result.curves.items()
    }
    lines = [
        f"{name}: min_t E‖∇L_meta‖² falls as T^{curve.slope:.2f}, divided by α² as T^{curve.relative_slope:.2f}."
        for name, curve in result.curves.items()
    ]
    lines.append(f"One long run: E‖∇L_train‖² {result.train[0]:.2g} → {result.train[-1]:.2g}.")
    return {"curves": curves, "times_t": result.times, "train": result.train, "lines": lines}
