"""Tables of results as text, for the terminal and for Markdown."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text."""

    names: Sequence[str]  # headings
    rows: Sequence[Sequence[str]]  # at least one
    words: Collection[str]  # columns of words; all others are numbers
    fold: Collection[str]  # columns to leave out if all rows agree, as they then belong into the title
    always: Collection[str] = ()  # columns to show even if they are empty

    @property
    def common(self) -> list[str]:
        """The values of the columns that are left out because all rows agree."""
        return [self.rows[0][i] for i, name in enumerate(self.names) if name in self.fold and self._agree(i)]

    @property
    def shown(self) -> list[int]:
        """The indices of the columns that say something."""
        used = [i for i, name in enumerate(self.names) if name in self.always or any(row[i] for row in self.rows)]
        return [i for i in used if not (self.names[i] in self.fold and self._agree(i))]

    def _agree(self, column: int) -> bool:
        return len({row[column] for row in self.rows}) == 1

    def markdown(self) -> list[str]:
        """The lines of the whole table in Markdown."""
        rows = ([text.replace("|", "\\|") for text in row] for row in self.rows)
        return [f"| {' | '.join(row)} |" for row in (self.names, ["---"] * len(self.names), *rows)]

    def terminal(
        self, title: str, wrap: Collection[str], hide: Collection[str] = (), dim: str = "", group: str = ""
    ) -> Table:
        """Make the table for the terminal.

        Args:
            title: Title, to which the common values are appended.
            wrap: Columns that may be broken into several lines.
            hide: Columns to leave out.
            dim: Rows with this text in a cell are dimmed.
            group: A line is drawn where this column changes.
        """
        heading = ", ".join([title, *self.common])
        table = Table(title=Text(heading), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        shown = [i for i in self.shown if self.names[i] not in hide]
        for name in (self.names[i] for i in shown):
            side: JustifyMethod = "left" if name in self.words else "right"
            text = name if name in self.words else name.replace(" ", "\n")
            table.add_column(text, justify=side, overflow="fold", no_wrap=name not in wrap)
        column = self.names.index(group) if group else 0
        for row, following in zip(self.rows, [*self.rows[1:], None], strict=True):
            ends = bool(group) and following is not None and following[column] != row[column]
            style = "dim" if dim and dim in row else None
            table.add_row(*(Text(row[i]) for i in shown), style=style, end_section=ends)
        return table


def signed(value: float | None) -> str:
    """Format a difference in points with its sign; None becomes an empty text."""
    return "" if value is None else f"{value:+.1f}".replace("-", "−")


def with_error(text: str, error: float | None) -> str:
    """Append ± an error to a number; None appends nothing."""
    return text if error is None else f"{text} ± {error:.1f}"
