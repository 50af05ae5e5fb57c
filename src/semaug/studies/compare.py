"""`semaug compare`: train every method with every seed, and compare the results."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from semaug.data.readers import read_data, training_splits
from semaug.data.samples import DataSet
from semaug.inference.manifest import is_complete
from semaug.inference.runs import (
    check_not_trained_on,
    origin_of_weights,
    read_evaluation,
    read_metrics,
    split_settings,
)
from semaug.report import write_report
from semaug.report.reading import as_text
from semaug.studies.bench.result import versions
from semaug.studies.grid import Arm, CompareConfig
from semaug.studies.inputs import refuse_other_inputs
from semaug.studies.paired import CHANCE, Difference, mean_and_deviation, paired
from semaug.studies.tables import TextTable, signed, with_error
from semaug.studies.workers import default_jobs, train_all
from semaug.training.recipes import COMMON
from semaug.training.settings import TrainConfig, required
from semaug.util.errors import RunError
from semaug.util.files import refuse_edited, refuse_foreign, write_json, write_page
from semaug.util.locks import locked
from semaug.util.progress import Progress
from semaug.util.untrusted import read_json

_OUR_JOBS = re.compile(rb'\{\}|\{\n  "[^"\n]*-s\d+": \d')  # how jobs.json begins: the name of a run
_MOST_REPORTED = 12  # runs; the curves of more cannot be distinguished in the report


@dataclass(frozen=True)
class FinishedRun:
    """A finished run; accuracies are in % on the split that chose the best epoch."""

    seed: int
    top1: float  # of the best epoch
    last_top1: float  # of the last epoch
    best_epoch: int
    seconds: float  # per epoch: the median over the last half of them
    run: str  # name of the run directory


@dataclass(frozen=True)
class ArmResult:
    """The runs of an arm; accuracies in %, differences in points."""

    arm: Arm
    runs: tuple[FinishedRun, ...]
    difference: Difference | None  # to the baseline; None for the baseline itself
    time: float | None  # per epoch, relative to the baseline
    is_baseline: bool

    @property
    def mean_and_deviation(self) -> tuple[float | None, float | None]:
        """Mean and standard deviation of the accuracy over seeds."""
        return mean_and_deviation([run.top1 for run in self.runs])

    def texts(self) -> list[str]:
        """The row of the table."""
        (mean, deviation), difference = self.mean_and_deviation, self.difference
        against = "" if difference is None else with_error(signed(difference.mean), difference.error)
        return [
            self.arm.network,
            self.arm.candidate.name,
            self.arm.strength_text,
            "none" if mean is None else with_error(f"{mean:.1f}", deviation),
            str(len(self.runs)),
            "baseline" if self.is_baseline else against,
            "" if difference is None or difference.p is None else _p(difference.p),
            "" if self.time is None else f"{self.time:.2f}",
        ]

    def to_json(self) -> dict[str, Any]:
        """All numbers in plain types."""
        mean, deviation = self.mean_and_deviation
        return {
            "network": self.arm.network,
            "method": self.arm.candidate.method,
            "strength": self.arm.strength,
            "options": self.arm.candidate.text,
            "baseline": self.is_baseline,
            "top1": mean,
            "standard_deviation": deviation,
            "difference": None if self.difference is None else asdict(self.difference),
            "relative_time": self.time,
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True)
class ValidationSplit:
    """The images that the accuracies were measured on."""

    images: int  # without unreadable ones
    drawn: bool  # from the training images, by the seed
    test: bool  # whether there is a test split as well
    most_images: int | None = None  # if seeds have different numbers; `images` is the smallest then

    @property
    def sizes(self) -> tuple[str, str]:
        """The number of images, and what one image counts in points."""
        numbers = [self.images] if self.most_images is None else [self.images, self.most_images]
        return " to ".join(map(str, numbers)), " to ".join(f"{100 / number:.3g}" for number in numbers[::-1])


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`."""

    config: CompareConfig
    split: ValidationSplit
    results: list[ArmResult]
    alone: bool  # whether each run was trained alone, so that times can be compared
    page: str = ""  # a sentence about report.html
    failed: dict[str, str] = field(default_factory=dict)  # reasons by name of the run

    @property
    def conclusions(self) -> list[str]:
        """The conclusion from the runs, one sentence for each network."""
        by_network: dict[str, list[ArmResult]] = {}
        for result in self.results:
            by_network.setdefault(result.arm.network, []).append(result)
        sentences = {network: _conclusion(*results) for network, results in by_network.items()}
        if len(sentences) == 1:
            return list(sentences.values())
        return [f"{network}: {sentence}" for network, sentence in sentences.items()]

    @property
    def notes(self) -> list[str]:
        """Notes on how to read the table."""
        config, split = self.config, self.split
        select = config.training.select
        which = "validation" if select == "val" else "test"
        images, points = split.sizes
        size = f"{images} {which} images (one image is {points} points)"
        lines = [
            f"Differences are to {self.results[0].arm.title} on the same network, in points, over the seeds that both "
            "have, ± the standard error of their mean. p is that of a two-sided paired t test; it needs three seeds.",
            f"Top-1 is that of the last epoch on the {size}."
            if select == "last"
            else f"Top-1 is that of the best epoch on the {size}; the epoch was chosen on the same images.",
        ]
        if select == "test":
            lines.append("The accuracies are therefore too high.")
        elif select == "last":
            lines.append("If you choose the best method by this table, its accuracy tends to be too high.")
        elif split.drawn:
            lines.append("Each seed draws its own validation images; all methods of a seed share them.")
        else:
            lines.append("The validation images are the same for every seed: the spread is that of training alone.")
        if which != "test" and split.test:
            lines.append("This table does not use the test split. Use it once, for the method that you choose.")
        tested = sum(result.difference is not None and result.difference.p is not None for result in self.results)
        if tested > 1:
            lines.append(f"{tested} differences were tested, and p is not corrected for that.")
        if len(config.strength) > 1:
            lines.append(
                f"{len(config.strength)} strengths were tried. The best is chosen on the images that it is "
                "measured on, so its accuracy tends to be too high."
            )
        different, plan = [], config.runs()
        for name in (*COMMON, "optimizer", "lr", "weight_decay"):
            values = sorted({as_text(getattr(run, name)) for run in plan})
            different += [f"`{name}` ({', '.join(values)})"] if len(values) > 1 else []
        if different:
            lines.append(f"By their recipes or options the runs also differ in {', '.join(different)}.")
        if self.alone:
            lines.append(
                "Time is that of an epoch, relative to the baseline: the median over the last half of the epochs. It "
                "means nothing if the machine was busy with other work."
            )
        else:
            lines.append("Times are left out: not all of these runs were trained alone (`jobs` 1).")
        return lines + ([self.page] if self.page else [])

    @property
    def lines(self) -> list[str]:
        """Conclusions, failures and notes."""
        return [*self.conclusions, *(f"Failed: {run}: {why}" for run, why in self.failed.items()), *self.notes]

    def table(self) -> Table:
        """The table for the terminal."""
        wrap = ("network", "method") if any(result.arm.candidate.text for result in self.results) else ("network",)
        return self._table().terminal(self._title, wrap, group="network")

    def markdown(self) -> str:
        """The table and all sentences in Markdown."""
        command = ["", f"    {self.config.command}"] if self.config.command else []
        lines = [f"# {self._title}", "", *self._table().markdown(), "", *(f"- {line}" for line in self.lines)]
        return "\n".join([*lines, *command, ""])

    def to_json(self) -> dict[str, Any]:
        """The whole result in plain types."""
        return {
            "command": self.config.command,
            "versions": versions(),
            "settings": json.loads(json.dumps(self.config.to_json(), default=str)),
            "baseline": self.results[0].arm.candidate.name,
            "split": asdict(self.split),
            "cells": [result.to_json() for result in self.results],
            "conclusions": self.conclusions,
            "notes": self.notes,
            "failed": self.failed,
        }

    @property
    def _title(self) -> str:
        return f"Methods on {Path(self.config.data).name}"

    def _table(self) -> TextTable:
        names = ["network", "method", "λ0", "top-1 %", "seeds", "difference", "p", "time"]
        return TextTable(names, [result.texts() for result in self.results], names[:2], fold=names[:1])


