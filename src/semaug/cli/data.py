"""`semaug data`: check data sets, and pack them into shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from semaug.cli.common import Command, show
from semaug.util.errors import DataError
from semaug.util.names import counted, printable
from semaug.util.ranges import Count, Seed, Workers


@dataclass(frozen=True)
class Check(Command):
    """Check a data set: counts, sizes, unreadable and duplicate images, classes that differ between splits."""

    data: Annotated[str, tyro.conf.Positional]
    """Name of a data set, or path of a folder or table of images."""
    data_root: Path | None = None
    """Folder that holds the named data sets. Default: $SEMAUG_DATA, or ./data."""
    json: Path | None = None
    """Write the whole report to this file. Default: no file."""
    strict: bool = False
    """End with exit code 2 if there is any problem, for use in scripts."""
    workers: Workers = 2
    """Number of processes that read images."""

    def run(self) -> None:
        from semaug.data.check import NAMED, check_data
        from semaug.data.readers import read_data, refuse_ambiguity
        from semaug.data.shards import damaged_shards, holds_shards
        from semaug.util.files import write_atomically
        from semaug.util.progress import Progress

        refuse_ambiguity(self.data, self.data_root)
        data = read_data(self.data, self.data_root)
        damaged = damaged_shards(Path(self.data)) if holds_shards(Path(self.data)) else []
        with Progress().task("reading images", sum(len(samples) for samples in data.splits.values())) as advance:
            report = check_data(data, self.workers, advance)
        show(f"{report.name}: {counted(report.classes, 'class')}")
        for name, split in report.splits.items():
            line = f"  {name}: {counted(split.images, 'image')} of {counted(split.classes, 'class')}"
            if split.per_class is not None:
                line += f", {split.per_class.minimum:.0f} to {split.per_class.maximum:.0f} of each"
            if split.widths is not None and split.heights is not None:
                line += f", sizes {split.widths.minimum:.0f}×{split.heights.minimum:.0f}"
                line += f" to {split.widths.maximum:.0f}×{split.heights.maximum:.0f} px"
            show(line)
        for problem in report.problems:
            show(f"  ! {problem}")
        for item in report.unreadable if len(report.unreadable) > NAMED else ():  # the sentence above lists a few
            show(f"    {item.image.name}: {item.reason}")
        if damaged:
            show(f"  ! changed since they were written: {', '.join(damaged)}")
        if not report.problems and not damaged:
            show("  no problems found")
        if self.json is not None:
            write_atomically(self.json, report.to_json().encode())
        problems = len(report.problems) + bool(damaged)
        if self.strict and problems:
            raise DataError(f"{printable(self.data)} has {counted(problems, 'problem')}")


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
    """Folder that holds the named data sets. Default: $SEMAUG_DATA, or ./data."""
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
    """Check data sets, and pack them into shards."""

    command: (
        Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Shards, tyro.conf.subcommand("shards")]
        | Annotated[Destruction, tyro.conf.subcommand("destruction")]
    )

    def run(self) -> None:
        self.command.run()
