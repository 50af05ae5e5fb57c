"""Profile a training step: milliseconds on the GPU by phase of the loop and by kind of kernel.

    python benchmarks/profile_step.py --model resnet50 --pixels 448 --half 64 --frozen-blocks 10

The script profiles plain cross-entropy and the meta loop in both orders. The host waits for the GPU at the start and
the end of each phase, so that each kernel belongs to one phase. "Whole" is the time of a step without these waits, and
"host" the time that the host then spends in each phase. Peak memory is that above model and optimiser. Needs a GPU.
"""

import argparse
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import semaug
import semaug.meta.executor
from semaug.meta.algorithm import Algorithm1
from semaug.meta.executor import Executor
from semaug.network.network import Network

KINDS = {  # the first that fits a kernel's name
    "normalisation": ("batch_norm", "bn_fw", "bn_bw", "batchnorm", "_norm_", "layer_norm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "layout": ("nchwtonhwc", "nhwctonchw", "transpose", "direct_copy", "copy_device_to_device", "convert"),
    "convolution": (
        "conv",
        "xmma",
        "implicit",
        "wgrad",
        "dgrad",
        "cudnn",
        "gemm",
        "cutlass",
        "nvjet",
        "cublas",
        "splitk",
    ),
    "pooling": ("pool",),
    "reduction": ("reduce",),
    "element by element": ("elementwise", "vectorized", "multi_tensor", "foreach", "triton", "_add_clamp"),
}


def kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, marks in KINDS.items() if any(mark in lower for mark in marks)), "other")


class Phases:
    """Marks the phases of a step for the profiler; the host waits for the GPU at both ends of each."""

    def __init__(self) -> None:
        self.on = False
        self.memory: dict[str, float] = {}
        self.base = 0  # allocated bytes before the step
        self.host: dict[str, float] = defaultdict(float)  # seconds in each phase, without the phases inside it
        self.inside: list[float] = [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase; while the profiler is off, measure the host's time in it."""
        if not self.on:
            start = time.perf_counter()
            self.inside.append(0.0)
            yield
            elapsed = time.perf_counter() - start
            self.host[name] += elapsed - self.inside.pop()
            self.inside[-1] += elapsed
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with record_function(f"phase: {name}"):
            yield
            torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - self.base) / 1e9
        self.memory[name] = max(self.memory.get(name, 0.0), peak)

    def around(self, owner: Any, attribute: str, name: str) -> None:
        """Make each call of a function of `owner` a phase."""
        function = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, timed)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, phases: Phases) -> Callable[[Tensor, Tensor], None]:
    def step(images: Tensor, labels: Tensor) -> None:
        for half, half_labels in zip(images.chunk(2), labels.chunk(2), strict=True):
            with phases.phase("forward on X"), torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(half).float(), half_labels)
            with phases.phase("backward and step"):
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()

    return step


def kernels_by_phase(events: list[FunctionEvent]) -> dict[str, list[tuple[str, float]]]:
    """Name and milliseconds of each kernel, by the innermost phase in which it began."""
    marks = [e for e in events if e.name.startswith("phase: ") and e.device_type == torch.autograd.DeviceType.CPU]
    result: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith("phase: "):
            continue
        inside = [m for m in marks if m.time_range.start <= event.time_range.start <= m.time_range.end]
        innermost = min(inside, key=lambda m: m.time_range.elapsed_us(), default=None)
        name = innermost.name.removeprefix("phase: ") if innermost else "between"
        result[name].append((event.name, event.time_range.elapsed_us() / 1e3))
    return result


