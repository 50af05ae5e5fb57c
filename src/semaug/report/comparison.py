"""Runs in words and tables: the headline, their settings, their scores."""

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from semaug.report.reading import ReportedRun, as_text
from semaug.training.settings import TrainConfig, identifying

MAIN_SETTINGS = (
    "data", "model", "method", "pretrained", "weights", "epochs", "seed", "optimizer", "lr", "batch_size",
    "precision", "device", "version", "started",
)  # fmt: skip
# Settings that only say where and how fast a run was trained are not shown.
_NOT_SHOWN = {"format"} | ({field.name for field in fields(TrainConfig)} - identifying() - set(MAIN_SETTINGS))


def _standard_error(run: ReportedRun) -> float | None:
    """Of the top-1 accuracy, from the number of images."""
    top1, count = run.score("top1"), run.score("count")
    return None if top1 is None or not count else (max(top1 * (1 - top1), 0.0) / count) ** 0.5


def headline(runs: Sequence[ReportedRun]) -> tuple[str, str]:
    """Write the title of a page about runs, and which run is best, in a sentence or two."""
    subject = f"{runs[0].method}, {runs[0].text('model')}" if len(runs) == 1 else f"{len(runs)} runs"
    title = f"{subject} on {', '.join(dict.fromkeys(run.text('data') for run in runs))}"
    scored = sorted((run for run in runs if run.score("top1") is not None), key=lambda run: -_top1(run))
    if not scored:
        return title, "The run has not been evaluated." if len(runs) == 1 else "No run has been evaluated yet."
    best = scored[0]
    if len(runs) == 1:
        return title, f"{100 * _top1(best):.1f} % of {_images(best)} are recognised (top-1 accuracy)."
    if len({(run.text("data"), as_text(run.evaluation.get("split")), run.score("count")) for run in scored}) > 1:
        return title, "The runs were not evaluated on the same images, so their scores cannot be compared."
    result = f"{best.label} recognises {100 * _top1(best):.1f} % of {_images(best)}"
    if len(scored) == 1:
        return title, f"{result}; no other run has been evaluated."
    lead = _top1(best) - _top1(scored[1])
    error = ((_standard_error(best) or 0.0) ** 2 + (_standard_error(scored[1]) or 0.0) ** 2) ** 0.5
    if lead == 0:
        return title, f"{result}, as many as {scored[1].label}."
    result = f"{result}, {100 * lead:.1f} points more than the next best, {scored[1].label}."
    return title, result if lead >= 2 * error else f"{result} On so few images, such a difference may be chance."


def _top1(run: ReportedRun) -> float:
    return run.score("top1") or 0.0


def _images(run: ReportedRun) -> str:
    count = run.score("count")
    return f"the {'' if count is None else f'{count:.0f} '}{as_text(run.evaluation.get('split'))} images"


def settings(runs: Sequence[ReportedRun]) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """Compare the settings of runs.

    Returns the settings that all runs share, as lists ``main`` and ``others`` of name and text, and those that differ,
    with a text for each run.
    """
    flat = [_flat(run.config) for run in runs]
    common: dict[str, list[tuple[str, str]]] = {"main": [], "others": []}
    differing = []
    for key in dict.fromkeys((*MAIN_SETTINGS, *(key for config in flat for key in config))):
        texts = [_time(config.get(key)) if key == "started" else as_text(config.get(key)) for config in flat]
        if key == "method":
            texts = [run.method for run in runs]
        if all(config.get(key) is None for config in flat):
            continue
        if len(set(texts)) == 1:
            common["main" if key in MAIN_SETTINGS else "others"].append((key, texts[0]))
        elif key != "method":  # the table of results shows the methods
            differing.append((key, texts))
    return common, differing


def _time(started: Any) -> str:
    """An ISO time without its seconds."""
    try:
        time = datetime.fromisoformat(str(started))
    except ValueError:
        return as_text(started)
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".strip()


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif prefix or key not in _NOT_SHOWN:
            flat[f"{prefix}{key}"] = value
    return flat


def comparison(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """List for each run the run itself, whether it is the best, its split and its scores (None if missing)."""
    best = max((run.score("top1") or -1.0 for run in runs), default=-1.0)
    scores = ("top1", "top5", "mean_class_accuracy", "macro_f1", "calibration_error")
    return [
        {
            "run": run,
            "best": len(runs) > 1 and run.score("top1") == best,
            "split": as_text(run.evaluation.get("split")),
            "error": _standard_error(run),
            "epochs": len(run.metrics),
            "seconds": run.seconds,
            **{key: run.score(key) for key in scores},
        }
        for run in runs
    ]