def compare(config: CompareConfig) -> Comparison:
    """Train the runs that are missing, compare all of them, and write the result to the output folder.

    Finished runs are not repeated, interrupted ones are resumed, and one that fails does not end the others.

    Args:
        config: What to compare.

    Returns:
        The comparison, as written to comparison.json and comparison.md.

    Raises:
        SettingError: A setting is wrong. Nothing was trained then.
        DataError: The data cannot be read or leaves no images for validation.
        RunError: Weights were trained on images that a run would hold out for validation.
        FileError: Another process writes to the output folder, or a file cannot be read or written.

    Example:
        >>> methods = (Candidate("basic"), Candidate("learnable", {"fixed_trace": 0.5}))
        >>> result = compare(CompareConfig(methods, seeds=(0, 1, 2)))  # doctest: +SKIP
        >>> result.conclusions  # doctest: +SKIP
    """
    config.check()
    data, split = _read_data(config)
    plan, jobs = config.runs(), config.jobs or default_jobs()
    _check_weights(plan, data)
    names = ("jobs.json", "comparison.json", "comparison.md", "report.html")
    jobs_file, file, markdown, page = (config.output / name for name in names)
    with locked(config.output):
        refuse_foreign(jobs_file, _OUR_JOBS, beside=(file, markdown, page))
        refuse_foreign(file, b'{\n  "command": ')
        refuse_edited(markdown, page)
        missing = [run for run in plan if not is_complete(required(run.output), weights=False)]
        refuse_other_inputs([run for run in plan if run not in missing], data)
        alone = _note_jobs(jobs_file, plan, missing, jobs)
        failures = train_all(missing, jobs, config.output / "logs", Progress(), finished=len(plan) - len(missing))
        failed = {run.name: reason for run, reason in failures.items()}
        results, sentence = read_results(config, alone), _write_report(page, plan, split)
        comparison = Comparison(config, _without_unreadable(split, plan, data), results, alone, sentence, failed)
        write_json(file, comparison.to_json())
        write_page(markdown, comparison.markdown())
    return comparison


