"""Compare training on images that are decoded in every epoch with training on decoded images.

    python benchmarks/streaming.py --model resnet18 --workers 1

The script writes JPEG files like photos (500 × 375 pixels, about 110 kB) into a temporary folder and measures how fast
worker processes decode and resize them. Then the same training steps take turns on decoded images and on a stream. It
prints the ratio, the share of the time in which a step waited for images, and the CPU time of the training process,
which depends least on other programs. `--threads` limits the network's threads, so that cores are left for decoding.
"""

import argparse
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from semaug.data.cache import decoded
from semaug.data.images import Preprocessing
from semaug.data.readers import split_validation
from semaug.data.samples import ImageFiles
from semaug.data.shards import ShardedImages
from semaug.data.stream import shards_of, stream_pixels, streaming_order
from semaug.network.models import build_model
from semaug.training import methods

CLASSES = 100
WARM_UP = 3  # steps at the start of each turn that are not measured


def write_photos(folder: Path, count: int) -> ImageFiles:
    """Write JPEG files of coloured noise on all scales, which compress like photos."""
    generator = np.random.default_rng(0)
    files = []
    for i in range(count):
        picture = np.zeros((375, 500, 3))
        for scale in (1, 4, 16, 64, 256):
            coarse = generator.normal(0, 8 * scale**0.4, (-(-375 // scale), -(-500 // scale), 3))
            picture += coarse.repeat(scale, 0).repeat(scale, 1)[:375, :500]
        files.append(folder / f"{i}.jpg")
        Image.fromarray((picture + 128).clip(0, 255).astype(np.uint8)).save(files[-1], quality=94)
    return ImageFiles(folder, tuple(files), tuple(i % CLASSES for i in range(count)))


def measure_tables(folder: Path, count: int) -> None:
    """Print time and memory that the tables of `count` images in shards of a thousand take; the shards are empty."""
    name = "train/n{0:08d}/n{0:08d}_{1:05d}.JPEG"
    (folder / "names").write_text("".join(name.format(i // 1300, i % 1300) for i in range(count)))
    files = tuple(folder / f"{i}.tar" for i in range(-(-count // 1000)))
    for file in files:  # the names are in the files of the tables
        file.with_suffix(".npy").hardlink_to(folder / "names")
    length = len(name.format(0, 0))
    table = np.full((count, 5), length, np.int64)
    table[:, 0] = table[:, 3] = np.arange(count) * length
    table[:, 2] = np.random.default_rng(0).integers(0, 1000, count)
    shard = np.arange(count) // 1000
    print(f"tables: {(table.nbytes + shard.nbytes) / 1e6:.0f} MB")
    busy = time.process_time()
    tracemalloc.start()
    whole = ShardedImages(files, shard, table, "")
    labels, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    training, _ = split_validation(whole, None, 0.1, seed=0)
    print(f"labels: {labels / 1e6:.0f} MB; choosing validation images: {time.process_time() - busy:.1f} s of CPU time")
    shards = shards_of(training)
    assert shards is not None
    busy = time.process_time()
    order = streaming_order(shards, torch.Generator().manual_seed(0))
    print(f"the order of an epoch: {time.process_time() - busy:.1f} s of CPU time")
    middle = len(order) // 2
    near = len(shards[order[middle : middle + 10_000]].unique())
    print(f"10,000 successive images come from {near} of {len(files)} shards")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--resize", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--half", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tables", type=int, help="measure the tables of N images in shards instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.tables is not None:
        with tempfile.TemporaryDirectory() as folder:
            measure_tables(Path(folder), args.tables)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preprocessing, size = Preprocessing(args.resize, args.crop, "aspect"), 2 * args.half

    model = build_model(args.model, CLASSES, args.crop).to(device)
    learner = methods.make_learner(
        "basic",
        methods.Augmentation(strength=1.0),
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
        label_smoothing=0.0,
        clip_norm=None,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
        scaler=None,
    )
    generator = torch.Generator().manual_seed(0)

    def places(steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            yield torch.randint(args.images, (size,), generator=generator)

    with tempfile.TemporaryDirectory() as folder:
        samples = write_photos(Path(folder), args.images)
        bytes_each = sum(file.stat().st_size for file in samples.files) / args.images
        for workers in sorted({0, 1, args.workers}):
            rates = []
            for _ in range(args.turns):
                start = time.perf_counter()
                count = sum(
                    map(len, stream_pixels(samples, preprocessing, torch.arange(args.images).split(size), workers))
                )
                rates.append(count / (time.perf_counter() - start))
            print(f"decoding alone, {workers} processes: {statistics.median(rates):.0f} images/s", flush=True)
        everything = decoded(samples, preprocessing, None).to(device)
        labels = torch.tensor(samples.labels, device=device)

        def on_decoded() -> Iterator[Tensor]:
            return (everything[part.to(device)] for part in places(WARM_UP + args.steps))

        def turn(batches: Iterator[Tensor]) -> tuple[float, float, float]:
            """Images per second, the share of the time spent waiting, and this process's CPU time per image."""
            for step in range(WARM_UP + args.steps):
                if step == WARM_UP:
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    start, busy, waited = time.perf_counter(), time.process_time(), 0.0
                asked = time.perf_counter()
                pixels = next(batches).to(device)
                waited = waited + time.perf_counter() - asked if step >= WARM_UP else 0.0
                crops = preprocessing.cropped(pixels, *preprocessing.draw_crops(len(pixels), generator))
                learner.step(preprocessing.normalised(crops), labels[:size])
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken = time.perf_counter() - start
            images = size * args.steps
            return images / taken, waited / taken, (time.process_time() - busy) / images

        results: dict[str, list[tuple[float, float, float]]] = {"decoded": [], "stream": []}
        for _ in range(args.turns):
            results["decoded"].append(turn(on_decoded()))
            parts = places(WARM_UP + args.steps)
            with closing(stream_pixels(samples, preprocessing, parts, args.workers)) as stream:
                results["stream"].append(turn(stream))
    (plain, _, own), (rate, waiting, other) = (
        map(statistics.median, zip(*turns, strict=True)) for turns in results.values()
    )
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {args.threads} threads"
    print(f"{args.model}, {args.resize} → {args.crop} px, JPEG of {bytes_each / 1e3:.0f} kB, {size} images, on {where}")
    print(f"decoded {plain:.1f}/s, stream with {args.workers} processes {rate:.1f}/s, ratio {rate / plain:.3f}")
    print(f"waiting for images: {waiting:.1%} of the time")
    print(f"CPU time of the training process, an image: {1e3 * own:.1f} and {1e3 * other:.1f} ms")


if __name__ == "__main__":
    main()
