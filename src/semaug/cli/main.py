"""The command line: `semaug COMMAND --help` explains each command."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro
from rich.console import Console

from semaug import __version__
from semaug.report.figures.table import FigureName, describe_figures
from semaug.studies.bench import BenchConfig
from semaug.studies.grid import CompareConfig
from semaug.training.settings import TrainConfig
from semaug.util import distributed
from semaug.util.errors import SemaugError, printable
from semaug.util.signals import Stop


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a classifier of look-alike classes; with no option, on the embedded birds.

    The run directory holds the settings, metrics, checkpoints, the trained model and a report. Running the same command
    again goes on where a broken-off run stopped.
    """

    def run(self) -> None:
        from semaug.report import write_report
        from semaug.training.trainer import train

        folder = train(self)
        if not distributed.is_rank_zero():
            return
        write_report([folder], folder / "report.html")
        print(f"{folder}: model.safetensors, report.html")


@dataclass(frozen=True)
class Evaluate:
    """Measure a trained model on a split of a data set: accuracy, calibration, and what it confuses."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory, an exported folder (one for a hub too), or an ONNX file with the files that lie beside it."""
    data: str | None = None
    """Name of a data set or path; the data that the model was trained on if not given."""
    data_root: Path | None = None
    """Folder that holds the named data sets; $SEMAUG_DATA, or ./data, if not given."""
    split: Literal["train", "val", "test"] | None = None
    """The split to measure; "test" if there is one. Else, of the data that the model was trained on, "val", the images
    that training held out; of other data all images of a folder that has no splits."""
    json: Path | None = None
    """Write all figures to this file too."""
    device: str | None = None
    """cuda if there is one, else cpu."""
    batch_size: int = 64
    """Images per batch."""
    on_bad_image: Literal["stop", "skip"] | None = None
    """stop: an image that cannot be read is an error; skip: measure without such images, and say how many there are. As
    the model was trained if not given."""

    def run(self) -> None:
        from semaug.data.readable import readable_splits
        from semaug.data.readers import read_data, training_splits
        from semaug.inference.classifier import open_classifier
        from semaug.inference.evaluation import evaluate
        from semaug.inference.runs import split_settings
        from semaug.util.files import write_json
        from semaug.util.progress import Progress

        classifier = open_classifier(self.model, _device(self.device))
        named = self.data or classifier.config.get("data")
        if named is None:
            raise SemaugError(f"{self.model} does not say what it was trained on; name the images with --data")
        data = read_data(named, self.data_root or _path(classifier.config.get("data_root")))
        own = self.data is None
        splits = training_splits(data, **split_settings(classifier.config)) if own else data.splits
        rest = "val" if own else next(iter(splits))
        split: str = self.split or ("test" if "test" in splits else rest)
        if split not in splits:
            raise SemaugError(f"{data.name} has no split {split!r}; it has {', '.join(splits)}")
        if (self.on_bad_image or classifier.config.get("on_bad_image")) == "skip":
            found = readable_splits({split: splits[split]}, data.classes, classifier.preprocessing, "skip")
            splits = found[0]
            if found[1] is not None:
                _tell(found[1])
        samples = splits[split]
        with Progress().task(f"evaluating on {split}", len(samples)) as advance:
            result = evaluate(classifier, samples, self.batch_size, advance, data_classes=data.classes)
        if self.json is not None:
            write_json(self.json, {"data": data.name, "split": split, **result.to_json()})
        console = Console(highlight=False)
        console.print(f"{self.model} on {data.name}, {split}", markup=False)
        console.print(result.table())


@dataclass(frozen=True)
class Predict:
    """Classify images: files, folders, patterns, or a list of paths on standard input ("-")."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory, an exported folder (one for a hub too), or an ONNX file with the files that lie beside it."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image files, folders (searched through), patterns such as 'photos/*.jpg', or "-"."""
    output: Path | None = None
    """Write here instead of to standard output."""
    format: Literal["csv", "jsonl"] = "csv"
    """A table for spreadsheets, in which names that one would run as a formula begin with an apostrophe; or one JSON
    object per line, in which names are as they are."""
    top_k: int = 5
    """How many classes to name for each image."""
    device: str | None = None
    """cuda if there is one, else cpu."""
    batch_size: int = 64
    """Images per batch."""

    def run(self) -> None:
        from semaug.inference.classifier import open_classifier
        from semaug.inference.prediction import expand, predict, write

        if not self.images:
            raise SemaugError('name image files, folders or patterns, or "-" for a list on standard input')
        classifier = open_classifier(self.model, _device(self.device))
        predictions = predict(classifier, expand(self.images), self.top_k, self.batch_size)
        destination = None if self.output == Path("-") else self.output
        summary = write(predictions, destination, self.format)
        failed = f", {summary.failed} could not be read" if summary.failed else ""
        _tell(f"{summary.count} images{failed}, {summary.rate:.0f} images/s")


