"""Declarations of a setting: its range, its group in the help, and whether it identifies a run.

The range is in the type: ``lr: Positive``, or ``momentum: Annotated[float, Range(0, below=1)]``. The rest is in the
default: ``lr: Positive = setting(0.1, "schedule")``. The checks of settings and of JSON files, the help of the command
line and the reference read them there.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from semaug.util.errors import SettingError

Value = TypeVar("Value")
MAIN: Final = "main"
Group = Literal["main", "data", "model", "method", "schedule", "hardware", "output"]
"""Groups of options in the help, in their order; "main" has those that matter most."""


def setting(default: Value, group: Group, identifies: bool = True) -> Value:
    """Declare a setting, a field of a dataclass.

    Args:
        default: Its default.
        group: Its group in the help of the command line.
        identifies: Whether it must stay the same when a run is resumed.

    Returns:
        The field.
    """
    return field(default=default, metadata={"group": group, "identifies": identifies})


@dataclass(frozen=True)
class Range:
    """The finite numbers that are allowed.

    Args:
        least: The smallest of them.
        most: The largest of them.
        above: They are larger than this.
        below: They are smaller than this.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))  # an integer may be too large for a float
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {_text(self.least)} to {_text(self.most)}"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {_text(bound)}" for word, bound in bounds.items() if bound is not None)


def _text(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


Count = Annotated[int, Range(1, 1_000_000)]
Positive = Annotated[float, Range(above=0, most=1e9)]  # so that products of them fit into fp32
CountOrZero = Annotated[int, Range(0, 1_000_000)]
NotNegative = Annotated[float, Range(0, 1e9)]
Portion = Annotated[float, Range(above=0, most=1)]
Share = Annotated[float, Range(above=0, below=1)]
Accuracy = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, below=1)]
Side = Annotated[int, Range(1, 8192)]  # of an image, in pixels; memory is allocated for it
Border = Annotated[int, Range(0, 512)]  # likewise, around each image of a batch
Seed = Annotated[int, Range(0, 10**12)]  # so that the seeds of epochs, which follow from it, have 64 bits
Workers = Annotated[int, Range(0, 256)]  # processes
Jobs = Annotated[int, Range(1, 256)]  # runs at a time


def range_in(kind: Any) -> Range | None:
    """The range in a type, in one member of a union, or of the numbers in a tuple; None if there is none."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return next(filter(None, map(range_in, get_args(kind))), None)
    return next((mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Range)), None)


def ranges(settings: type) -> dict[str, Range]:
    """The ranges of the settings of a class, by name."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: allowed for name, kind in hints.items() if (allowed := range_in(kind)) is not None}


def check_ranges(settings: Any) -> None:
    """Check the numbers in a dataclass and those in it; None and texts, where its types allow them, have no range.

    Raises:
        SettingError: A number is out of its range.
    """
    for name, allowed in ranges(type(settings)).items():
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and number not in allowed:
                huge = isinstance(number, int) and abs(number) >= 10**30  # Python refuses to write the largest
                raise SettingError(f"`{name}` must be {allowed}, not {'a number of many digits' if huge else number}")
    for option in fields(settings):
        if is_dataclass(inner := getattr(settings, option.name)):
            check_ranges(inner)
