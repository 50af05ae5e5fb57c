"""Drawn birds that stand in for the paper's data sets at small scale, written once as folders of images."""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

from semaug.data.birds import VERSION, Birds
from semaug.util.files import write_json


@dataclass(frozen=True)
class World:
    """A set of drawn species; each seed has other species."""

    species: int
    seed: int
    train: int = 40  # images of each species
    test: int = 20
    size: int = 64  # pixels


WORLDS = {
    "cub": World(12, 0),
    "aircraft": World(10, 1),
    "cars": World(12, 2),
    "nabirds": World(14, 3),
    "imagenet": World(16, 4),
}


def world_folder(output: Path, dataset: str) -> Path:
    """Name the folder of a data set's stand-in.

    Args:
        output: Folder of the reproduction.
        dataset: Name of the data set.

    Returns:
        The folder, which need not exist.
    """
    world = WORLDS[dataset]
    return output / "data" / f"birds-{world.species}-{world.seed}"


def draw_world(output: Path, dataset: str) -> Path:
    """Draw a data set's stand-in as train/SPECIES and test/SPECIES, unless it exists.

    Args:
        output: Folder of the reproduction.
        dataset: Name of the data set.

    Returns:
        Its folder.
    """
    world, folder = WORLDS[dataset], world_folder(output, dataset)
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for split, count in (("train", world.train), ("test", world.test)):
        birds = Birds(world.species, count, split, world.size, world.seed)
        for i, label in enumerate(birds.labels):
            file = unfinished / split / birds.classes[label] / f"{i:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(birds.drawing(i).image).save(file)
    write_json(unfinished / "world.json", {"version": VERSION, **asdict(world)})
    unfinished.replace(folder)
    return folder
