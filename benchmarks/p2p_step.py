"""Compare time and memory of a training step of P2P-Net with and without semantic augmentation.

    python benchmarks/p2p_step.py --model resnet50 --pixels 448 --half 64

The methods take turns of five steps on noise (ten half steps: one cycle of a meta loop with interval 10). The table
shows the median and half the interquartile range. Memory is the peak above what is allocated between two steps.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from semaug.inference.classifier import as_composite
from semaug.meta.learner import LearnableAugmentation
from semaug.network.models import build_model
from semaug.studies.bench import median_and_spread
from semaug.training import methods

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "P2P-Net": ("p2p", {}),
    "P2P-Net + ISDA": ("p2p+isda", {}),
    "P2P-Net + learnable, interval 10": ("p2p+learnable", {}),
    "P2P-Net + learnable, interval 10, pipelined": ("p2p+learnable", {"order": "pipelined"}),
}
STEPS = 5


def build(args: argparse.Namespace, device: str, method: str, options: dict[str, Any]) -> LearnableAugmentation:
    torch.manual_seed(0)
    model = as_composite("p2p", build_model(args.model, args.classes, args.pixels), args.classes)
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(methods.parameter_groups(model, 0.002), momentum=0.9, weight_decay=5e-4)
    settings = methods.Augmentation(**options)
    autocast = torch.bfloat16 if device == "cuda" else None
    learner = methods.make_learner(method, settings, model, optimizer, autocast=autocast)
    learner.check_values = False
    return learner


def turn(learner: LearnableAugmentation, images: torch.Tensor, labels: torch.Tensor, steps: int) -> tuple[float, float]:
    """Take some steps; returns milliseconds per step and peak memory in GB."""
    cuda = images.is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    started = time.perf_counter()
    for _ in range(steps):
        learner.step(images, labels)
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    return 1e3 * seconds, (torch.cuda.max_memory_allocated() - before) / 1e9 if cuda else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pixels", type=int, default=448)
    parser.add_argument("--half", type=int, default=64, help="images per half batch")
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    images = torch.randn(2 * args.half, 3, args.pixels, args.pixels, device=device).to(
        memory_format=torch.channels_last
    )
    labels = torch.randint(args.classes, (2 * args.half,), device=device)
    learners = {name: build(args, device, *case) for name, case in CASES.items()}
    for learner in learners.values():
        turn(learner, images, labels, STEPS + 1)
    times: dict[str, list[float]] = {name: [] for name in learners}
    memory: dict[str, float] = {}
    for number in range(args.repetitions):
        names = list(learners)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            milliseconds, peak = turn(learners[name], images, labels, STEPS)
            times[name].append(milliseconds)
            memory[name] = max(peak, memory.get(name, 0.0))
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{args.model}, {args.pixels} px, {args.half} + {args.half} images, torch {torch.__version__}, {where}")
    print(f"{'':46s} {'ms per step':>16s} {'ratio':>14s} {'GB':>6s}")
    base, rows = times["P2P-Net"], {}
    for name, values in times.items():
        ratios = [value / plain for value, plain in zip(values, base, strict=True)]
        (ms, ms_spread), (ratio, ratio_spread) = median_and_spread(values), median_and_spread(ratios)
        print(
            f"{name:46s} {ms:9.1f} ± {ms_spread or 0:4.1f} {ratio:7.2f} ± {ratio_spread or 0:4.2f} {memory[name]:6.2f}"
        )
        rows[name] = {"ms": values, "ratio": statistics.median(ratios), "peak_gb": memory[name]}
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