@dataclass(frozen=True)
class Export:
    """Write a trained model for use elsewhere: safetensors, ONNX (checked against PyTorch) and a model card."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write."""
    onnx: bool = True
    """Write ONNX too; needs pip install 'semaug[onnx]'."""
    hub: bool = False
    """Write a folder that timm loads too, by timm.create_model("local-dir:FOLDER", pretrained=True), and that can be
    uploaded to a model hub as it is; for networks of timm."""

    def run(self) -> None:
        from semaug.inference.classifier import load_classifier
        from semaug.inference.exporting import export
        from semaug.util.files import read_json

        classifier = load_classifier(self.model)
        measured = self.model / "evaluation.json"
        report = export(
            classifier,
            self.folder,
            self.onnx,
            hub=self.hub,
            evaluation=read_json(measured) if measured.is_file() else None,
        )
        for file in report.files:
            print(file)
        if report.onnx_difference is not None:
            _tell(f"ONNX and PyTorch differ by at most {report.onnx_difference:.1e}")
        if report.hub_difference is not None:
            _tell(f"timm loads it with logits that differ by at most {report.hub_difference:.1e}")


@dataclass(frozen=True)
class Serve:
    """Try a trained model on a page in the browser: drop an image, see its classes and the nearest training images.

    A slider moves the image's feature along directions of the augmentation, and shows how the nearest images change.
    The page is for this machine alone; needs pip install 'semaug[serve]', and the images that the model was trained on.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    host: str = "127.0.0.1"
    """The address to listen on. Whoever can reach it can use the page: there is no password and no encryption."""
    port: int = 8000
    """The port to listen on; 0: a free one."""
    images: int = 2000
    """How many training images to compare with, at most."""
    covariance: Literal["run", "classwise"] | None = None
    """The run's own Σ, or the class-wise one of its final features; the run's own if not given and it has one."""
    strength: float | None = None
    """λ; that of the end of training if not given."""
    seed: int = 0
    """Seed of the choice of training images and of the draws."""
    device: str | None = None
    """cuda if there is one, else cpu."""

    def run(self) -> None:
        try:
            from semaug.report.serve import app
        except ModuleNotFoundError as error:
            raise SemaugError(f"the page needs {error.name}: pip install 'semaug[serve]'") from error
        from semaug.report.serve.answers import open_guide
        from semaug.util.progress import Progress

        with app.listen(self.host, self.port) as listening:  # first: a port that is taken is told at once
            with Progress().task("looking at training images", self.images) as advance:
                guide = open_guide(
                    self.model,
                    covariance=self.covariance,
                    strength=self.strength,
                    images=self.images,
                    seed=self.seed,
                    device=_device(self.device),
                    progress=advance,
                )
            if not app.is_loopback(self.host):
                _tell(f"anyone who can reach {self.host} can use this page; there is no password")
            print(f"{app.address(listening)} shows the page; Ctrl-C ends it", flush=True)
            app.run(app.application(guide, self.model.resolve().name, self.host), listening)


@dataclass(frozen=True)
class Check:
    """Look through a data set: counts, sizes, unreadable and duplicate images, classes that differ between splits."""

    data: Annotated[str, tyro.conf.Positional]
    """Name of a data set, or path of a folder or table of images."""
    data_root: Path | None = None
    """Folder that holds the named data sets; $SEMAUG_DATA, or ./data, if not given."""
    json: Path | None = None
    """Write the whole report to this file."""
    workers: int = 2
    """Processes that read images."""

    def run(self) -> None:
        from semaug.data.check import NAMED, check_data
        from semaug.data.readers import read_data
        from semaug.data.shards import damaged_shards, holds_shards
        from semaug.util.files import write_atomically
        from semaug.util.progress import Progress

        data = read_data(self.data, self.data_root)
        damaged = damaged_shards(Path(self.data)) if holds_shards(Path(self.data)) else []
        with Progress().task("reading images", sum(len(samples) for samples in data.splits.values())) as advance:
            report = check_data(data, self.workers, advance)
        print(f"{report.name}: {report.classes} classes")
        for name, split in report.splits.items():
            sizes = ""
            if split.widths is not None and split.heights is not None:
                sizes = f", sizes {split.widths.minimum:.0f}×{split.heights.minimum:.0f} to "
                sizes += f"{split.widths.maximum:.0f}×{split.heights.maximum:.0f} px"
            spread = ""
            if split.per_class is not None:
                spread = f", {split.per_class.minimum:.0f} to {split.per_class.maximum:.0f} of each"
            print(f"  {name}: {split.images} images of {split.classes} classes{spread}{sizes}")
        for problem in report.problems:
            print(f"  ! {problem}")
        for item in report.unreadable if len(report.unreadable) > NAMED else ():  # a few are in the sentence already
            print(f"    {printable(item.image.name)}: {item.reason}")
        if damaged:
            print(f"  ! not what was written: {', '.join(map(printable, damaged))}")
        if not report.problems and not damaged:
            print("  nothing to complain about")
        if self.json is not None:
            write_atomically(self.json, report.to_json().encode())


@dataclass(frozen=True)
class Destruction:
    """Measure on the embedded birds how often an image-level augmentation destroys the only cue of a species."""

    num_species: int = 20
    """Number of species."""
    per_species: int = 20
    """Images of each."""
    seed: int = 0
    """Seed of all random numbers."""

    def run(self) -> None:
        from semaug.data.destruction import measure

        for row in measure(self.num_species, self.per_species, self.seed):
            print(f"{row.name:28s} {100 * row.share:5.1f} % ± {100 * row.standard_error:.1f}   {row.how}")


@dataclass(frozen=True)
class Shards:
    """Write a data set as tar files of about a thousand images, in the layout of WebDataset, with checksums.

    Many small files are slow on network storage, and large data sets are moved more easily so. The folder is a data set
    for every other command. A call that was broken off goes on where it stopped.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Name of a data set, or path of a folder or table of images."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write; new, or one that this command began."""
    data_root: Path | None = None
    """Folder that holds the named data sets; $SEMAUG_DATA, or ./data, if not given."""
    per_shard: int = 1000
    """Images in each tar file."""

    def run(self) -> None:
        from semaug.data.readers import read_data
        from semaug.data.shards import write_shards
        from semaug.util.progress import Progress

        data = read_data(self.data, self.data_root)
        total = sum(map(len, data.splits.values()))
        with Progress().task("writing shards", total) as advance:
            count = write_shards(data, self.folder, self.per_shard, advance)
        print(f"{self.folder}: {total} images in {count} shards, shards.json")


