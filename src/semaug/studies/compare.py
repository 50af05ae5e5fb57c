"""`semaug compare`: which method is best on these images? Runs what is missing, and says what the runs can show."""

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from semaug.data.readers import read_data, training_splits
from semaug.inference.runs import read_metrics
from semaug.report import write_report
from semaug.studies.bench.result import versions
from semaug.studies.grid import Cell, CompareConfig, command
from semaug.studies.paired import CHANCE, Difference, over_seeds, paired
from semaug.studies.workers import default_jobs, run_and_tell
from semaug.training.settings import TrainConfig, given
from semaug.util.errors import SemaugError
from semaug.util.files import read_json, write_atomically, write_json
from semaug.util.progress import Progress

MOST_REPORTED = 12  # runs; with more, the curves of the report cannot be told apart


@dataclass(frozen=True)
class Measured:
    """A finished run."""

    seed: int
    top1: float  # %, of the epoch that was kept, on the split that chose it
    last_top1: float  # %, of the last epoch
    best_epoch: int
    seconds: float  # per epoch, the median over the last half of them
    run: str


@dataclass(frozen=True)
class Row:
    """A cell of the grid with what its runs gave; accuracies in %, differences in points."""

    cell: Cell
    runs: tuple[Measured, ...]
    difference: Difference | None  # to the baseline; None for the baseline itself
    time: float | None  # per epoch, relative to the baseline
    is_baseline: bool

    @property
    def mean(self) -> float | None:
        return over_seeds([run.top1 for run in self.runs])[0]

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return over_seeds([run.top1 for run in self.runs])[1]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.cell),
            "baseline": self.is_baseline,
            "top1": self.mean,
            "standard_deviation": self.spread,
            "difference": None if self.difference is None else asdict(self.difference),
            "relative_time": self.time,
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True)
class Split:
    """What the accuracies were measured on."""

    images: int
    drawn: bool  # from the training images, by the seed
    test: bool  # whether there is a test split besides


def compare(config: CompareConfig) -> dict[str, str]:
    """Make the runs that are missing, print and write the comparison; returns the reasons of runs that failed."""
    config.check()
    progress = Progress()
    split = _split(config, progress)
    cells = list(config.cells())
    plan = [config.settings(cell, seed) for cell in cells for seed in config.seeds]
    missing = [run for run in plan if not _finished(given(run.output))]
    alone = _note_jobs(config, missing)
    failures = run_and_tell(missing, len(plan) - len(missing), _jobs(config), None, config.output / "logs", progress)
    failed = {run.name: reason for run, reason in failures.items()}
    rows = collect(config, cells, alone)
    concluded = conclusions(rows)
    remarks = notes(config, rows, split, alone, plan)
    remarks.append(_report(config, plan, split))
    _write(config, rows, split, concluded, remarks, failed)
    _print(config, rows, concluded, remarks, failed)
    return failed


def _split(config: CompareConfig, progress: Progress) -> Split:
    """The split that chooses the best epoch; to read the data first finds mistakes before anything is trained."""
    shared = config.training
    with progress.task(f"fetching {shared.data}", 0) as advance:
        data = read_data(config.data, shared.data_root, download=shared.download, progress=advance)
    splits = training_splits(data, shared.select, shared.val_per_class, shared.val_fraction, config.seeds[0])
    if not len(splits["val"]):
        raise SemaugError(f"{data.name} leaves no images to validate on; give a larger --val-per-class")
    return Split(len(splits["val"]), shared.select == "val" and "val" not in data.splits, "test" in splits)


# ------------------------------------------------------------------------------------------------------------ runs


def _jobs(config: CompareConfig) -> int:
    return config.jobs or default_jobs("full")


def _finished(run: Path) -> bool:
    return (run / "model.safetensors").is_file() and (run / "evaluation.json").is_file()


def _note_jobs(config: CompareConfig, missing: Sequence[TrainConfig]) -> bool:
    """Keep in mind how many runs are made at once; returns whether all of this comparison are made alone."""
    file = config.output / "jobs.json"
    known = read_json(file) if file.is_file() else {}
    at_once = min(_jobs(config), len(missing))
    known |= {name: max(at_once, known.get(name, 1)) for name in (given(run.output).name for run in missing)}
    write_json(file, known)
    names = (given(config.settings(cell, seed).output).name for cell in config.cells() for seed in config.seeds)
    return all(known.get(name) == 1 for name in names)


