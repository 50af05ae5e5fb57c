"""Results of experiments: the scores of their runs, and other measurements (times, sizes, pictures).

A number appears only if a finished run gives it. Everything else is "not run", with the reason if it is known. The
other measurements are cached in `OUTPUT/extras`, under a digest of the runs that they depend on.
"""

import base64
import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from semaug.inference.manifest import is_complete
from semaug.inference.runs import read_evaluation
from semaug.studies.cells import DATASETS, Cell, Experiment, Extra
from semaug.studies.paired import mean_and_deviation
from semaug.studies.scales import Setup, data_note, missing_data, stand_in, train_config
from semaug.studies.tables import TextTable, signed, with_error
from semaug.training.settings import required
from semaug.util.errors import RunError
from semaug.util.files import write_json
from semaug.util.names import counted
from semaug.util.untrusted import read_json

NOT_RUN = "not run"


@dataclass(frozen=True)
class SeedRun:
    """A finished run of a cell."""

    seed: int
    top1: float  # %
    split: str
    run: Path
    best_of_test: float | None = None  # % of the best epoch on the test split, which is too high


@dataclass(frozen=True)
class Row:
    """A cell with the paper's result and ours; accuracies in %, differences in points."""

    cell: Cell
    runs: tuple[SeedRun, ...]
    reason: str  # why the cell was not run
    difference: float | None  # to the paper's result, if data and settings are the paper's
    gain: float | None  # over basic training, over the seeds that both have
    paper_gain: float | None
    data: str  # what the cell was trained on
    network: str  # the network that was trained

    @property
    def mean(self) -> float | None:
        """Mean accuracy over seeds."""
        return mean_and_deviation([run.top1 for run in self.runs])[0]

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return mean_and_deviation([run.top1 for run in self.runs])[1]

    @property
    def best_of_test(self) -> float | None:
        """Mean over seeds of the best accuracy on the test split, where it was measured."""
        return mean_and_deviation([run.best_of_test for run in self.runs if run.best_of_test is not None])[0]

    @property
    def ours(self) -> str:
        """Our result as text."""
        return NOT_RUN if self.mean is None else with_error(f"{self.mean:.1f}", self.spread)

    def to_json(self) -> dict[str, Any]:
        """The row in plain types."""
        return {
            **asdict(self.cell),
            "title": self.cell.title,
            "trained_on": self.data,
            "trained_network": self.network,
            "ours": self.mean,
            "spread": self.spread,
            "best_of_test": self.best_of_test,
            "seeds": [{"seed": r.seed, "top1": r.top1, "split": r.split, "run": r.run.name} for r in self.runs],
            "status": "measured" if self.runs else NOT_RUN,
            "reason": self.reason if not self.runs else "",
            "difference": self.difference,
            "over_basic": self.gain,
            "paper_over_basic": self.paper_gain,
        }


@dataclass(frozen=True)
class Section:
    """The part of the result that belongs to one experiment."""

    setup: Setup
    experiment: Experiment
    rows: list[Row]
    notes: list[str] = field(default_factory=list)  # stand-ins, failures
    extra: Extra = field(default_factory=dict)
    command: str = ""  # that repeats it

    def table(self, short: bool = False) -> TextTable:
        """The table of the section; a short one marks stand-ins with a star instead of naming them."""
        full, best_of_test = self.setup.scale == "full", self.setup.best_of_test
        names = ["data set", "network", "method", "paper", "ours", "seeds", "paper − basic", "ours − basic"]
        names += ["best of test"] * best_of_test
        more: dict[str, dict[str, str]] = self.extra.get("columns", {})  # texts by setting and heading
        headings = list(next(iter(more.values()), ()))
        names += ["ours − paper"] * full + [*headings, "note"]
        rows = []
        for row in self.rows:
            cell = row.cell
            here = ("", "") if full else ("*", "*") if short else (f" (here {row.data})", f" (here {row.network})")
            validated = "on the validation split" if any(run.split == "val" for run in row.runs) else ""
            rows.append(
                [
                    DATASETS[cell.dataset] + here[0],
                    cell.network + here[1],
                    cell.title,
                    "" if cell.paper is None else f"{cell.paper:.1f}",
                    row.ours,
                    " ".join(str(run.seed) for run in row.runs),
                    signed(row.paper_gain),
                    signed(row.gain),
                    *(["" if row.best_of_test is None else f"{row.best_of_test:.1f}"] * best_of_test),
                    *([signed(row.difference)] if full else []),
                    *(more.get(cell.setting, {}).get(heading, "") for heading in headings),
                    validated if row.runs else row.reason,
                ]
            )
        words = ("data set", "network", "method", "note")
        return TextTable(names, rows, words, fold=("data set", "network"), always=("method", "ours"))

    def terminal(self) -> list[Table | str]:
        """The table for the terminal, and the lines below it, which count the reasons of cells that were not run."""
        heading = f"{self.experiment.name}: {self.experiment.title}"
        reasons = Counter(row.reason for row in self.rows if not row.runs and row.reason)
        lines = [f"{NOT_RUN}, {counted(count, 'cell')}: {reason}" for reason, count in reasons.items()]
        shown: list[Table | str] = [heading]
        if self.rows:
            wrap = ("data set", "network", "method")
            shown = [self.table(short=True).terminal(heading, wrap, hide=("note",), dim=NOT_RUN)]
        if self.rows and self.setup.scale == "small":
            names = {DATASETS[row.cell.dataset]: row.data for row in self.rows}
            names |= {row.cell.network: row.network for row in self.rows}
            lines.insert(0, "* stand-ins: " + "; ".join(f"{name}: {other}" for name, other in names.items()))
        return [*shown, *(f"  {line}" for line in [*lines, *self.extra.get("lines", []), *self.notes])]


