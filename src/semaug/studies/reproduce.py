"""`semaug reproduce`: train the missing runs of the paper's tables and figures, and report all results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from semaug.data.readers import read_data
from semaug.studies.cells import DATASETS, Cell, Experiment
from semaug.studies.inputs import refuse_other_inputs
from semaug.studies.page import render
from semaug.studies.presets import all_experiments, experiments
from semaug.studies.results import Section, collect, finished_runs, known_extra, measure_extra
from semaug.studies.scales import NETWORKS, Setup, draw_world, missing_data, train_config
from semaug.studies.workers import default_jobs, reason_of, train_all
from semaug.training.methods import METHODS
from semaug.training.settings import TrainConfig, required
from semaug.util.errors import DataError, SettingError
from semaug.util.files import refuse_edited, refuse_foreign, write_json, write_page
from semaug.util.locks import locked
from semaug.util.names import counted
from semaug.util.progress import Progress

_LEFT_OUT, _NOT_REQUESTED = "left out by the options", "not requested"


@dataclass(frozen=True)
class Choice:
    """Which cells of the experiments to run; an empty tuple means all."""

    datasets: tuple[str, ...] = ()  # keys of `DATASETS`
    networks: tuple[str, ...] = ()  # as the paper writes them
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None  # None for each experiment's default

    def __contains__(self, cell: Cell) -> bool:
        wanted = (cell.dataset, self.datasets), (cell.network, self.networks), (cell.method, self.methods)
        return all(not names or name in names for name, names in wanted)

    def check(self) -> None:
        """Check that the names of data sets, networks and methods are known."""
        known = ("data set", self.datasets, DATASETS), ("network", self.networks, NETWORKS)
        for what, chosen, names in (*known, ("method", self.methods, METHODS)):
            for name in chosen:
                if name not in names:
                    raise SettingError(f"unknown {what} {name!r}; there are {', '.join(names)}")


@dataclass
class RunPlan:
    """The runs to train, and why other cells are not run or have failed."""

    configs: dict[Path, TrainConfig] = field(default_factory=dict)
    reasons: dict[Cell, str] = field(default_factory=dict)
    finished: int = 0
    cells: dict[Path, list[Cell]] = field(default_factory=dict)  # that a run belongs to
    failures: dict[Path, str] = field(default_factory=dict)  # reasons by run
    not_measured: dict[str, str] = field(default_factory=dict)  # reasons by name of the experiment


@dataclass(frozen=True)
class Reproduction:
    """The result of :func:`reproduce`."""

    setup: Setup
    sections: list[Section]  # the chosen experiments, and others of which earlier calls left runs
    chosen: list[Experiment]
    failed: int  # runs and measurements

    @property
    def heading(self) -> list[str]:
        """Sentences about the whole result."""
        setup, lines = self.setup, []
        if setup.scale == "full":
            lines.append("Full scale: the paper's settings on its data sets.")
        else:
            lines.append(
                "Small scale: the same experiments with small networks, few epochs and small images. It shows that "
                "everything runs; the accuracies say nothing about the paper's claims."
            )
        if setup.epochs is not None:
            lines.append(f"Every run has {counted(setup.epochs, 'epoch')} instead of the scale's own number.")
        if setup.select == "test":
            lines.append("The best epoch was chosen on the test split, as in published code: accuracies are too high.")
        elif setup.select == "last":
            lines.append("All training images were trained on. The last epoch was evaluated, once, on the test split.")
        else:
            lines.append("The best epoch was chosen on a validation split. The test split was used once.")
        if setup.best_of_test:
            lines.append(
                '"Best of test" is the best epoch on the test split, as published code reports: it is too high.'
            )
        return lines

    def markdown(self) -> str:
        """The whole result in Markdown."""
        lines = ["# Tables and figures of the paper", "", *self.heading, ""]
        for section in self.sections:
            preset = section.experiment
            lines += [f"## {preset.name}: {preset.title}", "", f"The paper: {preset.shows}", ""]
            if section.rows and preset.kind != "pictures":
                lines += [*section.table().markdown(), ""]
            lines += [preset.caption, "", *(f"- {line}" for line in [*section.extra.get("lines", []), *section.notes])]
            lines += ["", f"    {section.command}", ""]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The whole result in plain types."""
        setup = self.setup
        return {
            "scale": setup.scale,
            "epochs": setup.epochs,
            "select": setup.select,
            "best_of_test": setup.best_of_test,
            "paper": "The accuracies marked as the paper's are from Pu et al., IEEE TIP 2024. At small scale the data "
            "and the networks differ from the paper's, and its accuracies are not a target.",
            "experiments": {
                section.experiment.name: {
                    "title": section.experiment.title,
                    "command": section.command,
                    "cells": [row.to_json() for row in section.rows],
                    "notes": section.notes,
                    "extra": section.extra,
                }
                for section in self.sections
            },
        }


