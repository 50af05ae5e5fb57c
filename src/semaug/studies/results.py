"""What was measured: rows of a table, from the run directories alone, as JSON, Markdown and for the terminal.

A figure is shown only if a finished run gives it; everything else is "not run", with the reason where one is known.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from semaug.studies.cells import DATASETS, Cell, Experiment, baseline
from semaug.studies.paired import over_seeds
from semaug.studies.scales import Setup, data_note, missing_data, stand_in, train_config
from semaug.util.errors import SemaugError
from semaug.util.files import read_json

NOT_RUN = "not run"


@dataclass(frozen=True)
class SeedRun:
    """A finished run of a cell."""

    seed: int
    top1: float  # %
    split: str
    run: Path


@dataclass(frozen=True)
class Row:
    """A cell with the paper's figure and ours; accuracies in %, differences in points."""

    cell: Cell
    runs: tuple[SeedRun, ...]
    reason: str  # why it was not run, if it was not
    difference: float | None  # to the paper's figure; only where data and settings are the paper's
    gain: float | None  # over basic training, over the seeds that both have
    paper_gain: float | None
    data: str  # what the cells of this scale stand on
    network: str

    @property
    def mean(self) -> float | None:
        return over_seeds([run.top1 for run in self.runs])[0]

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return over_seeds([run.top1 for run in self.runs])[1]

    @property
    def ours(self) -> str:
        if self.mean is None:
            return NOT_RUN
        return f"{self.mean:.1f}" if self.spread is None else f"{self.mean:.1f} ± {self.spread:.1f}"

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.cell),
            "title": self.cell.title,
            "trained_on": self.data,
            "trained_network": self.network,
            "ours": self.mean,
            "spread": self.spread,
            "seeds": [{"seed": r.seed, "top1": r.top1, "split": r.split, "run": r.run.name} for r in self.runs],
            "status": "measured" if self.runs else NOT_RUN,
            "reason": self.reason if not self.runs else "",
            "difference": self.difference,
            "over_basic": self.gain,
            "paper_over_basic": self.paper_gain,
        }


@dataclass(frozen=True)
class Section:
    """One experiment's part of the result."""

    experiment: Experiment
    rows: list[Row]
    notes: list[str] = field(default_factory=list)  # stand-ins, failures
    extra: dict[str, Any] = field(default_factory=dict)  # what is not a run: times, pictures, the theorem
    command: str = ""

    @property
    def measured(self) -> bool:
        return any(row.runs for row in self.rows) or bool(self.extra)


def finished_runs(cell: Cell, setup: Setup) -> tuple[SeedRun, ...]:
    """The finished runs of a cell, of whatever seeds there are."""
    if cell.blocked or missing_world(cell, setup):
        return ()
    first = train_config(cell, setup).output
    assert first is not None
    stem = first.name.removesuffix("0")
    found = []
    for run in first.parent.glob(f"{stem}*"):
        seed = run.name.removeprefix(stem)
        if not seed.isdecimal() or not (run / "model.safetensors").is_file():
            continue
        with suppress(SemaugError, KeyError, TypeError):
            scores = read_json(run / "evaluation.json")
            found.append(SeedRun(int(seed), 100 * float(scores["top1"]), str(scores["split"]), run))
    return tuple(sorted(found, key=lambda run: run.seed))


def missing_world(cell: Cell, setup: Setup) -> str:
    """At small scale with a folder of one's own, the data sets that it does not stand for."""
    return missing_data(cell.dataset, setup) if setup.scale == "small" else ""


def collect(experiment: Experiment, setup: Setup, reasons: Mapping[Cell, str]) -> list[Row]:
    """The rows of an experiment; `reasons` tells why cells were not run."""
    cells = experiment.at(setup.scale)
    runs = {cell: finished_runs(cell, setup) for cell in cells}
    as_published = setup.scale == "full" and setup.epochs is None
    rows = []
    for cell in cells:
        base = baseline(cell, cells)
        mean = statistics.fmean(run.top1 for run in runs[cell]) if runs[cell] else None
        known = mean is not None and cell.paper is not None and as_published
        rows.append(
            Row(
                cell,
                runs[cell],
                cell.blocked or reasons.get(cell) or missing_data(cell.dataset, setup),
                mean - cell.paper if known and mean is not None and cell.paper is not None else None,
                _gain(runs[cell], runs[base]) if base is not None else None,
                cell.paper - base.paper if base and cell.paper is not None and base.paper is not None else None,
                DATASETS[cell.dataset] if setup.scale == "full" else data_note(cell.dataset, setup),
                cell.network if setup.scale == "full" or cell.blocked else stand_in(cell),
            )
        )
    return rows


