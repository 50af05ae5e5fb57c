"""Short trainings that every number of processes must make alike."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import semaug
from semaug.inference.classifier import as_composite
from semaug.network.models import build_model
from semaug.network.network import Network
from semaug.training.methods import Augmentation, make_learner, parameter_groups
from semaug.util import distributed

CLASSES, WIDTH = 4, 4
DEVICE = "cpu"


class Net(nn.Module):
    """Stem, two residual blocks, pooling, head."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, stride=2, bias=False), norm(WIDTH), nn.ReLU(inplace=True))
        self.convolutions = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.Identity(), norm(WIDTH)])  # few: ranks that share a core take turns at each
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(x + norm(convolution(x)), inplace=True)
        return self.fc(x.mean((2, 3)))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda width: nn.GroupNorm(2, width),
    "batch": nn.BatchNorm2d,
    "torch's sync": nn.SyncBatchNorm,
}
SOURCES: dict[str, Callable[[], semaug.Source]] = {
    "constant": lambda: semaug.Constant(0.5),
    "class-wise": lambda: semaug.ClassCovariance(CLASSES, WIDTH),
    "class-wise full": lambda: semaug.ClassCovariance(CLASSES, WIDTH, "full"),
    "covnet": lambda: semaug.CovNet(WIDTH, width=3),
    "fixed trace": lambda: semaug.CovNet(WIDTH, width=3, fixed_trace=0.5),
}


@dataclass
class Case:
    norm: str = "group"
    source: str = "covnet"
    options: Mapping[str, Any] = field(default_factory=dict)
    sgd: Mapping[str, Any] = field(default_factory=lambda: {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01})
    adam: bool = False
    frozen: int = 1
    joint: bool = False
    soft: bool = False
    half_steps: int = 6
    sizes: tuple[int, ...] = (17, 18, 19, 23, 20, 16)  # of the global batches, in turn


def cases() -> dict[str, Case]:
    """Both kinds of network, every source, both orders, two intervals."""
    return {
        f"{norm} norm, {source}, {order}, interval {interval}": Case(
            norm,
            source,
            {"order": order, "interval": interval, "sync_batch_norm": norm == "batch"},
            half_steps=12,
        )
        for norm in ("group", "batch")
        for source in SOURCES
        for order in ("paper", "pipelined")
        for interval in ((1, 3) if source not in ("constant", "class-wise", "class-wise full") else (1,))
    }


def variants() -> dict[str, Case]:
    """Every option; two processes show what there is to see."""
    found = {}
    for name, options in {
        "clipped": {"clip_norm": 0.3},
        "smoothed": {"label_smoothing": 0.1},
        "detached": {"detach_real": True},
        "double backward": {"engine": "double_backward"},
    }.items():
        for norm, order in (("group", "paper"), ("group", "pipelined"), ("batch", "paper")):
            given = {**options, "order": order, "sync_batch_norm": norm == "batch"}
            found[f"{name}, {norm} norm, {order}"] = Case(norm, options=given)
    found["micro-batches"] = Case(options={"micro_batch": 3})
    found["micro-batches, pipelined"] = Case(options={"micro_batch": 3, "order": "pipelined"})
    found["adam"] = Case(adam=True, options={"order": "pipelined"})
    found["nothing frozen"] = Case("batch", options={"sync_batch_norm": True}, frozen=0)
    found["joint"] = Case(joint=True)
    found["joint, batch norm"] = Case("batch", options={"sync_batch_norm": True}, joint=True)
    found["torch's SyncBatchNorm"] = Case("torch's sync")
    found["torch's SyncBatchNorm, pipelined"] = Case("torch's sync", options={"order": "pipelined"})
    found["soft labels"] = Case(soft=True)
    return found


def cases_for(processes: int) -> dict[str, Case]:
    """All cases for two processes. For four, which take turns on few cores, no variants."""
    return cases() | (variants() if processes == 2 else {})


def learner_of(case: Case) -> semaug.LearnableAugmentation:
    torch.manual_seed(0)
    model, source = (made.to(DEVICE, torch.float64) for made in (Net(NORMS[case.norm]), SOURCES[case.source]()))
    network = Network(
        model,
        case.frozen,
        blocks=["stem", "convolutions.0", "convolutions.1"],
        sync_batch_norm=case.options.get("sync_batch_norm", False),
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **case.sgd)
    if case.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    learned = list(source.parameters())
    meta_optimizer = torch.optim.SGD(learned, lr=1.0, momentum=0.9) if learned else None
    kind = semaug.JointAugmentation if case.joint else semaug.LearnableAugmentation
    return kind(network, optimizer, source, meta_optimizer, strength=4.0, **case.options)


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Global batches: images and labels."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for step in range(case.half_steps // 2):
        size = case.sizes[step % len(case.sizes)]
        images = torch.randn(size, 3, 7, 7, dtype=torch.float64, generator=generator)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        found.append((images.to(DEVICE), labels.to(DEVICE)))
    return found


def trained(case: Case) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Parameters and buffers of f and g, and the sums of metrics, after all half steps."""
    learner = learner_of(case)
    totals: dict[str, float] = {}
    for images, labels in batches(case):
        targets = F.one_hot(labels, CLASSES).double() * 0.8 + 0.05 if case.soft else labels
        for name, value in learner.step(distributed.shard(images), distributed.shard(targets)).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return state_of(learner), totals


def state_of(learner: semaug.LearnableAugmentation) -> dict[str, Tensor]:
    return {**learner.network.model.state_dict(), **{f"g.{k}": v for k, v in learner.source.state_dict().items()}}


LOCAL = Case(options={"pseudo": "local"})
OWN_STATISTICS = Case("batch", half_steps=4)


def own_statistics() -> dict[str, Any]:
    """BatchNorm with the images of each rank: all of the network's state, before and after averaging its buffers."""
    learner = learner_of(OWN_STATISTICS)
    for images, labels in batches(OWN_STATISTICS):
        learner.step(distributed.shard(images), distributed.shard(labels))
    before = {key: value.clone() for key, value in state_of(learner).items()}
    distributed.average_buffers_(learner.network.model)
    return {"before": before, "after": state_of(learner)}


