"""The report of one run or several: the contents of each section of the page, and the file."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from semaug.report import charts
from semaug.report.charts import Series
from semaug.report.comparison import comparison, headline, settings
from semaug.report.curves import AUGMENTATION, TRAINING, augments, metric_charts
from semaug.report.html import PAGE_START, chart, environment, line_charts, render_page
from semaug.report.reading import ReportedRun, confusion_entries, read_runs
from semaug.util.files import refuse_foreign, write_atomically

SHOWN_CLASSES, BAR_COLUMNS = 45, 3
SHOWN_PICTURES = 12


def write_report(runs: list[Path], output: Path) -> None:
    """Write a report of one run, or a comparison of several, as one HTML file without other resources.

    Args:
        runs: Run directories; runs that have not finished are shown as far as they are.
        output: The file to write.

    Raises:
        RunError: If one of the paths is not a run directory.
        FileError: If the file cannot be written.

    Example:
        >>> write_report([Path("runs/isda"), Path("runs/learnable")], Path("report.html"))  # doctest: +SKIP
    """
    content = render(read_runs(runs)).encode(errors="replace")
    refuse_foreign(output, PAGE_START)
    write_atomically(output, content)


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
    """What image-level augmentation destroys on the embedded birds, for runs that were trained on them."""
    counts = [len(run.classes) for run in runs if run.config.get("data") == "birds" and len(run.classes) >= 2]
    return _measured_destruction(min(20, max(counts))) if counts else None


@cache
def _measured_destruction(num_species: int) -> dict[str, Any]:
    from semaug.data import destruction
    from semaug.report.figures.destruction import destruction_fragment

    measured = destruction.measure(num_species)
    return {"html": Markup(destruction_fragment(measured)), "left": destruction.LEFT, "count": measured[0].count}
