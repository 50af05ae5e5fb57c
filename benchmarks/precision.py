"""Measure how the precision of a half step changes its meta-gradient, and where the error comes from.

    python benchmarks/precision.py --model torchvision/resnet50-v1 --weights resnet50.safetensors --data cub

The reference is the whole half step in fp64. Then parts of it are computed in lower precision: everything; only the
tangent pass; everything but the tangent pass; only the direction (the gradient of the meta loss). A half step in fp64
with weights that were rounded to bf16 shows the error that no computation in bf16 can avoid. "Backbone" is the part of
the meta-gradient that comes from the late blocks, without the head's own part, which is by far the larger one.

Images are those of the first classes of a folder of class folders, or noise. `--warm-up` steps of plain training in
bf16 come first, because an untrained network has hardly any features to differentiate.
"""

import argparse
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import semaug
from semaug.isda.precision import widened
from semaug.meta.double_backward import double_backward
from semaug.meta.jvp import jvp
from semaug.meta.losses import TrainLoss
from semaug.meta.problem import TrainProblem
from semaug.network.models import build_model, load_weights
from semaug.network.network import Network

Parts = dict[str, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def vector(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


class Experiment:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.images, self.labels = images_of(args)
        self.model = build_model(args.model, int(self.labels.max()) + 1, args.pixels)
        if args.weights:
            load_weights(self.model, args.weights)
        self.covnet = semaug.CovNet(Network(self.model).feature_dim)
        self.warm_up(args.warm_up)
        self.head = Network(self.model).head_name

    def warm_up(self, steps: int) -> None:
        model = self.model.to(DEVICE, memory_format=torch.channels_last).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        images, labels = self.images.to(DEVICE, memory_format=torch.channels_last), self.labels.to(DEVICE)
        for step in range(steps):
            chosen = torch.randperm(len(images))[: self.args.half].to(DEVICE)
            batch = images[chosen].flip(3) if step % 2 else images[chosen]
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(model(batch).float(), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == steps - 1:
                print(f"loss after {steps} steps of plain training: {float(loss.detach()):.3f}")

    def run(
        self,
        inspect: Callable[[TrainProblem, dict[str, Tensor], list[Tensor]], None],
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        tf32: bool = False,
        rounded: bool = False,
    ) -> None:
        """Compute a half step up to the meta-gradient.

        Args:
            inspect: Called with the problem, the direction and CovNet's parameters.
            dtype: Precision of parameters and images.
            autocast: Precision of the passes, or None.
            tf32: Whether fp32 products use TF32.
            rounded: Whether the weights are rounded to bf16 first.
        """
        torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        model: nn.Module = copy.deepcopy(self.model)
        if rounded:
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data = parameter.data.bfloat16().float()
        model = model.to(DEVICE, dtype, memory_format=torch.channels_last)
        covnet = copy.deepcopy(self.covnet).to(DEVICE, dtype)
        learner = semaug.LearnableAugmentation(
            model,
            torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9),
            covnet,
            strength=5.0,
            frozen_blocks=self.args.frozen_blocks,
            autocast=autocast,
        )
        images = self.images.to(DEVICE, dtype, memory_format=torch.channels_last)
        labels, half = self.labels.to(DEVICE), self.args.half
        learner.network.prepare(images)
        batch, meta_batch = learner.executor.cut(images[: 2 * half], labels[: 2 * half])
        point, pseudo = learner.algorithm.pseudo_update(batch)
        meta_loss = learner.executor.meta_loss_at(point, meta_batch)
        direction = {name: pseudo.sensitivity[name] * value for name, value in meta_loss.gradient.items()}
        (part,) = batch
        features = widened(part.features.detach())
        loss = TrainLoss(covnet, part.labels, pseudo.strength, features, 0.0)
        problem = TrainProblem(learner.network, part.tape, pseudo.parameters, features, loss, autocast)
        inspect(problem, direction, list(covnet.parameters()))

    def without_head(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(value) if name.startswith(f"{self.head}.") else value
            for name, value in direction.items()
        }

    def both(self, problem: TrainProblem, direction: Mapping[str, Tensor], parameters: list[Tensor]) -> Parts:
        dtype = problem.features.dtype
        cast = {name: value.to(dtype) for name, value in direction.items()}
        return {
            "all": vector(jvp(problem, cast, parameters)),
            "backbone": vector(jvp(problem, self.without_head(cast), parameters)),
        }


def images_of(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    count = 2 * args.half
    if args.data is None:
        return torch.randn(count, 3, args.pixels, args.pixels), torch.arange(count) % args.classes
    from torchvision.transforms import v2

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    change = v2.Compose(
        [
            v2.Resize((args.pixels, args.pixels)),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean, std),
        ]
    )
    from PIL import Image

    per_class = -(-count // args.classes)
    pictures, labels = [], []
    folders = sorted(path for path in args.data.iterdir() if path.is_dir())[: args.classes]
    for label, folder in enumerate(folders):
        for path in sorted(folder.iterdir())[:per_class]:
            with Image.open(path) as image:
                pictures.append(change(image.convert("RGB")))
            labels.append(label)
    order = torch.randperm(len(pictures))[:count]
    return torch.stack(pictures)[order], torch.tensor(labels)[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="torchvision/resnet50")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path, help="folder of class folders")
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--half", type=int, default=64, help="images per half batch")
    parser.add_argument("--frozen-blocks", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    experiment = Experiment(parser.parse_args())

    exact: dict[str, Any] = {}

    def remember(problem: TrainProblem, direction: dict[str, Tensor], parameters: list[Tensor]) -> None:
        exact.update(experiment.both(problem, direction, parameters), direction=direction, features=problem.features)

    experiment.run(remember, torch.float64)
    share = float(exact["backbone"].norm() / exact["all"].norm())
    print(f"norm of the backbone's part relative to the whole: {share:.3f}")
    print(f"{'':52s} {'all':>19s} {'backbone':>19s}")

    def show(title: str, gradient: Parts) -> None:
        cells = []
        for part in ("all", "backbone"):
            cosine = float(F.cosine_similarity(gradient[part], exact[part], dim=0))
            error = float((gradient[part] - exact[part]).norm() / exact[part].norm())
            cells.append(f"{cosine:9.6f} {error:9.2e}")
        print(f"{title:52s} {cells[0]:>19s} {cells[1]:>19s}", flush=True)

    for title, options in {
        "fp32": {},
        "tf32": {"tf32": True},
        "fp64, weights rounded to bf16": {"rounded": True},
    }.items():
        dtype = torch.float64 if "rounded" in options else torch.float32
        experiment.run(lambda *step, title=title: show(title, experiment.both(*step)), dtype, **options)

    low: dict[str, Any] = {}

    def in_half_precision(problem: TrainProblem, direction: dict[str, Tensor], parameters: list[Tensor]) -> None:
        low["direction"] = direction
        show("bf16", experiment.both(problem, direction, parameters))
        without = {name: value.float() for name, value in experiment.without_head(direction).items()}
        twice = {
            "all": vector(double_backward(problem, direction, parameters)),
            "backbone": vector(double_backward(problem, without, parameters)),
        }
        show("bf16, by double backward", twice)
        features = problem.features
        problem.features = exact["features"].float()
        show("bf16 in the tangent pass alone", experiment.both(problem, exact["direction"], parameters))
        problem.features = features
        if not experiment.args.frozen_blocks:
            problem.autocast, problem.tape.late = None, None
            show("bf16 in all but the tangent pass (fp32)", experiment.both(problem, direction, parameters))

    experiment.run(in_half_precision, autocast=torch.bfloat16)

    def with_direction(problem: TrainProblem, _: dict[str, Tensor], parameters: list[Tensor]) -> None:
        show("fp64, the direction alone from bf16", experiment.both(problem, low["direction"], parameters))

    experiment.run(with_direction, torch.float64)


if __name__ == "__main__":
    main()