def finished_runs(cell: Cell, setup: Setup) -> tuple[SeedRun, ...]:
    """Find the finished runs of a cell at the scale of `setup`, sorted by seed."""
    if setup.scale == "small" and missing_data(cell.dataset, setup):
        return ()
    first = required(train_config(cell, setup).output)
    stem = first.name.removesuffix("0")
    runs = []
    for run in first.parent.glob(f"{stem}*"):
        seed = run.name.removeprefix(stem)
        if re.fullmatch("0|[1-9][0-9]*", seed) is None:  # another folder, or a copy such as s00
            continue
        if not is_complete(run, weights=False):  # a damaged run is repeated
            continue
        scores = required(read_evaluation(run))
        best = scores.get("best_of_test")
        runs.append(
            SeedRun(int(seed), 100 * scores["top1"], scores["split"], run, None if best is None else 100 * best)
        )
    return tuple(sorted(runs, key=lambda run: run.seed))


def collect(experiment: Experiment, setup: Setup, reasons: Mapping[Cell, str]) -> list[Row]:
    """Make the rows of an experiment, one for each cell; `reasons` say why cells were not run."""
    cells, full = experiment.at(setup.scale), setup.scale == "full"
    runs = {cell: finished_runs(cell, setup) for cell in cells}
    rows = []
    for cell in cells:
        place = cell.dataset, cell.network
        base = next((c for c in cells if c.method == "basic" and (c.dataset, c.network) == place), None)
        base = None if base is cell else base
        top1 = {run.seed: run.top1 for run in runs[cell]}
        gains = [top1[run.seed] - run.top1 for run in (runs[base] if base else ()) if run.seed in top1]
        paper, base_paper = cell.paper, base.paper if base else None
        as_published = full and setup.epochs is None
        rows.append(
            Row(
                cell,
                runs[cell],
                reasons.get(cell) or missing_data(cell.dataset, setup),
                statistics.fmean(top1.values()) - paper if top1 and as_published and paper is not None else None,
                mean_and_deviation(gains)[0],
                paper - base_paper if paper is not None and base_paper is not None else None,
                DATASETS[cell.dataset] if full else data_note(cell.dataset, setup),
                cell.network if full else stand_in(cell),
            )
        )
    return rows


def known_extra(experiment: Experiment, setup: Setup) -> Extra:
    """Read the measurements of an earlier call at the scale of `setup`; empty if there are none."""
    file = _extra_file(experiment, setup)
    return dict(read_json(file)) if experiment.has_extra and file.is_file() else {}


def measure_extra(experiment: Experiment, setup: Setup) -> None:
    """Measure at the scale of `setup`, and store the result for :func:`known_extra`; pictures need finished runs."""
    before = torch.get_num_threads()
    if setup.scale == "small" or not experiment.cells:
        torch.set_num_threads(1)  # small tensors are not faster on several threads, and much slower on busy cores
    try:
        extra = experiment.measure(experiment, setup) if experiment.measure else _pictures(experiment, setup)
    finally:
        torch.set_num_threads(before)
    write_json(_extra_file(experiment, setup), extra)


def _extra_file(experiment: Experiment, setup: Setup) -> Path:
    parts: list[Any] = [experiment.name, setup.scale]
    if experiment.picture is not None:
        runs = [run for cell in experiment.at(setup.scale) for run in finished_runs(cell, setup)]
        parts += [[run.run.name, run.top1] for run in runs]
        parts.append(experiment.picture_options.get(setup.scale))
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
    return setup.output / "extras" / f"{setup.scale}-{experiment.name}-{digest}.json"


def _pictures(experiment: Experiment, setup: Setup) -> Extra:
    """Draw one picture for each data set whose runs are finished."""
    from semaug.report.figures import FIGURES

    kind, pictures, missing = FIGURES[required(experiment.picture)], [], []
    options = experiment.picture_options.get(setup.scale, {})
    for dataset in dict.fromkeys(cell.dataset for cell in experiment.cells):
        cells = [cell for cell in experiment.at(setup.scale) if cell.dataset == dataset]
        runs = {cell.method: finished[0].run for cell in cells if (finished := finished_runs(cell, setup))}
        if len(runs) < len(cells):
            missing.append(DATASETS[dataset])
            continue
        figure = kind.draw(runs, **options)
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
        raise RunError("its runs have not finished")
    lines = [f"No picture of {', '.join(missing)}: the runs are missing."] if missing else []
    return {"pictures": pictures, "lines": lines}
