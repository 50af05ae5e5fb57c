"""Measure time and memory of the loss on the head alone, relative to a linear layer with cross-entropy.

    python benchmarks/loss_head.py                                     # 10,000 classes, as on iNaturalist
    python benchmarks/loss_head.py --classes 200 --json head.json
    python benchmarks/loss_head.py --classes 100000 --dim 768 --repetitions 3

Each case is a forward and a backward pass in fp32, on random features: the linear layer with cross-entropy, with
gradients in features, weight and bias; the ISDA loss of a diagonal covariance, with the gradient in the variance as
well; the same with Σ from each source, including the update of class-wise statistics; and the head's part of the
meta-gradient, which is the derivative of the ISDA loss along a direction of features, weight and bias, differentiated
in the variance. The cases take turns, so that a change of clock or load affects all of them; the table shows medians.
Memory is the peak above what was allocated before the case, including the weight's gradient. On CPUs under Linux it is
the resident memory, and the table shows the smallest value of all repetitions.
"""

import argparse
import ctypes
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import semaug
from semaug.isda.loss import isda_loss_along

BASE = "linear + cross-entropy"


def cases(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The measured functions by name; each call returns gradients."""
    torch.manual_seed(0)
    n, c, d = args.batch, args.classes, args.dim
    features, weight, bias = (
        torch.randn(shape, device=device).div_(scale).requires_grad_()
        for shape, scale in (((n, d), 1.0), ((c, d), d**0.5), ((c,), 1.0))
    )
    variance = torch.rand(n, d, device=device).requires_grad_()
    head = features, weight, bias
    points = tuple(part.detach() for part in head)
    direction = (*(torch.randn_like(part) for part in points), None)
    labels = torch.randint(c, (n,), device=device)

    def isda(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        covariance = semaug.Diagonal(variance)
        return semaug.isda_loss(features, labels, weight, bias, covariance, args.strength, validate=False)

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(F.linear(*head), labels), head)

    def augmented() -> tuple[Tensor, ...]:
        return torch.autograd.grad(isda(*head), (*head, variance))

    def from_source(source: semaug.Source) -> Callable[[], tuple[Tensor, ...]]:
        learned = [parameter for parameter in source.to(device).parameters() if parameter.requires_grad]

        def run() -> tuple[Tensor, ...]:
            source.update(features.detach(), labels)
            covariance = source(features, labels)
            loss = semaug.isda_loss(features, labels, weight, bias, covariance, args.strength, validate=False)
            return torch.autograd.grad(loss, (*head, *learned))

        return run

    def meta_gradient() -> tuple[Tensor, ...]:
        covariance = semaug.Diagonal(variance)
        along = isda_loss_along(points[0], labels, *points[1:], covariance, args.strength, direction=direction)
        return torch.autograd.grad(along, variance)

    return {
        BASE: plain,
        "ISDA, diagonal": augmented,
        "constant": from_source(semaug.Constant(0.5)),
        "CovNet": from_source(semaug.CovNet(d)),
        "class-wise": from_source(semaug.ClassCovariance(c, d)),
        "meta-gradient at the head": meta_gradient,
    }


def allocated(device: torch.device, peak: bool = False) -> int:
    """Allocated bytes, which also resets the peak; with `peak`, the peak since then. 0 where it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if peak:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        if not peak:
            ctypes.CDLL(None).malloc_trim(0)  # free memory of the process would count otherwise
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except (OSError, AttributeError):
        return 0
    return int(re.findall(r"VmHWM:\s+(\d+) kB" if peak else r"VmRSS:\s+(\d+) kB", status)[0]) * 1024


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Median seconds, their ratio to the base, and the peak in bytes, for each case."""
    runs = cases(args, device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int] = {}
    for repetition in range(-args.warm_up, args.repetitions):
        for name, run in runs.items():
            before = allocated(device)
            start = time.perf_counter()
            run()
            above = allocated(device, peak=True) - before
            if repetition >= 0:
                times[name].append(time.perf_counter() - start)
                peaks[name] = min(peaks.get(name, above), above)
    base = statistics.median(times[BASE])
    results: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        results[name] = {"seconds": statistics.median(values), "ratio": statistics.median(values) / base}
        results[name] |= {"peak_bytes": peaks[name], "peak_bytes_above_base": peaks[name] - peaks[BASE]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--strength", type=float, default=5.0)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    args = parser.parse_args()
    if min(args.classes, args.dim, args.batch, args.repetitions) < 1:
        parser.error("--classes, --dim, --batch and --repetitions must be at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    results = measure(args, device)

    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    settings = {"classes": args.classes, "dim": args.dim, "batch": args.batch, "repetitions": args.repetitions}
    settings |= {"strength": args.strength, "tf32": args.tf32, "device": where, "torch": torch.__version__}
    print(
        f"{args.classes} classes, {args.dim} dimensions, {args.batch} samples, fp32{' by tf32' if args.tf32 else ''}, "
        f"torch {torch.__version__}, {where}"
    )
    print(f"{'case':28s} {'ms':>9s} {'ratio':>6s} {'MB':>8s} {'above base':>11s}")
    for name, row in results.items():
        line = f"{name:28s} {1e3 * row['seconds']:9.3f} {row['ratio']:6.2f}"
        print(line + f" {row['peak_bytes'] / 1e6:8.1f} {row['peak_bytes_above_base'] / 1e6:11.1f}")
    if args.json:
        args.json.write_text(json.dumps({"settings": settings, "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
