"""Results of the benchmark: as JSON, as tables and as a chart."""

import platform
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from semaug.studies.bench.settings import PLAIN, STEPS, BenchConfig, UpdatePart
from semaug.training.settings import required
from semaug.util.names import counted

OUT_OF_MEMORY = "out of memory"


@dataclass
class Timing:
    """The measurement of one variant."""

    title: str
    seconds: list[float] = field(default_factory=list)  # per step, one value for each repetition
    memory: int | None = None  # peak in bytes; None on a CPU
    failure: str | None = None  # why it could not be measured, in one sentence
    steps: int = STEPS  # in a repetition


@dataclass(frozen=True)
class Agreement:
    """Cosine of two meta-gradients, and their distance relative to the length of the second."""

    part: UpdatePart
    of: str
    against: str
    cosine: float
    relative_error: float


@dataclass(frozen=True)
class BenchResult:
    """The measurements; `config` has all defaults filled in."""

    config: BenchConfig
    device: str
    timings: dict[str, Timing]
    reference: str | None = None  # of the meta-gradients
    agreements: list[Agreement] | None = None  # None before the comparison
    notes: list[str] = field(default_factory=list)  # what the comparison left out, or could not compute

    @property
    def _usual(self) -> tuple[int, int]:
        """Repetitions, and steps in each, of the variants that are not slow."""
        measured = [timing for timing in self.timings.values() if timing.failure is None]
        return max(len(timing.seconds) for timing in measured), max(timing.steps for timing in measured)

    def ratio(self, name: str) -> tuple[float, float | None] | None:
        """Median and spread of a variant's time relative to plain training's in the same repetition; None if failed."""
        own, plain = self.timings[name], self.timings[PLAIN]
        if own.failure or plain.failure:
            return None
        return median_and_spread([a / b for a, b in zip(own.seconds, plain.seconds, strict=False)])

    def heading(self) -> list[str]:
        """Two lines that name the settings and the machine."""
        threads = "" if self.config.on_cuda else f", {counted(torch.get_num_threads(), 'thread')}"
        return [str(self.config), f"{self.device}{threads}, torch {torch.__version__}"]

    def to_json(self) -> dict[str, Any]:
        """All numbers in plain types: times in milliseconds, memory in bytes."""
        images = 2 * required(self.config.half)
        plain_memory = self.timings[PLAIN].memory
        rows: dict[str, Any] = {}
        for name, timing in self.timings.items():
            rows[name] = {"title": timing.title, "failure": timing.failure}
            if timing.failure:
                continue
            milliseconds = [1e3 * seconds for seconds in timing.seconds]
            middle, spread = median_and_spread(milliseconds)
            ratio, ratio_spread = self.ratio(name) or (None, None)
            rows[name] |= {
                "ms_per_step": middle,
                "ms_per_step_spread": spread,
                "ms_per_image": middle / images,
                "ratio": ratio,
                "ratio_spread": ratio_spread,
                "repetitions": len(milliseconds),
                "steps_per_repetition": timing.steps,
                "ms_per_step_by_repetition": milliseconds,
            }
            if timing.memory is not None:
                share = timing.memory / plain_memory if plain_memory else None
                rows[name] |= {"peak_memory": timing.memory, "peak_memory_ratio": share}
        compared = None
        if self.agreements is not None:
            compared = {"reference": self.reference, "agreement": [asdict(row) for row in self.agreements]}
        return {
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.device,
            "threads": None if self.config.on_cuda else torch.get_num_threads(),
            "settings": {**asdict(self.config), "output": str(self.config.output)},
            "repetitions": self._usual[0],
            "steps_per_repetition": self._usual[1],
            "images_per_step": images,
            "methods": rows,
            "meta_gradient": compared,
            "notes": self.notes,
        }

    def costs(self) -> Group:
        """Time and memory as a table for the terminal."""
        rows = self.to_json()["methods"].values()
        memory = any("peak_memory" in row for row in rows)
        numbers = ("ms/step", "ms/image", "× plain", *(("GB", "× plain") if memory else ()))
        table = _table(_turns(*self._usual), ("method",), numbers)
        lines, slow = [], []
        for row in rows:
            if row["failure"]:
                table.add_row(row["title"], _short(row["failure"]))
                lines += [f"{row['title']}: {row['failure']}"] if row["failure"] != OUT_OF_MEMORY else []
                continue
            share = row.get("peak_memory_ratio")
            texts = [
                _with_spread(row["ms_per_step"], row["ms_per_step_spread"]),
                _digits(row["ms_per_image"]),
                "–" if row["ratio"] is None else _with_spread(row["ratio"], row["ratio_spread"]),
                _gigabytes(row["peak_memory"]) if "peak_memory" in row else "–",
                "–" if share is None else f"{share:.2f}",
            ]
            table.add_row(row["title"], *texts[: len(numbers)])
            turns = row["repetitions"], row["steps_per_repetition"]
            slow += [f"{row['title']} ({_turns(*turns)})"] if turns != self._usual else []
        lines += [f"slow, measured in fewer or shorter turns: {', '.join(slow)}"] if slow else []
        return Group("", table, "", *map(Text, lines))

    def comparison(self) -> Group:
        """The agreement of the meta-gradients as a table for the terminal."""
        title = "meta-gradient of CovNet: cosine and relative error"
        table = _table(title, ("part", "engine", "against"), ("cosine", "error"))
        for row in self.agreements or ():
            table.add_row(row.part, row.of, row.against, f"{row.cosine:.6f}", f"{row.relative_error:.1e}")
        return Group(*(("", table, "") if self.agreements else ()), *map(Text, self.notes))

    def chart(self) -> str:
        """Draw times relative to plain training, with their spread, as the contents of an SVG file."""
        from semaug.report import canvas, charts

        values, spreads, texts = [], [], []
        for name, timing in self.timings.items():
            ratio = self.ratio(name)
            memory = "" if timing.memory is None else f" · {_gigabytes(timing.memory)} GB"
            values.append(None if ratio is None else ratio[0])
            spreads.append(None if ratio is None else ratio[1])
            texts.append(_short(timing.failure) if ratio is None else f"{_with_spread(*ratio)}{memory}")
        series = []
        for label, slot, own in (("known", 5, {PLAIN, "isda"}), ("ours", 0, set(self.timings) - {PLAIN, "isda"})):
            shown = [text if name in own else "" for name, text in zip(self.timings, texts, strict=True)]
            series.append(charts.Series(label, slot, values, spread=spreads, texts=shown))
        title = "Time of a training step, relative to plain cross-entropy"
        figure = charts.rows([timing.title for timing in self.timings.values()], series, reference=1.0)
        inch = 1 / figure.get_figheight()
        figure.text(0, 1 + 0.1 * inch, "\n".join(self.heading()), va="bottom", size=8.5, color=canvas.SOFT)
        figure.text(0, 1 + 0.45 * inch, title, va="bottom", size=11, weight="bold", color=canvas.INK)
        return canvas.to_svg(figure, title)


