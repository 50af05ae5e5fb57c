"""Compare ways to set the strength λ on fixed features: a linear head, trained with the ISDA loss.

    python benchmarks/strength_on_features.py --data photos --weights mobilenet_v2.safetensors

`--data` is a folder of class folders. The network computes the features of the central square of every training photo
once. For each seed, 6 photos of each class are held out, and a head is trained on the others with SGD (momentum 0.9,
cosine decay): with the paper's schedule and several λ0, and with a strength that sets itself and several shares of
log C. The table has the accuracy on the photos held out (mean of the seeds ± standard error), and λ, the training loss
and the training accuracy in the last epoch.
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from semaug.data.layouts import read_folder
from semaug.isda.loss import isda_loss
from semaug.isda.sources import ClassCovariance
from semaug.isda.strength import AutoStrength, Schedule, Strength
from semaug.network.blocks import find_head
from semaug.network.models import build_model, load_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Split = tuple[Tensor, Tensor]


@torch.inference_mode()
def features_of(args: argparse.Namespace) -> Split:
    """Features (N, D) and labels (N,) of the training photos."""
    from torchvision.transforms import v2

    data = read_folder(args.data)
    samples = data.splits["train"]
    model = build_model(args.model, len(data.classes), args.pixels)
    print(load_weights(model, args.weights))
    model.set_submodule(find_head(model)[0], nn.Identity())
    model = model.eval().to(DEVICE, memory_format=torch.channels_last)
    change = v2.Compose(
        [
            v2.CenterCrop(args.pixels),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    features = []
    for start in range(0, len(samples), 32):
        batch = torch.stack([change(samples.load(i)) for i in range(start, min(start + 32, len(samples)))])
        features.append(model(batch.to(DEVICE, memory_format=torch.channels_last)).float())
    return torch.cat(features), torch.tensor(list(samples.labels), device=DEVICE)


def split(features: Tensor, labels: Tensor, seed: int, held_out: int = 6) -> tuple[Split, Split]:
    """Training and validation part, centred and scaled by the mean and the standard deviation of the training part."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    rank = torch.empty_like(labels)
    for label in labels.unique():
        members = order[labels[order] == label]
        rank[members] = torch.arange(len(members), device=labels.device)
    chosen = rank < held_out
    centre, scale = features[~chosen].mean(0), features[~chosen].std()
    scaled = (features - centre) / scale
    return (scaled[~chosen], labels[~chosen]), (scaled[chosen], labels[chosen])


def train(strength: Strength, training: Split, validation: Split, seed: int, args: argparse.Namespace) -> list[float]:
    """Train a head; returns its accuracy on the validation part, and λ, loss and accuracy of the last epoch."""
    features, labels = training
    torch.manual_seed(seed)
    strength = strength.to(DEVICE)
    head = nn.Linear(features.shape[1], int(labels.max()) + 1).to(DEVICE)
    source = ClassCovariance(head.out_features, head.in_features).to(DEVICE)
    source.update(features, labels)  # features are fixed, and so are their variances
    optimizer = torch.optim.SGD(head.parameters(), lr=args.lr, momentum=0.9)
    steps = len(labels) // args.batch_size
    for epoch in range(args.epochs):
        order, sums = torch.randperm(len(labels)).to(DEVICE), torch.zeros(3, dtype=torch.float64, device=DEVICE)
        for step, chosen in enumerate(order[: steps * args.batch_size].split(args.batch_size)):
            progress = (epoch + step / steps) / args.epochs
            strength.set_progress(progress)
            optimizer.param_groups[0]["lr"] = args.lr * (1 + math.cos(math.pi * progress)) / 2
            batch, target = features[chosen], labels[chosen]
            covariance, used = source(batch, target), strength.value.clone()
            loss = isda_loss(batch, target, head.weight, head.bias, covariance, used, validate=False)
            optimizer.zero_grad()
            loss.backward()
            accuracy = (head(batch).argmax(1) == target).double().mean()
            sums += torch.stack([used, loss.detach().double(), 100 * accuracy]) / steps
            strength.observe(batch, target, (head.weight, head.bias), covariance)
            strength.update()
            optimizer.step()
    with torch.no_grad():
        correct = head(validation[0]).argmax(1) == validation[1]
    return [100 * float(correct.double().mean()), *sums.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--model", default="torchvision/mobilenet_v2")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--fixed", type=float, nargs="*", default=[0, 1, 3, 10, 30], help="λ0 of the schedule")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.2, 0.3, 0.4, 0.5], help="shares of log C")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()

    features, labels = features_of(args)
    parts = {seed: split(features, labels, seed) for seed in args.seeds}
    ways = [(f"λ0 = {value:g}", lambda value=value: Schedule(value)) for value in args.fixed]
    ways += [(f"auto, share {value:g}", lambda value=value: AutoStrength(value)) for value in args.shares]
    print(f"{'':16s} {'top-1':>14s} {'λ':>8s} {'loss':>7s} {'trained':>8s}")
    for name, make in ways:
        results = [train(make(), *parts[seed], seed, args) for seed in args.seeds]
        accuracies = [result[0] for result in results]
        error = statistics.stdev(accuracies) / len(results) ** 0.5 if len(results) > 1 else math.nan
        value, loss, trained = (statistics.mean(column) for column in list(zip(*results, strict=True))[1:])
        print(f"{name:16s} {statistics.mean(accuracies):7.2f} ± {error:4.2f} {value:8.2f} {loss:7.3f} {trained:8.2f}")


if __name__ == "__main__":
    main()
