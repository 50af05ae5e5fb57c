"""A small folder of pictures, as a user would have it."""

from pathlib import Path

from PIL import Image

from semaug.data.birds import Birds


def photo_folder(root: Path, species: int = 3, train: int = 8, test: int = 4, size: int = 40) -> Path:
    """root/train/CLASS/N.png and root/test/CLASS/N.png."""
    for split, count in (("train", train), ("test", test)):
        drawn = Birds(species, count, split, size)
        for i, label in enumerate(drawn.labels):
            file = root / split / drawn.classes[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawn.drawing(i).image).save(file)
    return root
