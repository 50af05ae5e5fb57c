"""`semaug evaluate`: measure a trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from semaug.cli.common import Command, choose_device, say
from semaug.util.errors import DataError
from semaug.util.names import printable
from semaug.util.ranges import Count, setting


@dataclass(frozen=True)
class Evaluate(Command):
    """Measure a trained model on a split of a data set: accuracy, calibration, and confused classes."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory, an exported folder, or an ONNX file with the files beside it."""
    data: str | None = setting(None, "main")
    """Name of a data set, or path. Default: the data that the model was trained on."""
    data_root: Path | None = setting(None, "data")
    """Folder that holds the named data sets. Default: $SEMAUG_DATA, or ./data."""
    split: Literal["train", "val", "test"] | None = setting(None, "main")
    """The split to measure. Default: "test" if there is one; otherwise "val", the images held out in training, or, of
    other data than the model was trained on, all images of a folder without splits."""
    json: Path | None = setting(None, "output")
    """Write all numbers to this file too. Default: no file."""
    device: str | None = setting(None, "hardware")
    """Where to compute. Default: cuda if available, else cpu."""
    batch_size: Count = setting(64, "hardware")
    """Images per batch."""
    on_bad_image: Literal["stop", "skip"] | None = setting(None, "data")
    """What to do about images that cannot be read. stop: report an error. skip: leave them out and report their number.
    Default: as in training."""

    def run(self) -> None:
        from semaug.data.readable import readable_splits
        from semaug.data.readers import read_data, refuse_ambiguity
        from semaug.inference.classifier import open_classifier
        from semaug.inference.evaluation import evaluate
        from semaug.inference.runs import read_run_dataset, splits_of_run
        from semaug.util.files import write_json
        from semaug.util.progress import Progress

        if self.data is not None:
            refuse_ambiguity(self.data, self.data_root)
        classifier = open_classifier(self.model, choose_device(self.device))
        config = classifier.config
        own = self.data is None
        if self.data is None:
            data = read_run_dataset(classifier.folder, config, self.data_root)
        else:
            root = config.get("data_root")
            data = read_data(self.data, self.data_root or (None if root is None else Path(root)))
        splits = splits_of_run(classifier.folder, config, data) if own else data.splits
        split: str = self.split or ("test" if "test" in splits else "val" if own else next(iter(splits)))
        if split not in splits:
            raise DataError(f"{data.name} has no split {split!r}; it has {', '.join(splits)}")
        if (self.on_bad_image or config.get("on_bad_image")) == "skip":
            chosen = {split: splits[split]}
            splits, message = readable_splits(chosen, data.classes, classifier.preprocessing, "skip")
            if message is not None:
                say(message)
        samples = splits[split]
        with Progress().task(f"evaluating on {split}", len(samples)) as advance:
            result = evaluate(classifier, samples, self.batch_size, advance, data_classes=data.classes)
        if self.json is not None:
            write_json(self.json, {"data": data.name, "split": split, **result.to_json()})
        console = Console(highlight=False)
        console.print(printable(f"{self.model} on {data.name}, {split}"), markup=False)
        console.print(result.table())