def overflowing() -> dict[str, Any]:
    """Half precision with a loss scale at which the gradients of the last rank alone overflow in the first steps."""
    torch.manual_seed(0)
    model = Net(NORMS["group"])
    learner = semaug.LearnableAugmentation(
        Network(model, blocks=["stem", "convolutions.0", "convolutions.1"]),
        torch.optim.SGD(model.parameters(), lr=0.01),
        strength=4.0,
        order="pipelined",
        autocast=torch.float16,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14),
    )
    scales, finite = [], []
    for images, labels in batches(Case(half_steps=12)):
        own, own_labels = distributed.shard(images).float(), distributed.shard(labels)
        last = distributed.rank() == distributed.world_size() - 1
        learner.step(own * (300.0 if last else 1e-3), own_labels)
        scales.append(learner.executor.mixed.scaler.get_scale())
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
    return {"state": state_of(learner), "scales": scales, "finite": finite}


def traffic_cases() -> dict[str, Case]:
    """Cases whose messages are counted."""
    found = {}
    for order, pseudo, interval, source, norm in (
        ("paper", "global", 1, "covnet", "group"),
        ("pipelined", "global", 3, "covnet", "group"),
        ("paper", "global", 1, "class-wise", "group"),
        ("paper", "local", 3, "covnet", "group"),
        ("paper", "global", 3, "covnet", "batch"),
        ("pipelined", "global", 1, "covnet", "batch"),
        ("paper", "global", 1, "covnet", "batch"),
        ("paper", "local", 1, "covnet", "group"),
        ("pipelined", "global", 1, "class-wise", "group"),
    ):
        options = {"order": order, "interval": interval, "pseudo": pseudo, "sync_batch_norm": norm == "batch"}
        found[f"{order}, interval {interval}, {pseudo}, {source}, {norm} norm"] = Case(norm, source, options)
    return found


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the bytes that this process hands to each collective operation of torch."""
    sent = {"all_reduce": 0, "all_gather": 0}
    own_argument = {"all_reduce": 0, "all_gather": 1}

    def counted(name: str) -> Callable[..., Any]:
        operation = getattr(dist, name)

        def run(*arguments: Any) -> Any:
            sent[name] += arguments[own_argument[name]].nbytes
            return operation(*arguments)

        return run

    with patch.multiple(dist, **{name: counted(name) for name in sent}):
        yield sent


def bytes_sent(case: Case) -> tuple[int, int]:
    """Bytes that a rank hands to sums, and to be gathered, in all half steps."""
    learner = learner_of(case)
    with counting() as sent:
        for images, labels in batches(case):
            learner.step(distributed.shard(images), distributed.shard(labels))
    return sent["all_reduce"], sent["all_gather"]


P2P_ORDERS = ("paper", "pipelined")


def trained_p2p(order: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A P2P-Net, with its BatchNorm over all ranks and without dropout, after two half steps of the whole loop."""
    torch.manual_seed(0)
    model = as_composite("p2p", build_model("small", CLASSES, 64), CLASSES).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(parameter_groups(model, 0.002), momentum=0.9, weight_decay=5e-4)
    settings = Augmentation(order=order, interval=1, meta_lr=10.0, strength=5.0)
    learner = make_learner("p2p+learnable", settings, model, optimizer, sync_batch_norm=True)
    learner.source.double()
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(9, 3, 64, 64, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (9,), generator=generator)
    metrics = learner.step(distributed.shard(images), distributed.shard(labels))
    return state_of(learner), {name: float(value) for name, value in metrics.items()}


def main(folder: Path) -> None:
    """In one of several processes: write the results of each case to RANK.pt in the folder."""
    distributed.initialize("cpu")
    found = {
        "cases": {name: trained(case) for name, case in cases_for(distributed.world_size()).items()},
        "local": trained(LOCAL),
        "own statistics": own_statistics(),
        "overflowing": overflowing(),
        "traffic": {name: bytes_sent(case) for name, case in traffic_cases().items()},
        "p2p": {order: trained_p2p(order) for order in P2P_ORDERS} if distributed.world_size() == 2 else {},
    }
    torch.save(found, folder / f"{distributed.rank()}.pt")
    distributed.shut_down()


def class_statistics(folder: Path) -> None:
    """In one of two processes: class-wise statistics of every second batch of batches.pt in the folder."""
    distributed.initialize("cpu")
    sources = {form: semaug.ClassCovariance(4, 3, form).double() for form in ("diagonal", "full")}
    sources |= {
        name: semaug.ClassCovariance(4, 3, sharing=name).double() for name in ("pooled", "shrunk", "neighbours")
    }
    for features, labels in torch.load(folder / "batches.pt")[distributed.rank() :: 2]:
        for source in sources.values():
            source.update(features, labels)
    covariances = {name: {"covariance": source.covariance()} for name, source in sources.items()}
    states = {name: source.state_dict() for name, source in sources.items()}
    torch.save(covariances | states, folder / f"{distributed.rank()}.pt")
    distributed.shut_down()
