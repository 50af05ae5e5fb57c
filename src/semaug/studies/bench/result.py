"""What was measured: as tables, as JSON and as a chart."""

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

from semaug.studies.bench.settings import PLAIN, STEPS, BenchConfig, Part
from semaug.training.settings import given

OUT_OF_MEMORY = "out of memory"


@dataclass
class Timing:
    """What was measured of one method."""

    title: str
    seconds: list[float] = field(default_factory=list)  # per step, one for each repetition from the first on
    memory: int | None = None  # bytes
    failure: str | None = None  # one sentence
    steps: int = STEPS  # in a repetition

    @property
    def turns(self) -> str:
        return _turns(len(self.seconds), self.steps)


@dataclass(frozen=True)
class Agreement:
    """Cosine of two meta-gradients, and their distance relative to the length of the second."""

    part: Part
    of: str
    against: str
    cosine: float
    relative_error: float


@dataclass(frozen=True)
class Result:
    """What :func:`measure` found; `config` has all defaults filled in."""

    config: BenchConfig
    device: str
    timings: dict[str, Timing]
    reference: str | None = None  # what the reference for the meta-gradients is
    agreements: list[Agreement] | None = None  # None: not compared yet
    notes: list[str] = field(default_factory=list)  # on the comparison

    @property
    def measured(self) -> list[Timing]:
        return [timing for timing in self.timings.values() if timing.failure is None]

    @property
    def repetitions(self) -> int:
        return max(len(timing.seconds) for timing in self.measured)

    @property
    def steps(self) -> int:
        return max(timing.steps for timing in self.measured)

    def ratio(self, name: str) -> tuple[float, float | None] | None:
        """Median and spread of a method's time relative to plain training's in the same repetition."""
        own, plain = self.timings[name], self.timings[PLAIN]
        if own.failure or plain.failure:
            return None
        return median_and_spread([a / b for a, b in zip(own.seconds, plain.seconds, strict=False)])

    def memory_ratio(self, name: str) -> float | None:
        """A method's peak of memory relative to plain training's."""
        own, plain = self.timings[name].memory, self.timings[PLAIN].memory
        return own / plain if own is not None and plain else None

    def heading(self) -> list[str]:
        """What was measured, and where."""
        count = torch.get_num_threads()
        cuda = str(self.config.device).startswith("cuda")
        threads = "" if cuda else f", {count} thread{'s' if count != 1 else ''}"
        return [str(self.config), f"{self.device}{threads}, torch {torch.__version__}"]

    def to_json(self) -> dict[str, Any]:
        """All of it in plain types; times in milliseconds, memory in bytes."""
        images = 2 * given(self.config.half)
        rows: dict[str, Any] = {}
        for name, timing in self.timings.items():
            rows[name] = {"title": timing.title, "failure": timing.failure}
            if timing.failure:
                continue
            middle, spread = median_and_spread(timing.seconds)
            ratio, ratio_spread = self.ratio(name) or (None, None)
            rows[name] |= {
                "ms_per_step": 1e3 * middle,
                "ms_per_step_spread": None if spread is None else 1e3 * spread,
                "ms_per_image": 1e3 * middle / images,
                "ratio": ratio,
                "ratio_spread": ratio_spread,
                "repetitions": len(timing.seconds),
                "steps_per_repetition": timing.steps,
                "ms_per_step_by_repetition": [1e3 * seconds for seconds in timing.seconds],
            }
            if timing.memory is not None:
                rows[name] |= {"peak_memory": timing.memory, "peak_memory_ratio": self.memory_ratio(name)}
        cuda = str(self.config.device).startswith("cuda")
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "device": self.device,
            "threads": None if cuda else torch.get_num_threads(),
            "settings": {**asdict(self.config), "output": str(self.config.output)},
            "repetitions": self.repetitions,
            "steps_per_repetition": self.steps,
            "images_per_step": images,
            "methods": rows,
            "meta_gradient": None
            if self.agreements is None
            else {"reference": self.reference, "agreement": [asdict(row) for row in self.agreements]},
            "notes": self.notes,
        }

    def costs(self) -> Group:
        """Time and memory for a person."""
        sentences = [
            f"{t.title}: {t.failure}" for t in self.timings.values() if t.failure and t.failure != OUT_OF_MEMORY
        ]
        usual = _turns(self.repetitions, self.steps)
        slow = [f"{timing.title} ({timing.turns})" for timing in self.measured if timing.turns != usual]
        if slow:
            sentences.append(f"slow, so in fewer or shorter turns: {', '.join(slow)}")
        return Group("", self._costs(usual), "", *map(Text, sentences))

    def comparison(self) -> Group:
        """The agreement of the meta-gradients for a person."""
        tables: list[Any] = ["", self._agreement(self.agreements), ""] if self.agreements else []
        return Group(*tables, *map(Text, self.notes))

    def _costs(self, turns: str) -> Table:
        memory = any(timing.memory is not None for timing in self.timings.values())
        table = _table(turns)
        table.add_column("method")
        for heading in ("ms/step", "ms/image", "× plain", *(["GB", "× plain"] if memory else [])):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, timing in self.timings.items():
            if timing.failure:
                table.add_row(timing.title, _short(timing.failure))
                continue
            middle, spread = median_and_spread([1e3 * seconds for seconds in timing.seconds])
            ratio = self.ratio(name)
            cells = [
                _with_spread(middle, spread),
                _digits(middle / (2 * given(self.config.half))),
                "–" if ratio is None else _with_spread(*ratio),
            ]
            if memory:
                share = self.memory_ratio(name)
                cells += [
                    "–" if timing.memory is None else _gigabytes(timing.memory),
                    "–" if share is None else f"{share:.2f}",
                ]
            table.add_row(timing.title, *cells)
        return table

    def _agreement(self, agreements: Sequence[Agreement]) -> Table:
        table = _table("meta-gradient of CovNet: cosine and relative error")
        for heading in ("part", "engine", "against"):
            table.add_column(heading, no_wrap=True)
        for heading in ("cosine", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in agreements:
            table.add_row(row.part, row.of, row.against, f"{row.cosine:.6f}", f"{row.relative_error:.1e}")
        return table

    def chart(self) -> str:
        """Draw times relative to plain training, with their spread.

        Returns:
            The contents of an SVG file.
        """
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
    """The median, and half of the interquartile range; a single value has no spread."""
    if len(values) == 1:
        return values[0], None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    import timm

    import semaug

    found = {"torch": torch.__version__, "timm": timm.__version__, "semaug": semaug.__version__}
    return {name: str(version) for name, version in found.items()} | {"python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """What the GPU or CPU is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # Linux; elsewhere Python knows
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(title: str) -> Table:
    """A table without borders, narrow enough for 80 columns."""
    look: dict[str, Any] = {"show_edge": False, "pad_edge": False, "collapse_padding": True}
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **look)


def _turns(repetitions: int, steps: int) -> str:
    counted = [f"{n} {noun}{'s' if n != 1 else ''}" for n, noun in ((repetitions, "repetition"), (steps, "step"))]
    return " of ".join(counted)


def _short(failure: str | None) -> str:
    """A failure in a word or two; the sentence itself may be long."""
    return "–" if failure is None else failure if failure == OUT_OF_MEMORY else "failed"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}" if count >= 1e10 else f"{count / 1e9:.2f}"


def _digits(value: float) -> str:
    """A number with about three digits that matter."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_spread(middle: float, spread: float | None) -> str:
    return _digits(middle) if spread is None else f"{_digits(middle)} ± {_digits(spread)}"
