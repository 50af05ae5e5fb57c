"""Published results on CUB-200-2011, as the paper collected them."""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Published:
    """One row; `citation` is the entry of the paper's bibliography."""

    method: str
    venue: str
    backbone: str
    accuracy: float
    citation: str


def published() -> list[Published]:
    """The rows of the paper's table that are other methods', in its order."""
    content = json.loads(files("semaug.studies").joinpath("published.json").read_text(encoding="utf-8"))
    return [Published(**row) for row in content["rows"]]
