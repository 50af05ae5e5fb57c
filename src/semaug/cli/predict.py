"""`semaug predict`: classify images."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from semaug.cli.common import Command, choose_device, say
from semaug.util.errors import SettingError
from semaug.util.names import counted
from semaug.util.ranges import Count, setting


@dataclass(frozen=True)
class Predict(Command):
    """Classify images: files, folders, patterns, or a list of paths on standard input ("-")."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory, an exported folder, or an ONNX file with the files beside it."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image files, folders (searched recursively), patterns such as 'photos/*.jpg', or "-"."""
    output: Path | None = setting(None, "main")
    """The file to write. Default: standard output."""
    format: Literal["csv", "jsonl"] = setting("csv", "output")
    """csv: a table for spreadsheets, in which names that look like a formula start with an apostrophe. jsonl: one JSON
    object per line, with unchanged names."""
    top_k: Count = setting(5, "main")
    """Number of classes to list for each image."""
    device: str | None = setting(None, "hardware")
    """Where to compute. Default: cuda if available, else cpu."""
    batch_size: Count = setting(64, "hardware")
    """Images per batch."""

    def run(self) -> None:
        from semaug.inference.classifier import open_classifier
        from semaug.inference.prediction import expand, predict, write

        if not self.images:
            raise SettingError('name image files, folders or patterns, or "-" for a list on standard input')
        classifier = open_classifier(self.model, choose_device(self.device))
        predictions = predict(classifier, expand(self.images), self.top_k, self.batch_size)
        summary = write(predictions, None if self.output == Path("-") else self.output, self.format)
        failed = f", {summary.failed} could not be read" if summary.failed else ""
        say(f"{counted(summary.count, 'image')}{failed}, {summary.rate:.0f} images/s")