def _read_data(config: CompareConfig) -> tuple[DataSet, ValidationSplit]:
    """Read the data before anything is trained, so that mistakes show early."""
    shared = config.training
    with Progress().task(f"fetching {shared.data}", 0) as advance:
        data = read_data(config.data, shared.data_root, download=shared.download, progress=advance)
    splits = training_splits(data, shared.select, shared.val_per_class, shared.val_fraction, config.seeds[0])
    drawn = shared.select == "val" and "val" not in data.splits
    return data, ValidationSplit(len(splits["val"]), drawn, "test" in splits)


def _without_unreadable(split: ValidationSplit, plan: Sequence[TrainConfig], data: DataSet) -> ValidationSplit:
    """Leave out the validation images that finished runs could not read, and skipped."""
    counts = set[int]()
    for run in plan:
        folder = required(run.output)
        if not is_complete(folder, weights=False):
            continue
        listing, count = folder / "bad_images.json", split.images
        if listing.is_file():
            skipped = {row["image"] for row in read_json(listing, list[dict[str, str]])}
            samples = training_splits(data, **split_settings(vars(run)))["val"]
            count = sum(samples.name(i) not in skipped for i in range(len(samples)))
        counts.add(count)
    smallest, most = min(counts, default=split.images), max(counts, default=split.images)
    return replace(split, images=smallest, most_images=most if most > smallest else None)


def _check_weights(runs: Sequence[TrainConfig], data: DataSet) -> None:
    """Check before anything is written that no run is validated on images that its weights were trained on."""
    # Runs with the same weights and seed hold out the same images.
    distinct = {(run.weights, run.seed): run for run in runs if run.weights is not None}
    origins = [(origin, run) for (file, _), run in distinct.items() if (origin := origin_of_weights(file)) is not None]
    fingerprint = data.fingerprint() if origins else ""
    warnings = {check_not_trained_on(origin, vars(run), data, fingerprint) for origin, run in origins}
    for warning in warnings - {None}:
        Progress().say(f"warning: {warning}")


