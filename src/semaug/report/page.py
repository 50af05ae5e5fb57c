"""The report of one run or several: the contents of each section of the page, and the file."""

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from semaug.inference.manifest import NAME as MANIFEST
from semaug.inference.manifest import read_manifest
from semaug.report import charts
from semaug.report.charts import Series
from semaug.report.curves import AUGMENTATION, TRAINING, augments, metric_charts
from semaug.report.html import chart, environment, line_charts, render_page
from semaug.report.reading import ReportedRun, as_text, confusion_entries, read_runs
from semaug.training.settings import TrainConfig, identifying
from semaug.util.errors import FileError
from semaug.util.files import refuse_edited, write_page
from semaug.util.progress import Progress

SHOWN_CLASSES, BAR_COLUMNS = 45, 3
SHOWN_PICTURES = 12
MAIN_SETTINGS = (
    "data", "model", "method", "pretrained", "weights", "epochs", "seed", "optimizer", "lr", "batch_size",
    "precision", "device", "version", "started",
)  # fmt: skip
# Settings that only say where and how fast a run was trained are not shown.
_NOT_SHOWN = {"format"} | ({field.name for field in fields(TrainConfig)} - identifying() - set(MAIN_SETTINGS))


def write_report(runs: list[Path], output: Path) -> None:
    """Write a report of one run, or a comparison of several, as one HTML file without other resources.

    Args:
        runs: Run directories; runs that have not finished are shown as far as they are.
        output: The file to write. A page that was edited, or a file of another kind, is not replaced; in a run
            directory it is renamed to report.previous.html.

    Raises:
        RunError: If one of the paths is not a run directory.
        FileError: If the file cannot be written.

    Example:
        >>> write_report([Path("runs/isda"), Path("runs/learnable")], Path("report.html"))  # doctest: +SKIP
    """
    content = render(read_runs(runs))
    try:
        refuse_edited(output)
    except FileError:
        kept = output.with_name("report.previous.html")
        if not _is_page_of_run(output) or kept.exists():
            raise
        output.replace(kept)  # of an older version of semaug, or of the user
        Progress().say(f"{output} was edited, or not written by this version of semaug, and is now {kept.name}")
    write_page(output, content)


def _is_page_of_run(file: Path) -> bool:
    """Whether a file is where a run directory has its report."""
    folder = file.parent
    return file.name == "report.html" and (folder / MANIFEST).is_file() and "run" in read_manifest(folder)


def render(runs: Sequence[ReportedRun]) -> str:
    """Render the report of runs as HTML."""
    title, summary = headline(runs)
    common, differing = settings(runs)
    augmenting = [run for run in runs if augments(run)]  # the others would add lines at zero
    destruction = _destruction(runs)
    return render_page(
        environment(),
        "page.html",
        script="sort.js",
        title=title,
        summary=summary,
        runs=runs,
        best=max(runs, key=lambda run: run.score("top1") or -1.0),
        common=common,
        differing=differing,
        comparison=comparison(runs),
        training=line_charts(metric_charts(runs, TRAINING)),
        augmenting=augmenting,
        augmentation=line_charts(metric_charts(augmenting, AUGMENTATION)),
        bars=_class_bars([run for run in runs if run.class_accuracy()]),
        matrices=[(run, matrix) for run in runs if (matrix := _confusion_matrix(run))],
        calibrated=[(run, drawn) for run in runs if (drawn := _reliability(run))],
        pictures=[_pictures(run) for run in runs if run.samples],
        destruction=destruction,
        fragments=destruction["html"] if destruction else "",
    )


def _standard_error(run: ReportedRun) -> float | None:
    """The standard error of the top-1 accuracy, from the number of images."""
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
        return title, f"Top-1 accuracy: {100 * _top1(best):.1f} % of {_images(best)}."
    if not all(best.shares_images(run) for run in scored[1:]):
        return title, "The runs were not evaluated on the same images, so their scores cannot be compared."
    result = f"{best.label} classifies {100 * _top1(best):.1f} % of {_images(best)} correctly"
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


def _class_bars(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """The accuracy of each class, the hardest on average first, as bars and as a table."""
    if not runs:
        return None
    accuracies = [run.class_accuracy() for run in runs]
    names = list(dict.fromkeys(name for own in accuracies for name in own))

    def mean(name: str) -> float:
        known = [own[name] for own in accuracies if name in own]
        return sum(known) / len(known)

    names.sort(key=lambda name: (mean(name), name))
    shown = names[:SHOWN_CLASSES]
    height = -(-len(shown) // BAR_COLUMNS)
    columns = []
    for start in range(0, len(shown), height):
        part = shown[start : start + height]
        series = [
            Series(run.label, run.slot, [own.get(name) for name in part])
            for run, own in zip(runs, accuracies, strict=True)
        ]
        drawn = charts.rows(part, series, text=charts.percent, limits=(0, 1), longest=26)
        columns.append(chart(drawn, "Accuracy of classes; the table below has the numbers"))
    return {"columns": columns, "shown": len(shown), "names": names, "accuracies": accuracies, "runs": runs}


def _confusion_matrix(run: ReportedRun) -> Any:
    names = [str(row["name"]) for row in run.table("classes", "name")]
    entries = confusion_entries(run.evaluation, len(names))
    if not entries:
        return None
    return chart(charts.confusion_matrix(names, entries), f"Confusion matrix of {run.label}")


def _reliability(run: ReportedRun) -> list[dict[str, Any]]:
    """The reliability diagrams of a calibrated run: before, and with the temperature."""
    found = run.calibration
    if found is None or "before" not in found or "after" not in found:
        return []
    drawn = []
    for title, part in (("Before", found["before"]), (f"With temperature {found['temperature']:.3f}", found["after"])):
        numbers = part["calibration_error"], part["cross_entropy"]
        caption = "Expected calibration error {:.3f}, cross-entropy {:.3f}.".format(*numbers)
        svg = chart(charts.reliability(part["bins"]), f"{run.label}, {title}: accuracy by confidence")
        drawn.append({"title": title, "caption": caption, "svg": svg})
    return drawn


def _pictures(run: ReportedRun) -> dict[str, Any]:
    right = [sample for sample in run.samples if sample.get("true") == sample.get("predicted")]
    wrong = [sample for sample in run.samples if sample not in right]
    return {"run": run, "wrong": wrong[:SHOWN_PICTURES], "right": right[:SHOWN_PICTURES]}


def _destruction(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """How often image-level augmentation destroys the cue of the embedded birds, for runs trained on them."""
    counts = [len(run.classes) for run in runs if run.config.get("data") == "birds" and len(run.classes) >= 2]
    return _measured_destruction(min(20, max(counts))) if counts else None


@cache
def _measured_destruction(num_species: int) -> dict[str, Any]:
    from semaug.data import destruction
    from semaug.report.figures.destruction import destruction_fragment

    measured = destruction.measure(num_species)
    return {"html": Markup(destruction_fragment(measured)), "left": destruction.LEFT, "count": measured[0].count}
