"""Published results on CUB-200-2011, as the paper collected them."""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Published:
    """A result of another method."""

    method: str
    venue: str
    backbone: str
    accuracy: float  # top-1 in %
    citation: str  # entry of the paper's bibliography


def published() -> list[Published]:
    """The results of other methods, in the order of the paper's table."""
    content = json.loads(files("semaug.studies").joinpath("published.json").read_text(encoding="utf-8"))
    return [Published(**row) for row in content["rows"]]
