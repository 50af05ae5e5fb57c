"""The page: what goes into each section of the report, and the file itself."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from semaug.report import charts
from semaug.report.comparison import comparison, headline, settings
from semaug.report.html import environment, render_page
from semaug.report.matrix import EDGES, confusion_matrix
from semaug.report.reading import ReportedRun, number, read_runs
from semaug.util.files import write_atomically

SHOWN_CLASSES, BAR_COLUMNS = 45, 3
SHOWN_PICTURES = 12

# key, title, caption, key of the spread, format, logarithmic
_TRAINING: tuple[tuple[str, str, str, str, charts.Format, bool], ...] = (
    ("train_loss", "Training loss", "The loss that is minimised, augmentation included; lower is better.",
     "", charts.plain, False),
    ("val_top1", "Validation accuracy", "Top-1 accuracy on the validation split after each epoch.",
     "", charts.percent, False),
    ("train_accuracy", "Training accuracy", "Top-1 accuracy on the training batches of each epoch, as augmented.",
     "", charts.percent, False),
    ("val_loss", "Validation loss", "Cross-entropy on the validation split, without augmentation.",
     "", charts.plain, False),
    ("lr", "Learning rate", "Learning rate of the network at the end of each epoch.", "", charts.plain, False),
)  # fmt: skip
_AUGMENTATION: tuple[tuple[str, str, str, str, charts.Format, bool], ...] = (
    ("strength", "Strength λ", "The factor on the covariance Σ; it grows during training.", "", charts.plain, False),
    ("augmentation_share", "Share of the loss", "The part of the training loss that augmentation adds.",
     "", charts.percent, False),
    ("variance_mean", "Variance", "Mean of Σ's diagonal; the band is ± its standard deviation over samples.",
     "variance_std_samples", charts.plain, False),
    ("variance_std_samples", "Spread over samples",
     "Standard deviation of the variance over samples: zero if all are treated alike.", "", charts.plain, False),
    ("variance_std_dims", "Spread over dimensions",
     "Standard deviation of the variance over feature dimensions: zero if all directions are alike.",
     "", charts.plain, False),
    ("drift", "Drift", "How far the source's parameters have moved from where they began, relative to their size.",
     "", charts.plain, False),
    ("meta_loss", "Meta loss", "Cross-entropy of the pseudo-updated network on the other half batch.",
     "", charts.plain, False),
    ("meta_gradient_norm", "Meta-gradient",
     "Norm of the gradient that teaches the source of Σ (logarithmic, without zeros).", "", charts.plain, True),
)  # fmt: skip


def write_report(runs: list[Path], output: Path) -> None:
    """Write one self-contained HTML file about one run directory, or comparing several."""
    write_atomically(output, render(read_runs(runs)).encode())


def render(runs: Sequence[ReportedRun]) -> str:
    """The page, as HTML."""
    title, summary = headline(runs)
    common, differing = settings(runs)
    scores = [run.score("top1") or -1.0 for run in runs]
    augmenting = [run for run in runs if _augments(run)]
    return render_page(
        environment(),
        "page.html",
        script="sort.js",
        title=title,
        summary=summary,
        runs=runs,
        best=runs[scores.index(max(scores))],
        common=common,
        differing=differing,
        comparison=comparison(runs),
        training=_line_charts(runs, _TRAINING),
        augmenting=augmenting,
        augmentation=_line_charts(augmenting, _AUGMENTATION),
        bars=_class_bars(runs),
        matrices=[(run, matrix) for run in runs if (matrix := confusion_matrix(run)) is not None],
        edges=[0.0, *EDGES],
        pictures=[_pictures(run) for run in runs if run.samples],
        destruction=_destruction(runs),
    )


def _augments(run: ReportedRun) -> bool:
    """Whether a run augments features; runs that do not would add lines at zero."""
    return any(number(row.get("strength")) for row in run.metrics)


def _line_charts(
    runs: Sequence[ReportedRun], kinds: Sequence[tuple[str, str, str, str, charts.Format, bool]]
) -> list[charts.LineChart]:
    found = []
    for key, title, caption, spread, text, logarithmic in kinds:
        series = [
            charts.Series(
                run.label,
                run.place,
                [number(row.get("epoch")) or i for i, row in enumerate(run.metrics, start=1)],
                [number(row.get(key)) for row in run.metrics],
                [number(row.get(spread)) for row in run.metrics] if spread else (),
            )
            for run in runs
            if any(number(row.get(key)) is not None for row in run.metrics)
        ]
        chart = charts.line_chart(title, caption, series, text=text, logarithmic=logarithmic) if series else None
        if chart is not None:
            found.append(chart)
    return found


def _class_bars(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """Accuracy by class, the hardest (on average over the runs) first, in columns of bars and as a table of all."""
    evaluated = [run for run in runs if run.class_accuracy()]
    shares = [(run.place, run.label, run.class_accuracy()) for run in evaluated]
    if not shares:
        return None
    names = list(dict.fromkeys(name for _, _, by_name in shares for name in by_name))

    def mean(name: str) -> float:
        known = [by_name[name] for _, _, by_name in shares if name in by_name]
        return sum(known) / len(known)

    names.sort(key=lambda name: (mean(name), name))
    shown = names[:SHOWN_CLASSES]
    height = -(-len(shown) // BAR_COLUMNS)
    columns = [charts.bar_chart(shown[i : i + height], shares) for i in range(0, len(shown), height)]
    return {"columns": columns, "shown": len(shown), "names": names, "shares": shares, "runs": evaluated}


def _pictures(run: ReportedRun) -> dict[str, Any]:
    wrong = [sample for sample in run.samples if sample.get("true") != sample.get("predicted")]
    right = [sample for sample in run.samples if sample.get("true") == sample.get("predicted")]
    return {"run": run, "wrong": wrong[:SHOWN_PICTURES], "right": right[:SHOWN_PICTURES]}


def _destruction(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """What image-level augmentation destroys on the procedural birds, for runs that were trained on them."""
    counts = [len(run.classes) for run in runs if run.config.get("data") == "birds" and len(run.classes) >= 2]
    return _measured(min(20, max(counts))) if counts else None


@cache
def _measured(num_species: int) -> dict[str, Any]:
    from PIL import Image

    from semaug.data import destruction
    from semaug.inference.pictures import data_uri

    def picture(pixels: Any) -> str:
        return data_uri(Image.fromarray(pixels).resize((96, 96), Image.Resampling.BILINEAR), quality=92)

    rows = []
    for row in destruction.measure(num_species):
        left, top, right, bottom = row.example.pair.box
        scale = 96 / row.example.original.shape[0]
        rows.append(
            {
                "row": row,
                "original": picture(row.example.original),
                "look_alike": picture(row.example.look_alike),
                "augmented": picture(row.example.augmented),
                "circle": (
                    scale * (left + right) / 2,
                    scale * (top + bottom) / 2,
                    scale * max(right - left, bottom - top) / 2 + 5,
                ),
                "trait": row.example.pair.trait.replace("_", " "),
            }
        )
    return {"rows": rows, "left": destruction.LEFT}