@dataclass(frozen=True)
class Data:
    """Look at data sets, and pack them."""

    command: (
        Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Shards, tyro.conf.subcommand("shards")]
        | Annotated[Destruction, tyro.conf.subcommand("destruction")]
    )

    def run(self) -> None:
        self.command.run()


@dataclass(frozen=True)
class Demo:
    """Train by basic, ISDA and learnable on the embedded birds, compare them, and write a report with pictures."""

    output: Path = Path("runs/demo")
    """Folder of the three runs and the report."""
    methods: tuple[str, ...] = ("basic", "isda", "learnable")
    """Methods to compare."""
    epochs: int = 15
    """Epochs of each."""
    seed: int = 0
    """Seed of all random numbers."""

    def run(self) -> None:
        from semaug.studies.demo import demo

        demo(self.output, self.methods, self.epochs, self.seed)


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a run, or comparing several."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories."""
    output: Path = Path("report.html")
    """The page to write."""

    def run(self) -> None:
        from semaug.report import write_report

        if not self.runs:
            raise SemaugError("name at least one run directory")
        write_report(list(self.runs), self.output)
        print(self.output)


@dataclass(frozen=True)
class Bench(BenchConfig):
    """Measure what a training step costs on this machine: time and memory of each method relative to plain training.

    All methods take turns in one run, on images of noise; then the meta-gradients of the two engines are compared. With
    no option the sizes are such that it takes a minute or two, on a GPU or on two CPU cores.
    """

    def run(self) -> None:
        from semaug.studies.bench import bench

        results = bench(self)
        console = Console(highlight=False)
        timed = next(results)
        console.print("\n".join(timed.heading()), markup=False, soft_wrap=True)
        console.print(timed.costs())
        console.print(f"{self.output}: bench.json, bench.svg", markup=False, soft_wrap=True)
        console.print(next(results).comparison())


@dataclass(frozen=True)
class Compare(CompareConfig):
    """Find out which method is best on your images: train by each, over several seeds, and compare them in pairs.

    Runs are made with the same settings but for method, network, strength and seed. Finished ones are not made again,
    one that was broken off goes on, and one that fails does not end the others. The table has mean and spread over the
    seeds, and differences to the first method with their standard errors; comparison.json holds every run.
    """

    def run(self) -> None:
        from semaug.studies.compare import compare

        failed = compare(self)
        if failed:
            raise SemaugError(
                f"{len(failed)} of the runs failed, as said above; their logs are in {self.output / 'logs'}"
            )


