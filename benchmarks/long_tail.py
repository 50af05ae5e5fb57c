"""Train linear probes on a long-tailed cut of a folder of photos, with each remedy for uneven classes.

    python benchmarks/long_tail.py CUB/train --weights mobilenet_v2.safetensors --work work --csv runs.csv

Of each class, six photos are for validation. Classes are put into a random order, in which the number of training
photos falls geometrically from 24 to 1. Each row of the CSV file is one `semaug train`, with the accuracy on the
validation photos (as many of each class), of all classes and of those with many and few training photos. Rows that the
file has already are not trained again.
"""

import argparse
import csv
import hashlib
import json
from pathlib import Path

from semaug.cli.main import main as semaug

MOST, VALIDATION = 24, 6
GROUPS = {"more than 10": range(11, 1000), "4 to 10": range(4, 11), "1 to 3": range(1, 4)}
VARIANTS = {
    "plain": "",
    "--sampler square-root": "--sampler square-root",
    "--sampler balanced": "--sampler balanced",
    "--class-weights square-root": "--class-weights square-root",
    "--class-weights balanced": "--class-weights balanced",
}


def shuffled(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest())


def cut(folder: Path, table: Path) -> dict[str, int]:
    """Write the table of the cut; returns the number of training photos of each class."""
    classes = shuffled([path for path in folder.iterdir() if path.is_dir()])
    counts: dict[str, int] = {}
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for rank, place in enumerate(classes):
            photos = shuffled(list(place.iterdir()))
            counts[place.name] = max(1, round(MOST ** (1 - rank / (len(classes) - 1))))
            for i, photo in enumerate(photos[: VALIDATION + counts[place.name]]):
                writer.writerow([photo.resolve(), place.name, "val" if i < VALIDATION else "train"])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="torchvision/mobilenet_v2")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["basic", "isda"])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, required=True, help="folder for the table, the runs and the cache")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    counts = cut(options.folder, options.work / "cut.csv")
    rows = list(csv.DictReader(open(options.csv, newline=""))) if options.csv.exists() else []  # noqa: SIM115
    done = {(row["method"], row["variant"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for method in options.methods:
            for variant, flags in VARIANTS.items():
                if (method, variant, str(seed)) in done:
                    continue
                run = options.work / f"{method}-{variant.replace(' ', '')}-{seed}"
                command = f"--model {options.model} --weights {options.weights} --freeze all --resize 256 --crop 224 "
                command += f"--method {method} --epochs {options.epochs} --seed {seed} --select-by mean-of-classes "
                command += f"{flags} --cache {options.work / 'cache'} --data {options.work / 'cut.csv'} --output {run}"
                assert semaug(["train", *command.split()]) == 0
                result = json.loads((run / "evaluation.json").read_text())
                row = {"method": method, "variant": variant, "seed": seed, "epochs": options.epochs}
                row |= {"top1": result["top1"], "mean of classes": result["mean_class_accuracy"]}
                for group, sizes in GROUPS.items():
                    own = [one["accuracy"] for one in result["classes"] if counts[one["name"]] in sizes]
                    row[group] = sum(own) / len(own)
                rows.append(
                    {name: f"{value:.5f}" if isinstance(value, float) else value for name, value in row.items()}
                )
                with open(options.csv, "w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
