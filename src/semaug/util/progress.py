"""Messages and progress of a run: bars with rate and time left in a terminal, plain lines in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from semaug.util.names import printable

ProgressCallback = Callable[[int, int], None]
"""Called with the number of items done and their total."""


LINE_EVERY = 60.0  # seconds between two lines about a task, where there is no terminal to show a bar
WORTH_PRINTING = 0.1  # share of an epoch's time: validation or saving that takes less is not in its line


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Print nothing more, and continue; rich would end the process."""
        self.quiet = True


class Progress:
    """Messages and progress of one run, on standard error, so that results can be piped.

    Args:
        quiet: Whether to print nothing.
        verbose: Whether to print details too.
    """

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        self.console = _Console(stderr=True, highlight=False, quiet=quiet)
        self._started = time.monotonic()
        self._epochs_seen = 0

    def say(self, message: str) -> None:
        """Print a message."""
        with suppress(OSError):  # training does not end because its log cannot be written
            self.console.print(printable(message), markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[ProgressCallback]:
        """Show a bar for a task of `total` items, or a line now and then if the output is not a terminal.

        Args:
            name: Name of the task.
            total: Number of items, if known.

        Yields:
            A function to call as the task proceeds.
        """
        if self.console.quiet or not self.console.is_terminal:
            yield self._lines(name)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        started = time.monotonic()
        bars = Bars(*columns, console=self.console, transient=True)
        task = bars.add_task(name, total=total, rate="")

        def advance(done: int, total: int) -> None:
            rate = done / max(time.monotonic() - started, 1e-9)
            bars.update(task, completed=done, total=total, rate=f"{rate:.0f}/s")

        try:
            bars.start()
        except OSError:
            self.console.quiet = True
            yield advance
            return
        try:
            yield advance
        finally:
            with suppress(OSError):  # a terminal that was closed
                bars.stop()

    def _lines(self, name: str) -> ProgressCallback:
        started = printed = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal printed
            now = time.monotonic()
            if now - printed >= LINE_EVERY and 0 < done < total:
                printed = now
                self.say(f"{name}: {done} of {total}, {duration((now - started) / done * (total - done))} left")

        return advance

    def numbers(self, values: dict[str, Any]) -> None:
        """Print settings or metrics by name, if details are wanted."""
        if self.verbose:
            texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
            self.say("  " + ", ".join(f"{name} {text}" for name, text in texts.items()))

    def epoch(self, row: dict[str, Any], epochs: int) -> None:
        """Print one line with an epoch's metrics, a `row` of metrics.jsonl, and the time left of `epochs`."""
        self._epochs_seen += 1
        per_epoch = (time.monotonic() - self._started) / self._epochs_seen
        left = duration(per_epoch * (epochs - row["epoch"]))
        parts = [
            f"epoch {row['epoch']}/{epochs}",
            f"loss {row['train_loss']:{'.3f' if row['train_loss'] < 1e6 else '.1e'}}",
            f"train {100 * row['train_accuracy']:.1f} %",
        ]
        if "val_top1" in row:
            parts.append(f"val {100 * row['val_top1']:.1f} %")
        if "val_not_finite" in row:
            parts.append(f"{row['val_not_finite']} validation images without finite numbers")
        if row["strength"] > 0:
            parts.append(f"λ {row['strength']:.2f}")
        if "drift" in row:
            parts.append(f"Σ {row['variance_mean']:.3f}, drift {row['drift']:.1e}")
        parts.append(f"{row['images_per_second']:.0f} images/s")
        for name in ("validation", "saving"):
            if row[f"{name}_seconds"] >= WORTH_PRINTING * row["seconds"]:
                parts.append(f"{name} {duration(row[f'{name}_seconds'])}")
        self.say(" · ".join([*parts, f"{left} left"]))


def duration(seconds: float) -> str:
    """Format seconds for people: "2 h 5 min", "3 min 20 s", "12 s", "1.5 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours or minutes:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return f"{rest} s" if seconds >= 10 else f"{seconds:.2g} s"
