"""Published results on CUB-200-2011, as the paper collected them."""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Published:
    """A result of another method.

    Args:
        method: Name of the method.
        venue: Where and when it was published.
        backbone: The network that it uses.
        accuracy: Top-1 accuracy in %.
        citation: The entry of the paper's bibliography.
    """

    method: str
    venue: str
    backbone: str
    accuracy: float
    citation: str


def published() -> list[Published]:
    """Read the results of other methods from the paper's table.

    Returns:
        The rows, in the table's order.
    """
    content = json.loads(files("semaug.studies").joinpath("published.json").read_text(encoding="utf-8"))
    return [Published(**row) for row in content["rows"]]