def median_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The median of one or more values, and half of their interquartile range; one value has no spread."""
    if len(values) == 1:
        return values[0], None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2


def sentence(error: BaseException) -> str:
    """Summarise an error: "out of memory", the first line of its message, or its class."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def versions() -> dict[str, str]:
    """Versions of the software that results depend on."""
    import timm

    import semaug

    packages = {"semaug": semaug.__version__, "torch": torch.__version__, "timm": timm.__version__}
    return {name: str(version) for name, version in packages.items()} | {"python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """The name of the GPU or CPU, as the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table without borders, narrow enough for 80 columns."""
    look: dict[str, Any] = {"show_edge": False, "pad_edge": False, "collapse_padding": True}
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **look)
    for heading in words:
        table.add_column(heading, no_wrap=len(words) > 1)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _turns(repetitions: int, steps: int) -> str:
    return f"{counted(repetitions, 'repetition')} of {counted(steps, 'step')}"


def _short(failure: str | None) -> str:
    """A failure in a word or two, for tables."""
    return "–" if failure is None else failure if failure == OUT_OF_MEMORY else "failed"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}" if count >= 1e10 else f"{count / 1e9:.2f}"


def _digits(value: float) -> str:
    """A number with about three significant digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_spread(middle: float, spread: float | None) -> str:
    return _digits(middle) if spread is None else f"{_digits(middle)} ± {_digits(spread)}"
