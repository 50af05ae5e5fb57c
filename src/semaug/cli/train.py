"""`semaug train`: train a classifier."""

import os
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from semaug.cli.common import Command, show
from semaug.training.settings import TrainConfig, required
from semaug.util import distributed
from semaug.util.errors import DataError, SettingError
from semaug.util.files import expanded
from semaug.util.ranges import setting


@dataclass(frozen=True)
class Train(TrainConfig, Command):
    """Train a classifier of look-alike classes. Without options: on the embedded birds.

    The run directory holds the settings, metrics, the trained model and a report, and during training checkpoints.
    Run the same command again to resume an interrupted run.
    """

    config: Path | None = setting(None, "main")
    """Read settings from a YAML file, or from the config.json of an earlier run (except its output directory). Options
    of the command line override them. Default: no file."""
    print_config: bool = setting(False, "output")
    """Print all settings, with their defaults, in the form that --config reads, and stop."""
    dry_run: bool = setting(False, "output")
    """Check settings, data set and network, print what would be trained, and stop. Nothing is written, no image
    is decoded, and no pretrained weights are downloaded."""
    quiet: bool = setting(False, "output")
    """Print nothing but the result and errors."""
    verbose: bool = setting(False, "output")
    """Also print all settings, and after each epoch all of its numbers, as in metrics.jsonl."""

    resumable: ClassVar[bool] = True
    distributed: ClassVar[bool] = True

    @classmethod
    def expand(cls, options: list[str]) -> list[str]:
        """Put the settings of the file that `--config` names before the other options, which override them."""
        files = [option[9:] for option in options if option.startswith("--config=")]
        files += [file for option, file in pairwise(options) if option == "--config"]
        if len(files) > 1:
            raise SettingError("--config takes one file, once")
        if not files:
            return options
        from semaug.cli.config_file import read_flags

        return [*read_flags(expanded(Path(files[0]))), *options]

    def run(self) -> None:
        from semaug.data.readers import refuse_ambiguity
        from semaug.report import write_report
        from semaug.training.trainer import train

        config = TrainConfig(**{option.name: getattr(self, option.name) for option in fields(TrainConfig)})
        if self.print_config:
            import yaml

            if distributed.is_rank_zero():
                print(yaml.safe_dump(config.resolve().to_json(), sort_keys=False, allow_unicode=True), end="")
            return
        if self.quiet and self.verbose:
            raise SettingError("`quiet` and `verbose` cannot be combined")
        refuse_ambiguity(self.data, self.data_root)
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere) if self.quiet else nullcontext():
            if self.dry_run:
                if distributed.is_rank_zero():
                    _rehearse(config.resolve())
                return
            folder = train(config, self.verbose)
            if distributed.is_rank_zero():
                write_report([folder], folder / "report.html")
        if distributed.is_rank_zero():
            show(f"{folder}: model.safetensors, report.html")


def _rehearse(config: TrainConfig) -> None:
    """Print the plan of a run, after checks of data, space and network that take seconds."""
    import torch

    from semaug.data.cache import check_free_space
    from semaug.data.readers import read_data, training_splits
    from semaug.training.optimization import Optimization, build_network
    from semaug.training.run_data import class_images
    from semaug.training.run_directory import RunDirectory
    from semaug.util.names import counted
    from semaug.util.progress import Progress

    progress, device = Progress(), torch.device(required(config.device))
    data = read_data(config.data, config.data_root)
    if len(data.classes) < 2:
        raise DataError(f"{data.name} has a single class; training needs at least two")
    splits = training_splits(data, config.select, config.val_per_class, config.val_fraction, config.seed)
    cache = None if config.cache is None else expanded(config.cache)
    hint = None if config.images_on == "stream" else check_free_space(splits, config.preprocessing, cache)
    if hint is not None:
        progress.say(hint)
    model = build_network(replace(config, pretrained=False), len(data.classes), device, progress)
    Optimization(model, config, device, class_images(splits["train"], len(data.classes)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    images = ", ".join(f"{len(samples)} {name}" for name, samples in splits.items())
    start = "ImageNet weights" if config.pretrained else str(config.weights or "random weights")
    is_old = RunDirectory(required(config.output)).previous(config) is not None
    show(f"data: {data.name}, {len(data.classes)} classes, {images} images")
    show(f"network: {config.model}, {parameters / 1e6:.1f} million parameters, {start}, {config.crop} px")
    show(f"training: {config.method}, {counted(required(config.epochs), 'epoch')}, batches of {config.batch_size}")
    show(f"output: {config.output}, {'which holds a run already' if is_old else 'a new run'}")
    show("dry run: nothing was trained or written")
