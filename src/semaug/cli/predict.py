"""`semaug predict`: classify images."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from semaug.cli.common import Command, choose_device, say
from semaug.util.errors import RunError, SettingError
from semaug.util.names import counted
from semaug.util.ranges import BelowOne, Count, setting


@dataclass(frozen=True)
class Predict(Command):
    """Classify images: files, folders, patterns, or a list of paths on standard input ("-")."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory, an exported folder, or an ONNX file with the files beside it."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image files, folders (searched recursively), patterns such as 'photos/*.jpg', or "-"."""
    output: Path | None = setting(None, "main")
    """The file to write; earlier answers in it are replaced, with any corrections. Default: standard output."""
    format: Literal["csv", "jsonl"] = setting("csv", "output")
    """csv: a table for spreadsheets, in which names that look like a formula start with an apostrophe. jsonl: one JSON
    object per line, with unchanged names."""
    top_k: Count = setting(5, "main")
    """Number of classes to list for each image."""
    reject: BelowOne | None = setting(None, "main")
    """Accept only answers above a confidence threshold, such that on the validation images at most this share of the
    accepted answers is wrong (0.05, for example). The column "accepted" says yes or no. Needs a calibrated run (semaug
    evaluate RUN --calibrate). Default: accept every answer."""
    tta: Literal["flip", "multi-crop"] | None = setting(None, "main")
    """Test-time augmentation: average over the image and its mirror image (flip), or over the centre, the corners and
    their mirror images (multi-crop, ten times the work). Default: the centre alone."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""
    batch_size: Count = setting(64, "hardware")
    """Images per batch."""

    def run(self) -> None:
        from semaug.inference.classifier import open_classifier
        from semaug.inference.prediction import expand, predict, write
        from semaug.inference.runs import read_calibration

        if not self.images:
            raise SettingError('name image files, folders or patterns, or "-" for a list on standard input')
        classifier = open_classifier(self.model, choose_device(self.device))
        classifier.tta, threshold = self.tta, None
        if self.reject is not None:
            from semaug.inference.calibration import choose_threshold

            if self.tta is not None:
                raise SettingError(
                    "`reject` and `tta` cannot be combined: the threshold holds for answers without `tta`"
                )
            calibration = None if classifier.folder is None else read_calibration(classifier.folder)
            if calibration is None:
                raise RunError(f"{self.model} is not calibrated; run semaug evaluate RUN --calibrate first")
            chosen = choose_threshold(calibration, self.reject)
            say(str(chosen))
            threshold = chosen.threshold
        predictions = predict(classifier, expand(self.images), self.top_k, self.batch_size, threshold=threshold)
        summary = write(predictions, None if self.output == Path("-") else self.output, self.format)
        failed = f", {summary.failed} could not be read" if summary.failed else ""
        accepted = "" if threshold is None else f", {summary.accepted} answers accepted"
        say(f"{counted(summary.count, 'image')}{failed}{accepted}, {summary.rate:.0f} images/s")