@dataclass(frozen=True)
class Reproduce:
    """Reproduce tables and figures of the paper; with no name, list them.

    Each is a set of cells, one training run for each seed. Runs that several share are made once, finished ones are
    not made again, and one that was broken off goes on. One that fails is reported, and the others go on. All figures
    that there are, beside the paper's, are printed and written to report.html, results.json and results.md.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """What to reproduce: "list", names from the list, or "all"."""
    scale: Literal["full", "small"] = "full"
    """full: the paper's settings on its data sets. small: the same cells on drawn birds, with small networks and few
    epochs, which needs no data and no GPU and says nothing about the paper's claims."""
    data: Path | None = None
    """Folder that holds the paper's data sets; $SEMAUG_DATA, or ./data, if not given. At small scale: a folder of
    images to use instead of the drawn birds."""
    output: Path = Path("runs/reproduce")
    """Folder of the runs and the report."""
    dataset: tuple[str, ...] = ()
    """Only cells on these data sets: cub, aircraft, cars, nabirds, imagenet."""
    network: tuple[str, ...] = ()
    """Only cells with these networks, as the paper writes them: ResNet-50, ViT-B/16, …"""
    method: tuple[str, ...] = ()
    """Only cells of these methods: basic, isda, learnable, …"""
    seeds: tuple[int, ...] | None = None
    """Seeds of each cell; at full scale 0 1 2 if not given, at small scale one or two."""
    jobs: int | None = None
    """Runs at once; one for each GPU if not given; without a GPU, at small scale one for each core."""
    epochs: int | None = None
    """Epochs of every run instead of the scale's own."""
    select: Literal["val", "test"] = "val"
    """The split that chooses the best epoch; "test", as much published code does, gives figures that are too good."""
    device: str | None = None
    """cuda if there is one, else cpu."""

    def run(self) -> None:
        from semaug.studies.reproduce import Choice, listing, reproduce
        from semaug.studies.scales import Setup

        if not self.names or self.names == ("list",):
            print(listing())
            return
        setup = Setup(self.scale, self.output, self.data, self.epochs, self.select, self.device)
        choice = Choice(self.dataset, self.network, self.method, self.seeds)
        failed = reproduce(self.names, setup, choice, self.jobs)
        if failed:
            raise SemaugError(f"{failed} of the runs and pictures failed; the report says why")


@dataclass(frozen=True)
class Figures:
    """Draw the figures of the paper from finished runs: PNG, SVG where it is vector, and an interactive HTML page."""

    figure: Annotated[FigureName, tyro.conf.Positional]
    """What to draw."""
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run directories; NAME=RUN gives one a name in the figure."""
    output: Path = Path("figures")
    """The folder to write to."""
    group: str | None = None
    """Name of the group of look-alike classes (tsne, augmentations); the largest if not given."""
    groups: Path | None = None
    """CSV file with the columns class and group; the last word of the classes' names if not given."""
    covariance: Literal["run", "classwise"] = "run"
    """The run's own Σ, or the class-wise one of its final features (neighbours, augmentations)."""
    strength: float | None = None
    """λ (neighbours, augmentations); that of the end of training if not given."""
    seed: int = 0
    """Seed of all random numbers."""
    device: str | None = None
    """cuda if there is one, else cpu."""

    def run(self) -> None:
        from semaug.report.figures import draw, write

        for figure in draw(self.figure, self.runs, self._options()):
            files = write(figure, self.output)
            print(figure.caption)
            print("\n".join(map(str, files)))

    def _options(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "groups": self.groups,
            "covariance": self.covariance,
            "strength": self.strength,
            "seed": self.seed,
            "device": _device(self.device),
        }


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Figures, tyro.conf.subcommand("figures", description=describe_figures())]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"semaug {__version__}")
        return 0
    description = "Fine-grained image recognition with learnable semantic data augmentation."
    command: Any = None
    try:
        command = tyro.cli(
            cast(Any, Command),
            prog="semaug",
            description=description,
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
        if distributed.is_launched() and not isinstance(command, Train):
            raise SemaugError("several processes under torchrun are for semaug train alone", on_all_ranks=True)
        with Stop():
            command.run()
        sys.stdout.flush()
    except SemaugError as error:
        if distributed.is_rank_zero() or not error.on_all_ranks:
            _tell(f"semaug: {error}")
        return 2
    except BrokenPipeError:  # whoever read the output has closed it; the interpreter must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interruption:
        goes_on = isinstance(command, Train | Demo | Compare | Reproduce)
        what = str(interruption) or "interrupted"
        if distributed.is_rank_zero():
            _tell(f"semaug: {what}{'; the same command goes on from there' if goes_on else ''}")
        return 128 + getattr(interruption, "number", signal.SIGINT)
    return 0


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def _device(name: str | None) -> str:
    import torch

    if name is not None and name.startswith("cuda") and not torch.cuda.is_available():
        raise SemaugError("there is no CUDA device here; leave out --device or say --device cpu")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


if __name__ == "__main__":
    sys.exit(main())