def _measured(config: TrainConfig) -> Measured | None:
    """What a run gave; None if it has not finished."""
    run = given(config.output)
    if not _finished(run):
        return None
    with suppress(SemaugError, ValueError, KeyError, IndexError, TypeError):
        metrics, best = read_metrics(run), int(read_json(run / "evaluation.json")["best_epoch"])
        seconds = statistics.median(row["seconds"] for row in metrics[len(metrics) // 2 :])
        kept, last = (100 * float(row["val_top1"]) for row in (metrics[best - 1], metrics[-1]))
        return Measured(config.seed, kept, last, best, seconds, run.name)
    return None


def collect(config: CompareConfig, cells: Sequence[Cell], alone: bool) -> list[Row]:
    """The cells with their runs, each beside the first cell of its network."""
    rows: list[Row] = []
    base: dict[str, tuple[Measured, ...]] = {}
    for cell in cells:
        found = (_measured(config.settings(cell, seed)) for seed in config.seeds)
        runs = tuple(run for run in found if run is not None)
        first = cell.network not in base
        others = base.setdefault(cell.network, runs)
        difference = None if first else paired(_by_seed(runs), _by_seed(others))
        time = _seconds(runs) / _seconds(others) if alone and runs and others else None
        rows.append(Row(cell, runs, difference, time, first))
    return rows


def _by_seed(runs: Sequence[Measured]) -> dict[int, float]:
    return {run.seed: run.top1 for run in runs}


def _seconds(runs: Sequence[Measured]) -> float:
    return max(statistics.median(run.seconds for run in runs), 1e-3)  # as they are rounded


# ------------------------------------------------------------------------------------------------------- sentences


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What can be concluded, in a sentence for each network."""
    networks = list(dict.fromkeys(row.cell.network for row in rows))
    told = [(name, _conclusion([row for row in rows if row.cell.network == name])) for name in networks]
    return [sentence if len(networks) == 1 else f"{name}: {sentence}" for name, sentence in told]


def _conclusion(rows: Sequence[Row]) -> str:
    base, others = rows[0], rows[1:]
    if not base.runs:
        return f"No run of the baseline, {base.cell.title}, has finished: nothing can be compared."
    if not others:
        return f"There is only {base.cell.title}: nothing can be compared."
    known = [(row, row.difference) for row in others if row.difference is not None]
    if not known:
        return f"No other run has finished beside {base.cell.title}: nothing can be compared."
    if all(difference.count == 1 for _, difference in known):
        return "A single seed shows nothing, as another seed may turn every difference round; name more with --seeds."
    clear = [_told(row, difference, base) for row, difference in known if difference.separates]
    if clear:
        return "; ".join(clear) + "."
    return (
        f"No difference to {base.cell.title} is larger than twice its standard error: nothing separates these methods."
    )


def _told(row: Row, difference: Difference, base: Row) -> str:
    where = "above" if difference.mean > 0 else "below"
    points = f"{abs(difference.mean):.1f} ± {difference.error:.1f} points"
    chance = difference.p is None or difference.p >= CHANCE
    why = [] if difference.p is None else [f"p = {_p(difference.p)}".replace("= <", "< ")]
    why += ["so few seeds can agree by chance"] if chance else []
    return f"{row.cell.title} is {where} {base.cell.title} by {points} over {difference.count} seeds ({', '.join(why)})"


def notes(
    config: CompareConfig, rows: Sequence[Row], split: Split, alone: bool, plan: Sequence[TrainConfig]
) -> list[str]:
    """What one has to know to read the table."""
    lines = [
        f"Differences are to {rows[0].cell.title} on the same network, in points, over the seeds that both have, ± the "
        "standard error of their mean; p is that of a paired t test, two-sided, from three seeds on.",
        _split_note(config, split),
    ]
    tested = sum(row.difference is not None and row.difference.p is not None for row in rows)
    if tested > 1:
        lines.append(f"{tested} differences were tested, and p makes no allowance for that.")
    if config.strength is not None and len(config.strength) > 1:
        lines.append(
            f"{len(config.strength)} strengths were tried: the best of them is chosen on the same images that it is "
            "measured on, so its figure is optimistic."
        )
    lines += _unlike(plan)
    if alone:
        lines.append(
            "Time is that of an epoch, the median over the last half of them, relative to the baseline's; it means "
            "nothing if the machine was busy with something else."
        )
    else:
        lines.append(
            "Times are left out: not all of these runs were made alone (--jobs 1), and others slow a run down."
        )
    return lines


def _split_note(config: CompareConfig, split: Split) -> str:
    one = f"one image is {100 / split.images:.2g} points"
    if config.training.select == "test":
        return (
            f"Top-1 is that of the best epoch on the {split.images} test images ({one}), which also chose the epoch: "
            "the accuracies are too good."
        )
    told = f"Top-1 is that of the best epoch on the {split.images} validation images ({one}), which chose the epoch"
    if split.drawn:
        told += "; each seed draws its own, and all methods of a seed share them."
    else:
        told += "; they are the same for every seed, so the spread is that of training alone."
    if split.test:
        told += " The test split has no say here: read it once, for the method that you choose."
    return told


def _unlike(plan: Sequence[TrainConfig]) -> list[str]:
    """Settings whose defaults depend on the method, where that makes the runs differ."""
    found = []
    for name in ("epochs", "lr", "weight_decay"):
        values = sorted({getattr(config, name) for config in plan})
        if len(values) > 1:
            found.append(f"--{name.replace('_', '-')} ({', '.join(f'{value:g}' for value in values)})")
    if not found:
        return []
    return [
        f"P2P-Net has defaults of its own, so the runs differ in {', '.join(found)}; give a value to compare alike."
    ]


# ---------------------------------------------------------------------------------------------------------- tables


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows as text."""
    names = ["network", "method", "λ0", "top-1 %", "seeds", "difference", "p", "time"]
    return names, [_texts(row) for row in rows]


def _texts(row: Row) -> list[str]:
    difference = row.difference
    return [
        row.cell.network,
        row.cell.name,
        "" if row.cell.strength is None else f"{row.cell.strength:g}",
        "none" if row.mean is None else _with_error(f"{row.mean:.1f}", row.spread),
        str(len(row.runs)),
        "baseline" if row.is_baseline else "" if difference is None else _difference(difference),
        "" if difference is None or difference.p is None else _p(difference.p),
        "" if row.time is None else f"{row.time:.2f}",
    ]


def _difference(difference: Difference) -> str:
    return _with_error(f"{difference.mean:+.1f}".replace("-", "−"), difference.error)


def _with_error(text: str, error: float | None) -> str:
    return text if error is None else f"{text} ± {error:.1f}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def rich_table(rows: Sequence[Row], title: str) -> Table:
    names, texts = columns(rows)
    used = [i for i in range(len(names)) if any(row[i] for row in texts)]
    if len({row[0] for row in texts}) == 1:
        used.remove(0)
        title += f", {texts[0][0]}"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in used:
        text = names[i] in ("network", "method")
        wide = names[i] == "network" or (text and any(row.cell.options for row in rows))
        table.add_column(names[i], justify="left" if text else "right", overflow="fold", no_wrap=not wide)
    for i, row in enumerate(texts):
        new = i + 1 < len(texts) and texts[i + 1][0] != row[0]
        table.add_row(*(Text(row[i]) for i in used), end_section=new)
    return table


def _markdown(title: str, rows: Sequence[Row], lines: Sequence[str], said: str) -> str:
    names, texts = columns(rows)
    table = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    table += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in texts]
    return "\n".join([f"# {title}", "", *table, "", *(f"- {line}" for line in lines), "", f"    {said}", ""])


# ----------------------------------------------------------------------------------------------------------- files


def _title(config: CompareConfig) -> str:
    return f"Methods on {Path(config.data).name}"


def _failures(failed: Mapping[str, str]) -> list[str]:
    return [f"Failed: {name}: {reason}" for name, reason in failed.items()]


def _report(config: CompareConfig, plan: Sequence[TrainConfig], split: Split) -> str:
    """Write the page about all runs, if they are few enough; returns a sentence about it."""
    finished = [run for run in (given(run.output) for run in plan) if _finished(run)]
    page = config.output / "report.html"
    if 0 < len(finished) <= MOST_REPORTED:
        write_report(finished, page)
        told = f"{page.name} shows each run by itself; what it says of the best run is about one seed"
        return f"{told}, and its scores are the test split's." if split.test else f"{told}."
    page.unlink(missing_ok=True)  # that of another comparison
    return (
        f"There is no {page.name}: it can show at most {MOST_REPORTED} runs, and {len(finished)} have finished; "
        "semaug report RUN … makes one of those that you name."
    )


def _write(
    config: CompareConfig,
    rows: Sequence[Row],
    split: Split,
    concluded: Sequence[str],
    remarks: Sequence[str],
    failed: Mapping[str, str],
) -> None:
    said = command(config)
    content = {
        "command": said,
        "versions": versions(),
        "settings": json.loads(json.dumps(asdict(config), default=str)),
        "baseline": rows[0].cell.name,
        "split": asdict(split),
        "cells": [row.to_json() for row in rows],
        "conclusions": list(concluded),
        "notes": list(remarks),
        "failed": dict(failed),
    }
    lines = [*concluded, *_failures(failed), *remarks]
    write_json(config.output / "comparison.json", content)
    write_atomically(config.output / "comparison.md", _markdown(_title(config), rows, lines, said).encode())


def _print(
    config: CompareConfig,
    rows: Sequence[Row],
    concluded: Sequence[str],
    remarks: Sequence[str],
    failed: Mapping[str, str],
) -> None:
    console = Console(highlight=False)
    console.print(rich_table(rows, _title(config)))
    for line in [*concluded, "", *_failures(failed), *remarks]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{config.output}: comparison.md, comparison.json", markup=False, soft_wrap=True)
