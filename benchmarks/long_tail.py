"""Train linear probes on a long-tailed cut of a folder of photos, with each remedy for uneven classes.

    python benchmarks/long_tail.py CUB/train --weights mobilenet_v2.safetensors --work work --csv runs.csv

Of each class, six photos are for validation. Classes are put into a random order, in which the number of training
photos falls geometrically from 24 to 1. Each row of the CSV file is one run of the trainer behind

    semaug train --freeze all --data work/cut.csv --weights mobilenet_v2.safetensors --resize 256 --crop 224

with the accuracy after the last epoch on the validation photos (as many of each class), of all classes and of those
with many and few training photos. The final evaluation of the whole network, which would take longer than all else on a
CPU, is replaced by one on the cached features. Rows that the file has already are not trained again.
"""

import argparse
import csv
import hashlib
from contextlib import closing
from pathlib import Path

import torch

from semaug.inference.evaluation import score
from semaug.training.optimization import Optimization, build_network
from semaug.training.probing import with_features
from semaug.training.run_data import RunData, load_run_data, read_run_data
from semaug.training.run_directory import RunDirectory
from semaug.training.settings import TrainConfig
from semaug.training.tracking import make_tracker
from semaug.training.trainer import Trainer
from semaug.util.progress import Progress
from semaug.util.signals import Stop

MOST, VALIDATION = 24, 6
GROUPS = {"more than 10": range(11, 1000), "4 to 10": range(4, 11), "1 to 3": range(1, 4)}
VARIANTS = {
    "plain": {},
    "--sampler square-root": {"sampler": "square-root"},
    "--sampler balanced": {"sampler": "balanced"},
    "--class-weights square-root": {"class_weights": "square-root"},
    "--class-weights balanced": {"class_weights": "balanced"},
}


def shuffled(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest())


def cut(folder: Path, table: Path) -> None:
    """Write the table of the cut."""
    classes = shuffled([path for path in folder.iterdir() if path.is_dir()])
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for rank, place in enumerate(classes):
            count = max(1, round(MOST ** (1 - rank / (len(classes) - 1))))
            for i, photo in enumerate(shuffled(list(place.iterdir()))[: VALIDATION + count]):
                writer.writerow([photo.resolve(), place.name, "val" if i < VALIDATION else "train"])


def trained(config: TrainConfig, data: RunData) -> dict[str, float]:
    """Train a probe on features; returns its scores by column of the CSV file."""
    device, progress = torch.device("cpu"), Progress(quiet=True)
    torch.manual_seed(config.seed)
    model = build_network(config, len(data.classes), device, progress)
    optimization = Optimization(model, config, device, data.class_images)
    with Stop() as stop, RunDirectory(config.output) as run:
        trainer = Trainer(config, run, data, optimization, progress, stop)
        with closing(make_tracker(None, config.output, {}, 0)) as tracker:
            while not trainer.is_finished():
                trainer.run_epoch(tracker)
    with torch.inference_mode():
        logits = optimization.evaluated.eval()(data.preprocessing.evaluation_input(data.val))
    scores = score(logits.softmax(1), torch.tensor(list(data.splits["val"].labels)))
    result = {"top1": scores.top1, "mean of classes": scores.mean_class_accuracy}
    for group, sizes in GROUPS.items():
        own = [scores.class_accuracy[i] for i, count in enumerate(data.class_images) if count in sizes]
        result[group] = sum(own) / len(own) if own else float("nan")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="torchvision/mobilenet_v2")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["basic"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, required=True, help="folder for the table, the runs and the cache")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    cut(options.folder, options.work / "cut.csv")
    common = {
        "data": str(options.work / "cut.csv"), "model": options.model, "weights": options.weights, "freeze": "all",
        "resize": 256, "crop": 224, "epochs": options.epochs, "validate_every": options.epochs, "device": "cpu",
        "cache": options.work / "cache",
    }  # fmt: skip
    data: RunData | None = None
    rows = list(csv.DictReader(open(options.csv, newline=""))) if options.csv.exists() else []  # noqa: SIM115
    done = {(row["method"], row["variant"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for method in options.methods:
            for variant, flags in VARIANTS.items():
                if (method, variant, str(seed)) in done:
                    continue
                output = options.work / f"{method}-{'-'.join(flags.values()) or 'plain'}-{'-'.join(flags)}-{seed}"
                config = TrainConfig(**common, **flags, method=method, seed=seed, output=output).resolve()
                if data is None:  # the same for all runs, as the table names the validation photos
                    progress, device = Progress(), torch.device("cpu")
                    data = load_run_data(config, read_run_data(config, progress), device, progress, None)
                    network = build_network(config, len(data.classes), device, progress)
                    data = with_features(config, data, network, device, progress)
                row = {"method": method, "variant": variant, "seed": seed, "epochs": options.epochs}
                row |= {name: f"{value:.5f}" for name, value in trained(config, data).items()}
                print(*row.values(), flush=True)
                rows.append(row)
                with open(options.csv, "w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
