"""Time of one training step, method by method, relative to plain cross-entropy in the same run.

    python benchmarks/meta_step.py                                     # small, for a CPU
    python benchmarks/meta_step.py --model resnet50 --pixels 448 --half 64 --frozen-blocks 10 --precision bf16

One step is two half steps (or, for plain training, two updates) on halves of one batch. Methods take turns within each
repetition, so that a change of clock or load meets all of them; the table shows medians and the spread of the middle
half. Memory is the peak of the step above what model and optimiser hold (CUDA only).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn

import semaug

METHODS: dict[str, dict[str, Any]] = {
    "isda": {"source": "class"},
    "learnable, paper order, jvp": {"order": "paper", "engine": "jvp"},
    "learnable, paper order, double backward": {"order": "paper", "engine": "double_backward"},
    "learnable, pipelined": {"order": "pipelined"},
    "learnable, paper order, interval 10": {"order": "paper", "interval": 10},
    "learnable, pipelined, interval 10": {"order": "pipelined", "interval": 10},
}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def build(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    options = {"img_size": args.pixels} if args.model.startswith(("vit", "swin")) else {}
    model = timm.create_model(args.model, num_classes=args.classes, **options).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)


def plain(args: argparse.Namespace, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    model, optimizer = build(args, device)
    precision = PRECISIONS[args.precision]

    def step(images: Tensor, labels: Tensor) -> None:
        for half, half_labels in zip(images.chunk(2), labels.chunk(2), strict=True):
            with torch.autocast(device.type, precision, enabled=precision is not None):
                loss = nn.functional.cross_entropy(model(half).float(), half_labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return step


def learner(args: argparse.Namespace, device: torch.device, **options: Any) -> Callable[[Tensor, Tensor], Any]:
    model, optimizer = build(args, device)
    width = semaug.Network(model).feature_dim
    source = semaug.ClassCovariance(args.classes, width) if options.pop("source", None) else semaug.CovNet(width)
    return semaug.LearnableAugmentation(
        model,
        optimizer,
        source,
        strength=5.0,
        frozen_blocks=args.frozen_blocks,
        autocast=PRECISIONS[args.precision],
        check_values=False,
        **options,
    ).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--half", type=int, default=8, help="images per half batch")
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument("--frozen-blocks", type=int, default=5)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--skip", nargs="*", default=[], help="methods to leave out, by a part of their name")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    images = torch.randn(2 * args.half, 3, args.pixels, args.pixels, device=device)
    if device.type == "cuda":
        images = images.to(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = True
    labels = torch.randint(args.classes, (2 * args.half,), device=device)

    methods = {name: options for name, options in METHODS.items() if not any(part in name for part in args.skip)}
    times: dict[str, list[float]] = {name: [] for name in ("plain", *methods)}
    memory: dict[str, float] = {}
    # At interval 10 only every fifth step has a meta update, so a repetition is five steps of each method.
    steps = 5 if any(options.get("interval") for options in methods.values()) else 1
    runs: dict[str, Callable[[Tensor, Tensor], Any]] = {"plain": plain(args, device)}
    runs |= {name: learner(args, device, **options) for name, options in methods.items()}
    for repetition in range(-2, args.repetitions):
        for name, run in runs.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                run(images, labels)
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = (torch.cuda.max_memory_allocated() - held) / 1e9
            if repetition >= 0:
                times[name].append((time.perf_counter() - start) / steps)

    print(
        f"{args.model}, {args.pixels} px, {args.half} + {args.half} images, {args.frozen_blocks} blocks frozen, "
        f"{args.precision}{' + tf32' if args.tf32 else ''}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}"
    )
    base = statistics.median(times["plain"])
    print(f"{'method':42s} {'ms/step':>9s} {'±':>6s} {'ratio':>6s} {'GB':>6s}")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(
            f"{name:42s} {1e3 * middle:9.1f} {1e3 * (high - low) / 2:6.1f} {middle / base:6.2f} "
            f"{memory.get(name, float('nan')):6.1f}"
        )


if __name__ == "__main__":
    main()