def _note_jobs(file: Path, plan: Sequence[TrainConfig], missing: Sequence[TrainConfig], jobs: int) -> bool:
    """Record how many runs were trained at a time; return whether each run of this comparison was trained alone."""
    known: dict[str, int] = read_json(file, dict[str, int]) if file.is_file() else {}
    at_a_time = min(jobs, len(missing))
    known |= {name: max(at_a_time, known.get(name, 1)) for name in (required(run.output).name for run in missing)}
    write_json(file, known)
    return all(known.get(required(run.output).name) == 1 for run in plan)


def _read_run(config: TrainConfig) -> FinishedRun | None:
    run = required(config.output)
    if not is_complete(run, weights=False):
        return None
    metrics, evaluation = read_metrics(run), required(read_evaluation(run))
    try:
        best = evaluation["best_epoch"]
        seconds = statistics.median(row["seconds"] for row in metrics[len(metrics) // 2 :])
        top1, last = (100 * row["val_top1"] for row in (metrics[best - 1], metrics[-1]))
    except (KeyError, IndexError, statistics.StatisticsError) as error:
        raise RunError(f"{run / 'metrics.jsonl'} does not have the accuracies and times of a finished run") from error
    return FinishedRun(config.seed, top1, last, best, seconds, run.name)


def read_results(config: CompareConfig, alone: bool) -> list[ArmResult]:
    """Read the finished runs of each arm, and compare them with the first arm of the same network; times if `alone`."""
    results: list[ArmResult] = []
    baselines: dict[str, tuple[FinishedRun, ...]] = {}
    for arm in config.arms():
        runs = tuple(run for seed in config.seeds if (run := _read_run(config.settings(arm, seed))) is not None)
        first = arm.network not in baselines
        base = baselines.setdefault(arm.network, runs)
        own_top1, base_top1 = ({run.seed: run.top1 for run in group} for group in (runs, base))
        time = _seconds(runs) / _seconds(base) if alone and runs and base else None
        results.append(ArmResult(arm, runs, None if first else paired(own_top1, base_top1), time, first))
    return results


def _seconds(runs: Sequence[FinishedRun]) -> float:
    return max(statistics.median(run.seconds for run in runs), 1e-3)  # seconds are rounded to this


def _conclusion(base: ArmResult, *others: ArmResult) -> str:
    name = base.arm.title
    if not base.runs:
        return f"No run of the baseline, {name}, has finished: nothing can be compared."
    if not others:
        return f"There is only {name}: nothing can be compared."
    known = [(result.arm.title, result.difference) for result in others if result.difference is not None]
    if not known:
        return f"No run other than those of {name} has finished: nothing can be compared."
    if all(difference.count == 1 for _, difference in known):
        return "One seed shows nothing: another seed may reverse every difference. Give more `seeds`."
    clear = []
    for title, difference in known:
        if difference.separates:
            side = "above" if difference.mean > 0 else "below"
            points = f"{abs(difference.mean):.1f} ± {difference.error:.1f} points"
            why = [] if difference.p is None else [f"p = {_p(difference.p)}".replace("= <", "< ")]
            why += ["may be chance with so few seeds"] if difference.p is None or difference.p >= CHANCE else []
            clear.append(f"{title} is {side} {name} by {points} over {difference.count} seeds ({', '.join(why)})")
    if clear:
        return "; ".join(clear) + "."
    return f"No difference to {name} is larger than twice its standard error: the runs do not separate these methods."


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def _write_report(page: Path, plan: Sequence[TrainConfig], split: ValidationSplit) -> str:
    """Write the page about all runs if they are few enough; return a sentence about it."""
    finished = [run for run in (required(run.output) for run in plan) if is_complete(run, weights=False)]
    if 0 < len(finished) <= _MOST_REPORTED:
        write_report(finished, page)
        scores = ", by their scores on the test split" if split.test else ""
        return f"{page.name} shows each run. It compares single runs, each of one seed{scores}."
    refuse_edited(page)
    page.unlink(missing_ok=True)  # that of an earlier comparison
    return (
        f"There is no {page.name}: it can show at most {_MOST_REPORTED} runs, and {len(finished)} have finished. "
        "`semaug report` makes one of the runs that you name."
    )
