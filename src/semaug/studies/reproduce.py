"""`semaug reproduce`: run what is missing of the paper's tables and figures, and report all that there is."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from semaug.studies.cells import DATASETS, Cell, Experiment
from semaug.studies.extras import has_extra, known_extra, measure_extra, missing_hardware
from semaug.studies.page import render
from semaug.studies.registry import MODULES, experiment, experiments
from semaug.studies.results import (
    Section,
    collect,
    finished_runs,
    markdown,
    reasons,
    rich_table,
    stand_ins,
    to_json,
)
from semaug.studies.scales import NETWORKS, Setup, check_data, missing_data, train_config
from semaug.studies.workers import default_jobs, run_and_tell
from semaug.studies.worlds import draw_world
from semaug.training.methods import METHODS
from semaug.training.settings import TrainConfig
from semaug.util.errors import SemaugError
from semaug.util.files import write_atomically, write_json
from semaug.util.progress import Progress

LEFT_OUT, NOT_ASKED = "left out by the options", "not asked for"


@dataclass(frozen=True)
class Choice:
    """Which cells of the experiments are run; nothing named means all."""

    datasets: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None

    def __contains__(self, cell: Cell) -> bool:
        return (
            (not self.datasets or cell.dataset in self.datasets)
            and (not self.networks or cell.network in self.networks)
            and (not self.methods or cell.method in self.methods)
        )

    def check(self) -> None:
        """See that what is named exists."""
        known = ("data set", self.datasets, DATASETS), ("network", self.networks, NETWORKS)
        for what, named, names in (*known, ("method", self.methods, METHODS)):
            for name in named:
                if name not in names:
                    raise SemaugError(f"unknown {what} {name!r}; there are {', '.join(names)}")


@dataclass
class Plan:
    """The runs to make, and why other cells are not run."""

    configs: dict[Path, TrainConfig] = field(default_factory=dict)
    reasons: dict[Cell, str] = field(default_factory=dict)
    finished: int = 0
    cells: dict[Path, list[Cell]] = field(default_factory=dict)
    worlds: set[str] = field(default_factory=set)


def listing() -> str:
    """The names with one line each."""
    width = max(map(len, MODULES))
    lines = [f"{name:{width}}  {experiment(name).line}" for name in MODULES]
    return "\n".join([*lines, f"{'all':{width}}  all of them"])


def make_plan(chosen: Sequence[Experiment], setup: Setup, choice: Choice) -> Plan:
    """What is missing of the chosen experiments; a run that several of them share is there once."""
    plan = Plan()
    for preset in chosen:
        for cell in preset.at(setup.scale):
            reason = cell.blocked or ("" if cell in choice else LEFT_OUT) or missing_data(cell.dataset, setup)
            if reason:
                plan.reasons.setdefault(cell, reason)
                continue
            done = {run.seed for run in finished_runs(cell, setup)}
            for seed in choice.seeds if choice.seeds is not None else preset.seeds(setup.scale):
                config = train_config(cell, setup, seed)
                assert config.output is not None
                if seed not in done:
                    plan.configs.setdefault(config.output, config)
                    plan.worlds.add(cell.dataset)
                elif config.output not in plan.cells:
                    plan.finished += 1
                plan.cells.setdefault(config.output, []).append(cell)
    return plan


def reproduce(names: tuple[str, ...], setup: Setup, choice: Choice, jobs: int | None) -> int:
    """Run what is missing, print the tables, write the report; returns how many cells and pictures failed."""
    chosen = experiments(names)
    choice.check()
    check_data(setup)
    if jobs is not None and jobs < 1:
        raise SemaugError(f"--jobs must be at least 1, not {jobs}")
    try:
        setup.runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SemaugError(f"cannot write to {setup.output}: {error.strerror or error}") from error
    progress = Progress()
    plan = make_plan(chosen, setup, choice)
    failures = _run(plan, setup, jobs or default_jobs(setup.scale), progress)
    extra_failures = _measure_extras(chosen, setup, choice, progress)
    sections = _sections(chosen, setup, choice, plan, failures, extra_failures)
    _write(sections, setup)
    _print(sections, chosen, setup)
    return len(failures) + len(extra_failures)


def _run(plan: Plan, setup: Setup, jobs: int, progress: Progress) -> dict[Path, str]:
    """Make the runs; returns the reasons of those that failed."""
    if setup.scale == "small" and setup.data is None:
        for dataset in sorted(plan.worlds):
            draw_world(setup.output, dataset)
    threads = 1 if setup.scale == "small" else None  # more do not speed up such small networks
    return run_and_tell([*plan.configs.values()], plan.finished, jobs, threads, setup.output / "logs", progress)


def _measure_extras(chosen: Sequence[Experiment], setup: Setup, choice: Choice, progress: Progress) -> dict[str, str]:
    """Times, pictures and the theorem; returns the reasons of those that failed."""
    failures = {}
    for preset in chosen:
        if not has_extra(preset) or (preset.cells and not any(cell in choice for cell in preset.at(setup.scale))):
            continue
        if preset.picture is not None and not any(finished_runs(cell, setup) for cell in preset.at(setup.scale)):
            continue  # its cells say why
        if missing_hardware(preset, setup):
            continue
        try:
            if not known_extra(preset, setup):
                progress.say(f"{preset.name}: measuring")
            measure_extra(preset, setup)
        except SemaugError as error:
            failures[preset.name] = str(error)
        except Exception as error:  # a picture that fails must not end the report
            lines = str(error).strip().splitlines()
            failures[preset.name] = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if preset.name in failures:
            progress.say(f"{preset.name} failed: {failures[preset.name]}")
    return failures


# ------------------------------------------------------------------------------------------------------- reporting


def _sections(
    chosen: Sequence[Experiment],
    setup: Setup,
    choice: Choice,
    plan: Plan,
    failures: dict[Path, str],
    extra_failures: dict[str, str],
) -> list[Section]:
    """The chosen experiments, and others of which an earlier call has left something."""
    known = dict(plan.reasons)
    for output, reason in failures.items():
        for cell in plan.cells[output]:
            known[cell] = f"failed: {reason}"
    sections = []
    for name in MODULES:
        preset = experiment(name)
        if preset not in chosen:
            known = {**dict.fromkeys(preset.at(setup.scale), NOT_ASKED), **known}
        rows = collect(preset, setup, known)
        failed = [
            f"{row.cell.title} ({row.network}, {row.data}), {output.name}: {failures[output]}"
            for row in rows
            for output in failures
            if row.cell in plan.cells[output] and row.runs
        ]
        notes = _general_notes(preset, setup) + failed
        if name in extra_failures:
            notes.append(f"Failed: {extra_failures[name]}")
        section = Section(preset, rows, notes, known_extra(preset, setup), _command(preset, setup, choice))
        if has_extra(preset) and not section.extra and name not in extra_failures:
            notes.append(_absent(section, missing_hardware(preset, setup)))
        if preset in chosen or any(row.runs for row in rows):
            sections.append(section)
    return sections


def _absent(section: Section, hardware: str) -> str:
    """Why there is no picture and no time."""
    absent = [hardware] if hardware else [row.reason for row in section.rows if not row.runs]
    told = [reason for reason in dict.fromkeys(absent) if reason]
    return f"Not run{': ' + '; '.join(told) if told else ''}."


def _general_notes(preset: Experiment, setup: Setup) -> list[str]:
    if setup.scale == "full" or not preset.cells:
        return []
    return ["At small scale data and networks are stand-ins, named in the table; the paper's figures are no target."]


def _command(preset: Experiment, setup: Setup, choice: Choice) -> str:
    seeds = choice.seeds if choice.seeds is not None else preset.seeds(setup.scale)
    words = ["semaug", "reproduce", preset.name, "--scale", setup.scale, "--output", str(setup.output)]
    words += ["--seeds", *map(str, seeds)] if preset.cells else []
    words += ["--data", str(setup.data)] if setup.data is not None else []
    words += ["--epochs", str(setup.epochs)] if setup.epochs is not None else []
    words += ["--select", setup.select] if setup.select != "val" else []
    return shlex.join(words)


def heading(setup: Setup) -> list[str]:
    """What the figures are, in sentences."""
    if setup.scale == "full":
        lines = ["Full scale: the paper's settings on its data sets."]
    else:
        lines = [
            "Small scale: the same experiments with small networks, few epochs and small images. It shows that all of "
            "it runs; accuracies say nothing about the paper's claims."
        ]
    if setup.epochs is not None:
        lines.append(
            f"Every run has {setup.epochs} epoch{'s' if setup.epochs != 1 else ''}, other than the scale's own."
        )
    if setup.select == "test":
        lines.append("The best epoch was chosen on the test split, as published code does: accuracies are too good.")
    else:
        lines.append("The best epoch was chosen on a validation split, and the test split was read once.")
    return lines


def _write(sections: Sequence[Section], setup: Setup) -> None:
    lines = heading(setup)
    write_json(setup.output / "results.json", to_json(sections, setup))
    write_atomically(setup.output / "results.md", markdown(sections, setup, lines).encode())
    write_atomically(setup.output / "report.html", render(sections, setup, lines).encode())


def _print(sections: Sequence[Section], chosen: Sequence[Experiment], setup: Setup) -> None:
    console = Console(highlight=False)
    for section in sections:
        if section.experiment not in chosen:
            continue
        if section.rows:
            console.print(rich_table(section, setup))
            if setup.scale == "small":
                console.print(f"  {stand_ins(section)}", markup=False, soft_wrap=True)
        else:
            console.print(f"{section.experiment.name}: {section.experiment.title}", markup=False)
        for line in [*reasons(section), *section.extra.get("lines", []), *section.notes]:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print("\n".join(heading(setup)), markup=False, soft_wrap=True)
    console.print(f"{setup.output}: report.html, results.json, results.md", markup=False, soft_wrap=True)
