"""`semaug data`: check, divide and pack data sets."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from semaug.cli.common import Command, choose_device, show
from semaug.util.errors import DataError, SettingError
from semaug.util.names import counted, percent, printable
from semaug.util.ranges import BelowOne, Count, Range, Seed, Workers

if TYPE_CHECKING:
    from semaug.data.check import NearDuplicate
    from semaug.data.samples import DataSet

PAIRS = 20  # that look the same, in the output of the check


@dataclass(frozen=True)
class Check(Command):
    """Check a data set: counts, sizes, unreadable and duplicate images, classes that differ between splits."""

    data: Annotated[str, tyro.conf.Positional]
    """Name of a data set, or path of a folder or table of images."""
    data_root: Path | None = None
    """Folder of the named data sets. Default: $SEMAUG_DATA, or ./data."""
    json: Path | None = None
    """Write the whole report to this file. Default: no file."""
    strict: bool = False
    """Exit with code 2 if there is any problem, for use in scripts."""
    workers: Workers = 2
    """Number of processes that read images."""
    near_duplicates: str | None = None
    """Also find images of different splits that look the same, or any two if there is one split. They are compared by
    the features of a run (its directory) or of a pretrained model (its name), or as small grey pictures ("pixels").
    Default: no."""
    weights: Path | None = None
    """Weights of that model (.safetensors). Default: those of its library are downloaded."""
    similarity: Annotated[float, Range(-1, 1)] = 0.9
    """Images look the same if the cosine of their features is at least this."""
    device: str | None = None
    """Device of that model: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""

    def run(self) -> None:
        from semaug.data.check import NAMED, check_data
        from semaug.data.readers import read_data, refuse_ambiguity
        from semaug.data.shards import damaged_shards, holds_shards
        from semaug.util.files import refuse_foreign, write_atomically
        from semaug.util.progress import Progress

        refuse_ambiguity(self.data, self.data_root)
        data = read_data(self.data, self.data_root)
        damaged = damaged_shards(Path(self.data)) if holds_shards(Path(self.data)) else []
        with Progress().task("reading images", sum(len(samples) for samples in data.splits.values())) as advance:
            report = check_data(data, self.workers, advance)
        if self.near_duplicates is not None:
            report = replace(report, near_duplicates=self._near_duplicates(data))
        show(f"{report.name}: {counted(report.classes, 'class')}")
        for name, split in report.splits.items():
            line = f"  {name}: {counted(split.images, 'image')} of {counted(split.classes, 'class')}"
            if split.per_class is not None:
                line += f", {_span(f'{split.per_class.minimum:.0f}', f'{split.per_class.maximum:.0f}')} of each"
            if split.widths is not None and split.heights is not None:
                smallest = f"{split.widths.minimum:.0f}×{split.heights.minimum:.0f}"
                line += f", {_span(smallest, f'{split.widths.maximum:.0f}×{split.heights.maximum:.0f}')} px"
            show(line)
        for problem in report.problems:
            show(f"  ! {problem}")
        for pair in report.near_duplicates[:PAIRS] if len(report.near_duplicates) > NAMED else ():
            places = (f"{image.split}: {image.name}" for image in (pair.first, pair.second))
            show(f"    {pair.similarity:.3f}  {'  '.join(places)}")
        for item in report.unreadable if len(report.unreadable) > NAMED else ():  # the sentence above lists a few
            show(f"    {item.image.name}: {item.reason}")
        if damaged:
            show(f"  ! changed since they were written: {', '.join(damaged)}")
        if not report.problems and not damaged:
            show("  no problems found")
        if self.json is not None:
            content = report.to_json().encode()
            refuse_foreign(self.json, content[: content.index(b":")])
            write_atomically(self.json, content)
        problems = len(report.problems) + bool(damaged)
        if self.strict and problems:
            raise DataError(f"{printable(self.data)} has {counted(problems, 'problem')}")

    def _near_duplicates(self, data: "DataSet") -> "tuple[NearDuplicate, ...]":
        from semaug.data.near_duplicates import Embed, grey_thumbnails, near_duplicates

        embed: Embed = partial(grey_thumbnails, workers=self.workers)
        if self.near_duplicates not in (None, "pixels"):
            from semaug.inference.embedding import embed_images, open_features

            device = choose_device(self.device)
            network, preprocessing = open_features(str(self.near_duplicates), self.weights, device)
            embed = partial(embed_images, network, preprocessing, device=device)
        return near_duplicates(data, embed, self.similarity)