def _gain(own: Sequence[SeedRun], base: Sequence[SeedRun]) -> float | None:
    by_seed = {run.seed: run.top1 for run in base}
    pairs = [run.top1 - by_seed[run.seed] for run in own if run.seed in by_seed]
    return statistics.fmean(pairs) if pairs else None


# ---------------------------------------------------------------------------------------------------------- tables


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f}".replace("-", "−")


def columns(section: Section, setup: Setup, short: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and rows as text; `short`: stand-ins are marked by a star, and explained below the table."""
    full = setup.scale == "full"
    names = ["data set", "network", "method", "paper", "ours", "seeds", "paper − basic", "ours − basic"]
    names += ["ours − paper"] if full else []
    if section.experiment.shapes:
        names += ["10⁶ operations", "10⁶ parameters"]
    names.append("note")
    return names, [_texts(section, row, full, short) for row in section.rows]


def _texts(section: Section, row: Row, full: bool, short: bool) -> list[str]:
    cell = row.cell
    here = ["", ""] if full else ["*", "*"] if short else [f" (here {row.data})", f" (here {row.network})"]
    texts = [
        DATASETS[cell.dataset] + here[0],
        cell.network + ("" if cell.blocked else here[1]),
        cell.title,
        "" if cell.paper is None else f"{cell.paper:.1f}",
        row.ours,
        " ".join(str(run.seed) for run in row.runs),
        signed(row.paper_gain),
        signed(row.gain),
    ]
    if full:
        texts.append(signed(row.difference))
    if section.experiment.shapes:
        texts += list(section.extra.get("shapes", {}).get(cell.setting, ("", "")))
    splits = {run.split for run in row.runs}
    note = "on the validation split" if "val" in splits else ""
    return [*texts, note if row.runs else row.reason]


def reasons(section: Section) -> list[str]:
    """Why cells were not run, one line for each reason: in a terminal there is no room for them in the table."""
    counts = Counter(row.reason for row in section.rows if not row.runs and row.reason)
    return [f"{NOT_RUN}, {count} cell{'s' if count != 1 else ''}: {reason}" for reason, count in counts.items()]


def stand_ins(section: Section) -> str:
    """What stands in for the data sets and networks of a section at small scale."""
    data = {DATASETS[row.cell.dataset]: row.data for row in section.rows}
    networks = {row.cell.network: row.network for row in section.rows if not row.cell.blocked}
    return "* stand-ins: " + "; ".join(f"{name}: {other}" for name, other in [*data.items(), *networks.items()])


def rich_table(section: Section, setup: Setup) -> Table:
    names, rows = columns(section, setup, short=True)
    alike = [i for i in (0, 1) if len({row[i] for row in rows}) == 1]
    used = [i for i, name in enumerate(names) if name in ("method", "ours") or any(row[i] for row in rows)]
    used = [i for i in used if i not in alike and names[i] != "note"]
    title = ", ".join([section.experiment.title, *(rows[0][i] for i in alike)])
    table = Table(title=Text(f"{section.experiment.name}: {title}"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in used:
        number = names[i] not in ("data set", "network", "method")
        heading = names[i].replace(" ", "\n") if number else names[i]
        table.add_column(heading, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        style = "dim" if row[4] == NOT_RUN else None
        table.add_row(*(Text(row[i]) for i in used), style=style)
    return table


def markdown(sections: Sequence[Section], setup: Setup, heading: Sequence[str]) -> str:
    lines = ["# Tables and figures of the paper", "", *heading, ""]
    for section in sections:
        lines += [f"## {section.experiment.name}: {section.experiment.title}", ""]
        lines += [f"The paper: {section.experiment.shows}", ""]
        if section.rows and section.experiment.kind != "pictures":
            names, rows = columns(section, setup)
            lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
            lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows] + [""]
        lines += [section.experiment.caption, ""]
        lines += [f"- {line}" for line in section.extra.get("lines", [])]
        lines += [f"- {note}" for note in section.notes]
        lines += ["", f"    {section.command}", ""]
    return "\n".join(lines)


def to_json(sections: Sequence[Section], setup: Setup) -> dict[str, Any]:
    return {
        "scale": setup.scale,
        "epochs": setup.epochs,
        "select": setup.select,
        "paper": "accuracies marked as the paper's are from Pu et al., IEEE TIP 2024; at small scale the data and the "
        "networks are others, and they are no target",
        "experiments": {
            section.experiment.name: {
                "title": section.experiment.title,
                "command": section.command,
                "cells": [row.to_json() for row in section.rows],
                "notes": section.notes,
                "extra": {key: value for key, value in section.extra.items() if key not in ("html", "png")},
            }
            for section in sections
        },
    }
