"""Compare the rate of training on real images with the same step on noise.

    python benchmarks/input_pipeline.py --data PATH --model resnet50 --resize 300 --crop 224

Both take turns in one run. The ratio shows whether the input pipeline keeps the network busy. Decoded images are in
memory, on the GPU if there is one; crop, flip and normalisation run on the device.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from semaug.data.cache import decoded
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.network.models import build_model
from semaug.training import methods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="birds")
    parser.add_argument("--model", default="small")
    parser.add_argument("--method", default="basic", choices=list(methods.METHODS))
    parser.add_argument("--resize", type=int, default=96)
    parser.add_argument("--crop", type=int, default=88)
    parser.add_argument("--half", type=int, default=64, help="images per half batch")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/semaug"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = read_data(args.data)
    samples = data.splits["train"]
    preprocessing = Preprocessing(args.resize, args.crop)
    pixels = decoded(samples, preprocessing, args.cache.expanduser(), workers=8).to(device)
    labels = torch.tensor(samples.labels, device=device)

    model = build_model(args.model, len(data.classes), args.crop).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = True
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    learner = methods.make_learner(
        args.method,
        methods.Augmentation(strength=1.0),
        model,
        optimizer,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2 * args.half, 3, args.crop, args.crop, device=device).to(memory_format=torch.channels_last)

    def on_images() -> None:
        indices = torch.randint(len(samples), (2 * args.half,), generator=generator).to(device)
        crops = preprocessing.cropped(pixels[indices], *preprocessing.draw_crops(len(indices), generator))
        learner.step(preprocessing.normalised(crops), labels[indices])

    def on_noise() -> None:
        learner.step(noise, labels[: 2 * args.half])

    rates: dict[str, list[float]] = {"images": [], "noise": []}
    for turn in range(-1, args.turns):
        for name, step in (("images", on_images), ("noise", on_noise)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                rates[name].append(2 * args.half * args.steps / (time.perf_counter() - start))
    images, noise_rate = (statistics.median(rates[name]) for name in ("images", "noise"))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.model}, {args.method}, {args.resize} → {args.crop} px, {args.half} + {args.half}, on {where}")
    print(f"images {images:.0f}/s, noise {noise_rate:.0f}/s, ratio {images / noise_rate:.3f}")


if __name__ == "__main__":
    main()