@dataclass(frozen=True)
class Split(Command):
    """Divide a data set of image files into train, val and test, with the same share of every class, and save it.

    The file is a table that every other command takes as a data set. An existing test split is not changed.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Name of a data set, or path of a folder or table of images."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The .csv file to write: columns path, label, split and group."""
    data_root: Path | None = None
    """Folder of the named data sets. Default: $SEMAUG_DATA, or ./data."""
    group_by: str | None = None
    """Keep images together that belong together, such as those of one individual or sequence: "folder", or a column of
    the table. Default: no groups."""
    val_fraction: BelowOne = 0.1
    """Share of validation images."""
    test_fraction: BelowOne | None = None
    """Share of test images. Default: 0.2, or none if the data set has a test split."""
    seed: Seed = 0
    """Seed of the random split."""

    def run(self) -> None:
        from semaug.data.readers import read_data, refuse_ambiguity
        from semaug.data.splitting import split_data, write_split_table

        refuse_ambiguity(self.data, self.data_root)
        data = read_data(self.data, self.data_root)
        table = Path(self.data) if Path(self.data).is_file() else None
        fractions = (self.val_fraction, self.test_fraction)
        rows = split_data(data, *fractions, group_by=self.group_by, table=table, seed=self.seed)
        if self.output.suffix.lower() != ".csv":
            raise SettingError(f"`output` must end with .csv, not {self.output.suffix or self.output}")
        write_split_table(rows, self.output)
        show(f"{self.output}: {counted(len(data.classes), 'class')}")
        for split in ("train", "val", "test"):
            own = [row for row in rows if row.split == split]
            groups = "" if self.group_by is None else f" in {counted(len({row.group for row in own}), 'group')}"
            if own:
                classes = counted(len({row.class_name for row in own}), "class")
                show(f"  {split}: {counted(len(own), 'image')} of {classes}{groups}, {percent(len(own) / len(rows))}")


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class Shards(Command):
    """Write a data set as tar files of about a thousand images, in the layout of WebDataset, with checksums.

    Many small files are slow on network storage, and large data sets are easier to move in this form. Every other
    command accepts the folder as a data set. Run the same command again to resume.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Name of a data set, or path of a folder or table of images."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write: a new one, or one that this command began."""
    data_root: Path | None = None
    """Folder of the named data sets. Default: $SEMAUG_DATA, or ./data."""
    per_shard: Count = 1000
    """Images in each tar file."""

    def run(self) -> None:
        from semaug.data.readers import read_data, refuse_ambiguity
        from semaug.data.shards import write_shards
        from semaug.util.progress import Progress

        refuse_ambiguity(self.data, self.data_root)
        data = read_data(self.data, self.data_root)
        total = sum(map(len, data.splits.values()))
        with Progress().task("writing shards", total) as advance:
            count = write_shards(data, self.folder, self.per_shard, advance)
        show(f"{self.folder}: {total} images in {count} shards, shards.json")


@dataclass(frozen=True)
class Destruction(Command):
    """Measure on the embedded birds how often an image-level augmentation destroys the only cue of a species."""

    num_species: Count = 20
    """Number of species."""
    per_species: Count = 20
    """Images of each species."""
    seed: Seed = 0
    """Seed of all random numbers."""

    def run(self) -> None:
        from semaug.data.destruction import measure

        for row in measure(self.num_species, self.per_species, self.seed):
            print(f"{row.name:28s} {100 * row.share:5.1f} % ± {100 * row.standard_error:.1f}   {row.how}")


@dataclass(frozen=True)
class Data(Command):
    """Check data sets, divide them into splits, and pack them into shards."""

    command: (
        Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Split, tyro.conf.subcommand("split")]
        | Annotated[Shards, tyro.conf.subcommand("shards")]
        | Annotated[Destruction, tyro.conf.subcommand("destruction")]
    )

    def run(self) -> None:
        self.command.run()
