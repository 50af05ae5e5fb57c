"""Results of experiments, read from the run directories: as JSON, Markdown and tables.

A number appears only if a finished run gives it. Everything else is "not run", with the reason if it is known.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from semaug.inference.manifest import is_complete
from semaug.inference.runs import read_evaluation
from semaug.studies.cells import DATASETS, Cell, Experiment, Extra
from semaug.studies.paired import mean_and_deviation
from semaug.studies.scales import Setup, data_note, missing_data, stand_in, train_config
from semaug.studies.tables import TextTable, signed, with_error
from semaug.training.settings import required

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

    experiment: Experiment
    rows: list[Row]
    notes: list[str] = field(default_factory=list)  # stand-ins, failures
    extra: Extra = field(default_factory=dict)
    command: str = ""  # that repeats it

    def table(self, setup: Setup, short: bool = False) -> TextTable:
        """The table of the section.

        Args:
            setup: The scale and folders.
            short: Mark stand-ins with a star instead of naming them.
        """
        full = setup.scale == "full"
        names = ["data set", "network", "method", "paper", "ours", "seeds", "paper − basic", "ours − basic"]
        names += ["best of test"] * setup.best_of_test
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
                    *(["" if row.best_of_test is None else f"{row.best_of_test:.1f}"] * setup.best_of_test),
                    *([signed(row.difference)] if full else []),
                    *(more.get(cell.setting, {}).get(heading, "") for heading in headings),
                    validated if row.runs else row.reason,
                ]
            )
        words = ("data set", "network", "method", "note")
        return TextTable(names, rows, words, fold=("data set", "network"), always=("method", "ours"))

    def terminal(self, setup: Setup) -> list[Table | str]:
        """The table for the terminal, and the lines below it, which count the reasons of cells that were not run."""
        heading = f"{self.experiment.name}: {self.experiment.title}"
        reasons = Counter(row.reason for row in self.rows if not row.runs and row.reason)
        lines = [f"{NOT_RUN}, {n} cell{'s' if n != 1 else ''}: {reason}" for reason, n in reasons.items()]
        shown: list[Table | str] = [heading]
        if self.rows:
            wrap = ("data set", "network", "method")
            shown = [self.table(setup, short=True).terminal(heading, wrap, hide=("note",), dim=NOT_RUN)]
        if self.rows and setup.scale == "small":
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
        if not seed.isdecimal() or not is_complete(run, weights=False):  # a damaged run is repeated
            continue
        scores = required(read_evaluation(run))
        best = scores.get("best_of_test")
        runs.append(
            SeedRun(int(seed), 100 * scores["top1"], scores["split"], run, None if best is None else 100 * best)
        )
    return tuple(sorted(runs, key=lambda run: run.seed))


def collect(experiment: Experiment, setup: Setup, reasons: Mapping[Cell, str]) -> list[Row]:
    """Make the rows of an experiment, one for each cell.

    Args:
        experiment: The experiment.
        setup: The scale and folders.
        reasons: Why cells were not run.
    """
    cells, full = experiment.at(setup.scale), setup.scale == "full"
    runs = {cell: finished_runs(cell, setup) for cell in cells}
    rows = []
    for cell in cells:
        base = _baseline(cell, cells)
        top1 = {run.seed: run.top1 for run in runs[cell]}
        gains = [top1[run.seed] - run.top1 for run in (runs[base] if base else ()) if run.seed in top1]
        paper, base_paper = cell.paper, base.paper if base else None
        as_published = paper is not None and full and setup.epochs is None
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


def _baseline(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The cell of plain training on the same data with the same network, unless it is `cell` itself."""
    for other in cells:
        if other.method == "basic" and (other.dataset, other.network) == (cell.dataset, cell.network):
            return other if other is not cell else None
    return None