def make_plan(chosen: Sequence[Experiment], setup: Setup, choice: Choice) -> RunPlan:
    """Find the runs that are missing; a run that several experiments share occurs once."""
    plan = RunPlan()
    for preset in chosen:
        for cell in preset.at(setup.scale):
            reason = missing_data(cell.dataset, setup) if cell in choice else _LEFT_OUT
            if reason:
                plan.reasons.setdefault(cell, reason)
                continue
            done = {run.seed for run in finished_runs(cell, setup)}
            for seed in choice.seeds if choice.seeds is not None else preset.seeds(setup.scale):
                config = train_config(cell, setup, seed)
                run = required(config.output)
                if seed not in done:
                    plan.configs.setdefault(run, config)
                elif run not in plan.cells:
                    plan.finished += 1
                plan.cells.setdefault(run, []).append(cell)
    return plan


def reproduce(
    names: Sequence[str],
    setup: Setup,
    choice: Choice,
    jobs: int | None = None,
    command: Callable[[str, Sequence[int]], str] = lambda name, seeds: "",
) -> Reproduction:
    """Train the missing runs of some experiments, and write report.html, results.json and results.md.

    Args:
        names: Names of the experiments; ``"all"`` for all of them.
        setup: The scale and folders.
        choice: Which cells to run.
        jobs: Number of runs at a time; None for the default of the machine.
        command: Makes the command that repeats an experiment, from its name and seeds, for the report.

    Raises:
        SettingError: A name is unknown or a setting is wrong. Nothing was trained then.
        DataError: The data folder is missing, or finished runs were trained on other images than there are now.
        FileError: The output folder cannot be written, has files of these names of another kind, or another process
            writes to it.
    """
    chosen = experiments(names)
    choice.check()
    if setup.data is not None and not setup.data.is_dir():
        raise DataError(f"there is no folder {setup.data}")
    if setup.best_of_test and setup.select != "last":
        raise SettingError("`best_of_test` needs `select` last")
    if jobs is not None and jobs < 1:
        raise SettingError(f"`jobs` must be at least 1, not {jobs}")
    progress, small = Progress(), setup.scale == "small"
    results, *pages = (setup.output / name for name in ("results.json", "results.md", "report.html"))
    with locked(setup.output):
        refuse_foreign(results, b'{\n  "scale": "full"', b'{\n  "scale": "small"', beside=pages)
        refuse_edited(*pages)
        plan = make_plan(chosen, setup, choice)
        if small and setup.data is None:
            for dataset in sorted({cell.dataset for run in plan.configs for cell in plan.cells[run]}):
                draw_world(setup.output, dataset)
        _check_inputs(setup)
        plan.failures = train_all(
            [*plan.configs.values()],
            jobs or default_jobs(small),
            setup.output / "logs",
            progress,
            finished=plan.finished,
            threads=1 if small else None,  # more do not speed up such small networks
        )
        plan.not_measured = _measure_extras(chosen, setup, choice, progress)
        sections = []
        for preset in all_experiments().values():
            seeds = choice.seeds or preset.seeds(setup.scale) if preset.cells else ()
            section = _section(preset, preset in chosen, setup, plan, command(preset.name, seeds))
            if preset in chosen or any(row.runs for row in section.rows):
                sections.append(section)
        result = Reproduction(setup, sections, chosen, len(plan.failures) + len(plan.not_measured))
        write_json(results, result.to_json())
        for file, content in zip(pages, (result.markdown(), render(sections, result.heading)), strict=True):
            write_page(file, content)
    return result


