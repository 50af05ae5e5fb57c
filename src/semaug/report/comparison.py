"""What the report says of the runs in words and tables: the headline, their settings, their scores."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from semaug.report.reading import ReportedRun, as_text

MAIN_SETTINGS = (
    "data", "model", "method", "pretrained", "weights", "epochs", "seed", "optimizer", "lr", "batch_size",
    "precision", "device", "version", "started",
)  # fmt: skip
_NOT_SHOWN = ("format", "output", "resume", "cache", "workers", "images_on", "download", "data_root", "track")


def standard_error(run: ReportedRun) -> float | None:
    """Of the top-1 accuracy, on account of the number of images that it was measured on."""
    top1, count = run.score("top1"), run.score("count")
    return None if top1 is None or not count else (top1 * (1 - top1) / count) ** 0.5


def headline(runs: Sequence[ReportedRun]) -> tuple[str, str]:
    """The title, and the result in a sentence or two."""
    data = list(dict.fromkeys(run.text("data") for run in runs))
    subject = f"{runs[0].text('method')}, {runs[0].text('model')}" if len(runs) == 1 else f"{len(runs)} runs"
    title = f"{subject} on {', '.join(data)}"
    scored = sorted((run for run in runs if run.score("top1") is not None), key=lambda run: -_top1(run))
    if not scored:
        return title, "The run has not been evaluated." if len(runs) == 1 else "No run has been evaluated yet."
    best = scored[0]
    if len(runs) == 1:
        return title, f"{100 * _top1(best):.1f} % of {_images(best)} are recognised (top-1 accuracy)."
    if len({(run.text("data"), run.evaluation.get("split"), run.score("count")) for run in scored}) > 1:
        return title, "The runs were not evaluated on the same images, and their scores cannot be compared."
    told = f"{best.label} recognises {100 * _top1(best):.1f} % of {_images(best)}"
    if len(scored) == 1:
        return title, f"{told}; no other run has been evaluated."
    lead = _top1(best) - _top1(scored[1])
    error = ((standard_error(best) or 0.0) ** 2 + (standard_error(scored[1]) or 0.0) ** 2) ** 0.5
    if lead == 0:
        return title, f"{told}, as many as {scored[1].label}."
    told = f"{told}, {100 * lead:.1f} points more than the next best, {scored[1].label}."
    return title, told if lead >= 2 * error else f"{told} On so few images, such a difference may be chance."


def _top1(run: ReportedRun) -> float:
    return run.score("top1") or 0.0


def _images(run: ReportedRun) -> str:
    count = run.score("count")
    return f"the {'' if count is None else f'{count:.0f} '}{as_text(run.evaluation.get('split'))} images"


def settings(runs: Sequence[ReportedRun]) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """Settings that all runs share (the main ones and the others), and those that differ, with a text per run."""
    flat = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys((*MAIN_SETTINGS, *(key for config in flat for key in config))))
    main, others, differing = [], [], []
    for key in keys:
        texts = [_when(config.get(key)) if key == "started" else as_text(config.get(key)) for config in flat]
        if all(config.get(key) is None for config in flat) or (key == "method" and len(set(texts)) > 1):
            continue  # methods that differ are in the table of results
        if len(set(texts)) > 1:
            differing.append((key, texts))
        elif key in MAIN_SETTINGS:
            main.append((key, texts[0]))
        else:
            others.append((key, texts[0]))
    return {"main": main, "others": others}, differing


def _when(started: Any) -> str:
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
    """One row per run: its scores as shares, None where there is none."""
    best = max((run.score("top1") or -1.0 for run in runs), default=-1.0)
    return [
        {
            "run": run,
            "best": len(runs) > 1 and run.score("top1") == best,
            "split": as_text(run.evaluation.get("split")),
            "top1": run.score("top1"),
            "error": standard_error(run),
            "top5": run.score("top5"),
            "mean_class_accuracy": run.score("mean_class_accuracy"),
            "calibration_error": run.score("calibration_error"),
            "epochs": len(run.metrics),
            "seconds": run.seconds,
        }
        for run in runs
    ]
