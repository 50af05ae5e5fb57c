"""Whether it pays to send gradients while the backward pass still runs, instead of after it: time per step, and ratio.

    torchrun --nproc-per-node 2 benchmarks/overlap.py --device cpu              # gloo
    torchrun --nproc-per-node 4 benchmarks/overlap.py --model resnet50 --pixels 448 --batch 128

Each step is one of plain training, of the paper's order or of the pipelined one (two half steps), on noise. The two
ways take turns within each repetition, on the same learner, so that a change of clock or load meets both; what is
printed are medians over repetitions. Where ranks share cores, the threads that send take them from the backward pass.
"""

import argparse
import statistics
import time
from typing import Any

import timm
import torch

import semaug
from semaug.util import distributed

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"source": semaug.Constant(0.0), "strength": 0.0},
    "paper's order": {"order": "paper"},
    "pipelined": {"order": "pipelined"},
}


class SentInTheEnd(distributed._Sum):
    """Gradients that wait for the end of the backward pass."""

    def put(self, place: int, tensor: torch.Tensor) -> None:
        self._found[place] = tensor


WAYS = {"after": SentInTheEnd, "during": distributed._Sum}


def learner_of(args: argparse.Namespace, device: str, options: dict[str, Any]) -> semaug.LearnableAugmentation:
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=200).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    frozen = args.frozen_blocks if "order" in options else 0
    autocast = torch.bfloat16 if device.startswith("cuda") else None
    return semaug.LearnableAugmentation(
        model, optimizer, **options, frozen_blocks=frozen, autocast=autocast, check_values=False
    )


def measure(args: argparse.Namespace, device: str, learner: semaug.LearnableAugmentation) -> dict[str, float]:
    """Median seconds of a step, with gradients sent either way."""
    images = torch.randn(args.batch, 3, args.pixels, args.pixels, device=device)
    labels = torch.randint(200, (args.batch,), device=device)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for repetition in range(-1, args.repetitions):
        for name, kind in WAYS.items():
            distributed._Sum = kind  # type: ignore[misc]
            distributed.gather_numbers([0])  # all begin together
            start = time.perf_counter()
            for _ in range(args.steps):
                learner.step(images, labels)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            distributed.gather_numbers([0])
            if repetition >= 0:
                times[name].append((time.perf_counter() - start) / args.steps)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="resnet18", help="timm's name")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="images of each process")
    parser.add_argument("--frozen-blocks", type=int, default=0)
    parser.add_argument("--bucket", type=float, default=distributed.BUCKET / 2**20, help="MiB that travel at once")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    device = distributed.initialize(args.device)
    if not distributed.is_running():
        parser.error("start it with torchrun, in two processes or more")
    distributed.BUCKET = round(args.bucket * 2**20)
    for name, options in METHODS.items():
        found = measure(args, device, learner_of(args, device, options))
        if distributed.is_rank_zero():
            ratio = found["during"] / found["after"]
            print(
                f"{name:14s} {1e3 * found['after']:8.1f} ms with sums after the backward pass, "
                f"{1e3 * found['during']:8.1f} ms during it: {ratio:.3f}",
                flush=True,
            )
    distributed.shut_down()


if __name__ == "__main__":
    main()