def _check_inputs(setup: Setup) -> None:
    """Raise a DataError if finished runs on a data set, which the report shows together, had different images."""
    finished: dict[str, dict[Path, TrainConfig]] = {}
    for cell in {cell for preset in all_experiments().values() for cell in preset.at(setup.scale)}:
        for run in finished_runs(cell, setup):
            finished.setdefault(cell.dataset, {})[run.run] = train_config(cell, setup, run.seed)
    for dataset, runs in sorted(finished.items()):
        config = next(iter(runs.values()))
        is_there = not missing_data(dataset, setup) and (setup.scale == "full" or Path(config.data).is_dir())
        refuse_other_inputs([*runs.values()], read_data(config.data, config.data_root) if is_there else None)


def _measure_extras(chosen: Sequence[Experiment], setup: Setup, choice: Choice, progress: Progress) -> dict[str, str]:
    """Take the measurements other than training runs; return the reasons of failures by name of the experiment."""
    failures = {}
    for preset in chosen:
        cells = preset.at(setup.scale)
        if not preset.has_extra or known_extra(preset, setup) or _missing_hardware(preset, setup):
            continue
        if cells and not any(cell in choice for cell in cells):
            continue
        if preset.picture is not None and not any(finished_runs(cell, setup) for cell in cells):
            continue  # the rows of the table say why
        progress.say(f"{preset.name}: measuring")
        try:
            measure_extra(preset, setup)
        except Exception as error:  # the report is written in any case
            failures[preset.name] = reason_of(error)
            progress.say(f"{preset.name} failed: {failures[preset.name]}")
    return failures


def _missing_hardware(preset: Experiment, setup: Setup) -> str:
    """Why an experiment cannot be measured on this machine; empty if it can."""
    on_cpu = setup.device == "cpu" or (setup.device is None and not torch.cuda.is_available())
    needed = preset.needs_gpu and setup.scale == "full"
    return "the time per step at full scale needs a GPU" if needed and on_cpu else ""


def _section(preset: Experiment, requested: bool, setup: Setup, plan: RunPlan, command: str) -> Section:
    reasons = plan.reasons | {cell: f"failed: {why}" for run, why in plan.failures.items() for cell in plan.cells[run]}
    if not requested:
        reasons = dict.fromkeys(preset.at(setup.scale), _NOT_REQUESTED) | reasons
    rows = collect(preset, setup, reasons)
    extra = known_extra(preset, setup)
    notes = []
    if setup.scale == "small" and preset.cells:
        notes.append("At small scale data and networks are stand-ins, named in the table: results are not a target.")
    notes += [  # one seed of several failed
        f"{row.cell.title} ({row.network}, {row.data}), {run.name}: {reason}"
        for row in rows
        for run, reason in plan.failures.items()
        if row.cell in plan.cells[run] and row.runs
    ]
    if preset.name in plan.not_measured:
        notes.append(f"Failed: {plan.not_measured[preset.name]}")
    elif preset.has_extra and not extra:
        hardware = _missing_hardware(preset, setup)
        why = [hardware] if hardware else [row.reason for row in rows if not row.runs and row.reason]
        notes.append(f"Not run{': ' + '; '.join(dict.fromkeys(why)) if why else ''}.")
    return Section(setup, preset, rows, notes, extra, command)