def table(kernels: dict[str, list[tuple[str, float]]], steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds per step by phase and kind of kernel."""
    result: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for phase, calls in kernels.items():
        for name, milliseconds in calls:
            result[phase][kind(name)] += milliseconds / steps
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pixels", type=int, default=448)
    parser.add_argument("--half", type=int, default=64, help="images per half batch")
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument("--frozen-blocks", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=0, help="also list the N longest kernels of each phase")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--orders", nargs="*", default=["plain", "paper", "pipelined"])
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    images = torch.randn(2 * args.half, 3, args.pixels, args.pixels, device="cuda").to(
        memory_format=torch.channels_last
    )
    labels = torch.randint(args.classes, (2 * args.half,), device="cuda")
    print(
        f"{args.model}, {args.pixels} px, {args.half} + {args.half} images, {args.frozen_blocks} blocks frozen, bf16, "
        f"channels-last; torch {torch.__version__}, Python {platform.python_version()}, {torch.cuda.get_device_name()}"
    )
    phases = Phases()
    phases.around(Network, "forward", "forward on X")
    phases.around(Network, "forward_at", "meta forward")
    phases.around(Algorithm1, "pseudo_update", "pseudo backward")
    phases.around(Executor, "meta_loss_at", "meta backward")
    phases.around(Executor, "meta_loss", "meta backward")
    phases.around(Algorithm1, "real_update", "real backward and step")
    phases.around(semaug.meta.executor, "meta_gradient", "tangent pass and head")
    for order in args.orders:
        torch.manual_seed(0)
        options = {"img_size": args.pixels} if args.model.startswith(("vit", "swin")) else {}
        model = timm.create_model(args.model, num_classes=args.classes, **options).cuda()
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
        if order == "plain":
            step: Callable[[Tensor, Tensor], Any] = plain_step(model, optimizer, phases)
        else:
            step = semaug.LearnableAugmentation(
                model, optimizer, strength=5.0, frozen_blocks=args.frozen_blocks, autocast=torch.bfloat16,
                check_values=False, order=order,
            ).step  # fmt: skip
        for _ in range(3):
            step(images, labels)
        times = []
        phases.host.clear()
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step(images, labels)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        torch.cuda.reset_peak_memory_stats()
        host = {name: 1e3 * seconds / len(times) for name, seconds in phases.host.items()}
        phases.base, phases.memory, phases.on = torch.cuda.memory_allocated(), {}, True
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(args.steps):
                step(images, labels)
                torch.cuda.synchronize()
        phases.on = False
        kernels = kernels_by_phase(list(profiler.events()))
        rows = table(kernels, args.steps)
        kinds = [k for k in (*KINDS, "other") if any(row.get(k, 0) >= 0.05 for row in rows.values())]
        print(f"\n{order}: whole {statistics.median(times):.1f} ms per step")
        print(
            f"{'ms on the GPU per step':24s} {'all':>7s} "
            + " ".join(f"{k[:11]:>11s}" for k in kinds)
            + f" {'host':>6s} {'peak GB':>8s}"
        )
        for name, row in rows.items():
            cells = " ".join(f"{row.get(k, 0):11.1f}" for k in kinds)
            waits, peak = host.get(name, float("nan")), phases.memory.get(name, float("nan"))
            print(f"{name:24s} {sum(row.values()):7.1f} {cells} {waits:6.1f} {peak:8.1f}")
        if args.kernels:
            print_kernels(kernels, args.steps, args.kernels)
        del model, optimizer, step, profiler
        torch.cuda.empty_cache()


def print_kernels(kernels: dict[str, list[tuple[str, float]]], steps: int, count: int) -> None:
    """Print the longest kernels of each phase, with milliseconds and calls per step."""
    for phase, calls in kernels.items():
        print(f"  {phase}")
        times: dict[str, list[float]] = defaultdict(list)
        for name, milliseconds in calls:
            times[name].append(milliseconds)
        for name, values in sorted(times.items(), key=lambda item: -sum(item[1]))[:count]:
            print(f"    {sum(values) / steps:7.2f} ms {len(values) / steps:6.0f}×  {kind(name)[:10]:10s} {name[:110]}")


if __name__ == "__main__":
    main()
