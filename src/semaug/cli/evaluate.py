"""`semaug evaluate`: measure a trained model, or several together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from semaug.cli.common import Command, choose_device, say
from semaug.data.readable import OnBadImage
from semaug.util.errors import DataError, RunError, SettingError
from semaug.util.names import printable
from semaug.util.ranges import Count, setting


@dataclass(frozen=True)
class Evaluate(Command):
    """Measure a trained model on a split of a data set: accuracy, precision, calibration, and confused classes."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """A run directory, an exported folder, or an ONNX file with the files beside it. Of several, with the same classes,
    the probabilities are averaged."""
    data: str | None = setting(None, "main")
    """Name of a data set, or path. Default: the data that the model was trained on."""
    data_root: Path | None = setting(None, "data")
    """Folder of the named data sets. Default: $SEMAUG_DATA, or ./data."""
    split: Literal["train", "val", "test"] | None = setting(None, "main")
    """The split to measure. Default: "test" if there is one, otherwise "val" (in the data of a run, the images held out
    in training), otherwise "train"."""
    calibrate: bool = setting(False, "main")
    """Before measuring, fit a temperature on the validation images, such that probabilities match the share of
    right answers. It is stored with the run, and used by evaluate, predict, export and serve."""
    tta: Literal["flip", "multi-crop"] | None = setting(None, "main")
    """Test-time augmentation: average over the image and its mirror image (flip), or over the centre, the corners and
    their mirror images (multi-crop, ten times the work). Default: the centre alone."""
    json: Path | None = setting(None, "output")
    """Write all numbers to this file too. Default: no file."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""
    batch_size: Count = setting(64, "hardware")
    """Images per batch."""
    on_bad_image: OnBadImage | None = setting(None, "data")
    """Unreadable images: stop with an error, or skip them and report their number. Default: as in training."""

    def run(self) -> None:
        from semaug.data.readable import readable_splits
        from semaug.data.readers import read_data, refuse_ambiguity
        from semaug.data.samples import Samples
        from semaug.inference.classifier import open_classifier
        from semaug.inference.ensemble import ensemble
        from semaug.inference.evaluation import evaluate
        from semaug.inference.runs import changed_images, read_run_dataset, shared_splits
        from semaug.util.files import refuse_edited, refuse_foreign, write_json
        from semaug.util.progress import Progress

        if not self.models:
            raise SettingError("name a run directory, an exported folder or an ONNX file")
        if self.calibrate and (len(self.models) > 1 or self.data is not None or self.tta is not None):
            raise SettingError("`calibrate` is for one run on its own data; leave out other models, `data` and `tta`")
        if self.data is not None:
            refuse_ambiguity(self.data, self.data_root)
        members = [open_classifier(path, choose_device(self.device)) for path in self.models]
        classifier = ensemble(members)
        config, models = classifier.config, ", ".join(map(str, self.models))
        own = self.data is None
        if self.data is None:
            data = read_run_dataset(classifier.folder, config, self.data_root)
        else:
            root = config.get("data_root")
            data = read_data(self.data, self.data_root or (None if root is None else Path(root)))
        preferred = ("test", "val") if own else ("test", "val", "train")
        split: str = self.split or next((name for name in preferred if name in data.splits), "val")
        runs = [(each.folder, each.config) for each in members]
        splits = shared_splits(runs, data, for_test=split == "test") if own else data.splits
        changed = next(filter(None, (changed_images(folder, data) for folder, _ in runs)), None) if own else None
        held_out_none = f"{models} held out no validation images; its `select` is not val"
        if own and config.get("select", "val") != "val":
            splits = data.splits  # in training, the test split was the validation split
            if split == "val" and "val" not in splits:
                raise RunError(held_out_none)
        if own and split == "val" and "val" not in splits:
            raise RunError(f"{models} does not record which images of {data.name} it held out; evaluate the run that "
                           "it was exported from, or name other images with `data`")  # fmt: skip
        if split not in splits:
            raise DataError(f"{data.name} has no split {split!r}; it has {', '.join(splits)}")
        if self.json is not None:
            refuse_foreign(self.json, b'{\n  "data": "')
        if changed is not None and not self.calibrate:
            say(f"warning: {changed}")

        def readable(split: str) -> Samples:
            if (self.on_bad_image or config.get("on_bad_image")) != "skip":
                return splits[split]
            chosen, message = readable_splits({split: splits[split]}, data.classes, classifier.preprocessing, "skip")
            if message is not None:
                say(message)
            return chosen[split]

        if self.calibrate:
            from semaug.inference.calibration import calibrate
            from semaug.report import write_report

            if config.get("select", "val") != "val":
                raise RunError(held_out_none)
            if "val" not in splits:  # an exported folder does not say which images they are
                raise RunError(f"{models} is not a run directory; calibrate the run, and export it again")
            if changed is not None:
                raise RunError(f"{changed}; to calibrate it, restore them, or train it again on these")
            page = self.models[0] / "report.html"
            if page.with_name("report.previous.html").exists():  # otherwise an edited page is renamed to that
                refuse_edited(page)
            with Progress().task("calibrating on val", len(splits["val"])) as advance:
                fitted = calibrate(classifier, readable("val"), self.batch_size, advance, data_classes=data.classes)
            write_report([self.models[0]], page)
            before, after = fitted["before"], fitted["after"]
            effect = (f"the cross-entropy goes from {before['cross_entropy']:.4f} to {after['cross_entropy']:.4f}, the "
                      f"calibration error from {before['calibration_error']:.4f} to {after['calibration_error']:.4f}"
                      if fitted["wrong"] else "every answer is right, so the probabilities stay as they "
                      "are")  # fmt: skip
            say(f"temperature {fitted['temperature']:.3f}: on {fitted['images']} validation images {effect}")
        samples, classifier.tta = readable(split), self.tta
        with Progress().task(f"evaluating on {split}", len(samples)) as advance:
            result = evaluate(classifier, samples, self.batch_size, advance, data_classes=data.classes)
        if self.json is not None:
            write_json(self.json, {"data": data.name, "split": split, **result.to_json()})
        console = Console(highlight=False)
        console.print(printable(f"{models} on {data.name}, {split}"), markup=False)
        console.print(result.table())
