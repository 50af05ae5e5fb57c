"""Graphed against eager training, on a GPU or recorded on a CPU. As a script: every case in turn, PASS or FAIL."""

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import semaug
from semaug import p2p
from semaug.meta.optimizers import load_optimizer_state, make_optimizer, set_learning_rate
from semaug.network.models import SmallNet
from semaug.network.randomness import random_state, set_random_state
from tiny import TinyNet

STEPS, CLASSES, BATCH = 12, 7, 8
PIXELS = {"cuda": 64, "cpu": 16}


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """CuDNN's deterministic algorithms, so that two eager trainings are equal to the bit."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


def tiny(drop: float = 0.0) -> nn.Module:
    return TinyNet(CLASSES, width=16, drop=drop)


def resnet(**options: Any) -> nn.Module:
    return timm.create_model("resnet18", num_classes=CLASSES, **options)


def vit(**options: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=PIXELS["cuda"], num_classes=CLASSES, **options)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"source": lambda network: semaug.Constant(0.0), "strength": 0.0},
    "ISDA": {"source": lambda network: semaug.ClassCovariance(CLASSES, network.feature_dim)},
    "paper": {},
    "pipelined": {"order": "pipelined"},
    "pipelined, nothing frozen": {"order": "pipelined", "frozen_blocks": 0},
    "pipelined, a constant Σ in the real update": {"order": "pipelined", "detach_real": True},
    "paper, interval 3": {"interval": 3, "steps": 20},
    "pipelined, interval 3": {"order": "pipelined", "interval": 3, "steps": 20},
    "paper, interval 4": {"interval": 4, "steps": 26},
    "pipelined, interval 4": {"order": "pipelined", "interval": 4, "steps": 26},
    "ISDA, strength auto": {
        "source": lambda network: semaug.ClassCovariance(CLASSES, network.feature_dim), "strength": "auto",
    },
    "ISDA, class weights": {
        "source": lambda network: semaug.ClassCovariance(CLASSES, network.feature_dim), "strength": "auto",
        "class_weights": torch.arange(1.0, CLASSES + 1) / 4,
    },
    "pipelined, class weights": {"order": "pipelined", "class_weights": torch.arange(1.0, CLASSES + 1) / 4},
    "a learning rate for each parameter": {"order": "pipelined", "optimizer": "adamw", "groups": True},
    "paper, AdamW": {"optimizer": "adamw"},
    "pipelined, AdamW": {"order": "pipelined", "optimizer": "adamw"},
    "paper, weight decay and clipping": {"decay": 1e-2, "clip_norm": 0.5},
    "pipelined, clipping": {"order": "pipelined", "clip_norm": 0.5},
    "strength auto": {"order": "pipelined", "strength": "auto"},
    "paper, micro-batches": {"micro_batch": 3},
    "pipelined, micro-batches": {"order": "pipelined", "micro_batch": 3},
    "two batch shapes": {"order": "pipelined", "sizes": (8, 6), "steps": 20},
    "soft labels": {"soft": True},
    "double backward": {"engine": "double_backward"},
    "joint": {"learner": semaug.JointAugmentation},
    "paper, dropout": {"model": lambda: tiny(0.3)},
    "paper, dropout, nothing frozen": {"model": lambda: tiny(0.3), "frozen_blocks": 0},
    "pipelined, dropout": {"model": lambda: tiny(0.3), "order": "pipelined"},
    "pipelined, dropout, micro-batches": {"model": lambda: tiny(0.3), "order": "pipelined", "micro_batch": 3},
    "pipelined, dropout, interval 3": {
        "model": lambda: tiny(0.3), "order": "pipelined", "interval": 3, "steps": 20,
    },
    "resnet18, drop path": {"model": lambda: resnet(drop_rate=0.2, drop_path_rate=0.2), "frozen_blocks": 4},
    "resnet18, drop path, pipelined": {
        "model": lambda: resnet(drop_rate=0.2, drop_path_rate=0.2), "frozen_blocks": 4, "order": "pipelined",
    },
    "resnet18, bf16, channels last": {
        "model": resnet, "frozen_blocks": 4, "autocast": torch.bfloat16, "channels_last": True, "order": "pipelined",
    },
    "vit, drop path": {"model": lambda: vit(drop_path_rate=0.2), "frozen_blocks": 2, "autocast": torch.bfloat16},
    "vit, attention dropout": {
        "model": lambda: vit(attn_drop_rate=0.2), "frozen_blocks": 0, "optimizer": "adamw", "order": "pipelined",
    },
    "P2P-Net": {"p2p": True, "frozen_blocks": 0, "interval": 2},
    "P2P-Net, pipelined": {"p2p": True, "frozen_blocks": 0, "interval": 2, "order": "pipelined"},
}  # fmt: skip


class Training:
    """A learner, and the batches that it is trained on.

    Args:
        graphs: Whether to use CUDA graphs.
        device: "cuda", or "cpu" for recorded steps in place of graphs.
        options: Those of a case.
    """

    def __init__(self, graphs: bool, device: str = "cuda", **options: Any) -> None:
        self.device = device
        self.options = options = dict(options)
        self.steps, self.sizes = options.pop("steps", STEPS), options.pop("sizes", (BATCH,))
        self.soft, self.channels_last = options.pop("soft", False), options.pop("channels_last", False)
        composite = options.pop("p2p", False)
        torch.manual_seed(0)
        make = options.pop("model", tiny)
        model = p2p.P2PNet(SmallNet(CLASSES), CLASSES) if composite else make()
        model = model.to(device).train()
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        frozen = options.pop("frozen_blocks", 3)
        network = semaug.Network(
            model, frozen, head="head" if composite else None, composite=p2p.composite() if composite else None
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained, "lr": 0.01}]
        if options.pop("groups", False):
            groups = [{"params": [p], "lr": 0.01 * 0.9**n} for n, p in enumerate(trained)]
        decay = options.pop("decay", 0.0)
        if options.pop("optimizer", "sgd") == "sgd":
            self.optimizer = make_optimizer(torch.optim.SGD, groups, momentum=0.9, weight_decay=decay)
        else:
            self.optimizer = make_optimizer(torch.optim.AdamW, groups, weight_decay=0.05)
        source = options.pop("source", lambda network: semaug.CovNet(network.feature_dim))(network).to(device)
        learned, meta = list(source.parameters()), None
        if learned:
            meta = make_optimizer(torch.optim.Adam, [{"params": learned, "lr": 0.01}])
        self.learner = options.pop("learner", semaug.LearnableAugmentation)(
            network, self.optimizer, source, meta, check_values=False, graphs=graphs,
            strength=options.pop("strength", 3.0), **options,
        )  # fmt: skip
        torch.manual_seed(1)

    def run(self, first: int = 0, last: int | None = None) -> list[dict[str, Tensor]]:
        """Take the steps `first` to `last`; returns their metrics."""
        metrics = []
        for step in range(first, self.steps if last is None else last):
            generator = torch.Generator().manual_seed(step)
            size = self.sizes[step % len(self.sizes)]
            pixels = PIXELS[self.device]
            images = torch.randn(size, 3, pixels, pixels, generator=generator).to(self.device)
            if self.channels_last:
                images = images.to(memory_format=torch.channels_last)
            labels = torch.randint(CLASSES, (size,), generator=generator).to(self.device)
            if self.soft:
                labels = 0.9 * nn.functional.one_hot(labels, CLASSES).float() + 0.1 / CLASSES
            self.learner.set_progress(step / self.steps)
            for number, group in enumerate(self.optimizer.param_groups):
                set_learning_rate(group, 0.01 * 0.9**number * (1 - step / self.steps))
            torch.rand(3, device=self.device)  # others draw random numbers too
            metrics.append(self.learner.step(images, labels))
        return metrics

    def state(self) -> dict[str, Any]:
        """Everything that a resumed training needs, on the CPU."""
        content = {
            "model": self.learner.network.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learner": self.learner.state_dict(),
            "random": random_state(torch.device(self.device)),
        }
        copied: dict[str, Any] = pytree.tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), content)
        return copied

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self.learner.network.model.load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.learner.load_state_dict(state["learner"])
        set_random_state(state["random"], torch.device(self.device))

    @property
    def graphs(self) -> int:
        """The number of captured graphs."""
        return self.learner._graphs.captured if self.learner._graphs is not None else 0


def differences(one: Any, other: Any) -> list[str]:
    """Where two structures of tensors and numbers differ by a bit."""
    ours, theirs = (dict(pytree.tree_flatten_with_path(value)[0]) for value in (one, other))
    if ours.keys() != theirs.keys():
        return [f"other names: {sorted(map(str, ours.keys() ^ theirs.keys()))[:4]}"]
    return [
        f"{pytree.keystr(path)}: {_distance(ours[path], theirs[path])}"
        for path in ours
        if not _equal(ours[path], theirs[path])
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def _distance(a: Any, b: Any) -> str:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return f"{float((a.double().cpu() - b.double().cpu()).abs().max()):.3g}"
    return f"{a!r:.60} and {b!r:.60}"


def check_case(name: str, device: str = "cuda") -> None:
    """Check that a case gives the same bits with graphs as without, metrics included."""
    results = []
    for graphs in (False, True):
        training = Training(graphs, device, **CASES[name])
        results.append((training.run(), training.state()))
    assert training.graphs > 0, f"nothing was captured ({training.learner._graphs._obstacle})"
    different = differences(*results)
    if different:
        control = Training(False, device, **CASES[name])
        again = differences(results[0], (control.run(), control.state()))
        raise AssertionError(f"{len(different)} differ: {different[:6]}; eager against eager: {again[:3] or 'equal'}")


def check_resume(name: str, before: bool, after: bool, device: str = "cuda", at: int = 8) -> None:
    """Check that a training interrupted after some steps, with graphs or without, ends with the same bits."""
    whole = Training(False, device, **CASES[name])
    whole.run()
    first = Training(before, device, **CASES[name])
    first.run(last=at)
    state = first.state()
    second = Training(after, device, **CASES[name])
    second.load(state)
    second.run(first=at)
    different = differences(whole.state(), second.state())
    assert not different, f"{len(different)} differ: {different[:6]}"


class Waiting(TinyNet):
    """Its forward pass depends on a value that the host reads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(x.mean()) > -1e9 else 0.0)


class HostRandom(TinyNet):
    """Draws random numbers on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.01 * float(torch.rand(()))))


class NotInCapture(TinyNet):
    """Cannot be captured, which only a capture shows."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            x.mean().item()
        return super().forward(x)


def check_fallback(kind: Callable[..., nn.Module], message: str) -> None:
    """Check that a network that cannot be captured is trained as without graphs, after one warning."""
    options = {"model": lambda: kind(CLASSES, width=16, drop=0.2), "order": "pipelined", "frozen_blocks": 0}
    eager = Training(False, **options)
    expected = eager.run(), eager.state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(True, **options)
        result = training.run(), training.state()
    ours = [str(warning.message) for warning in caught if str(warning.message).startswith("semaug: ")]
    assert len(ours) == 1, ours
    assert message in ours[0], ours
    assert training.graphs == 0
    assert not differences(expected, result), differences(expected, result)[:6]


FALLBACKS = {Waiting: "the host waits", HostRandom: "random numbers on the host", NotInCapture: "could not be captured"}


def check_replays_wait_for_nothing() -> None:
    """Check that the host waits for the GPU in no replay."""
    training = Training(True, order="pipelined", model=lambda: tiny(0.3))
    training.run()
    images = torch.randn(BATCH, 3, PIXELS["cuda"], PIXELS["cuda"], device="cuda")
    labels = torch.randint(CLASSES, (BATCH,), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            training.learner.step(images, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert training.graphs == 1


def check_memory() -> None:
    """Check that graphs take little more memory than eager steps."""
    peaks = []
    for graphs in (False, True):
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        options = {"model": resnet, "frozen_blocks": 4, "sizes": (128,), "steps": 10, "order": "pipelined"}
        training = Training(graphs, **options)
        torch.cuda.reset_peak_memory_stats()
        training.run()
        peaks.append(torch.cuda.max_memory_reserved() - held)
        del training
    assert peaks[1] <= 1.25 * peaks[0], [f"{peak / 2**20:.0f} MiB" for peak in peaks]


def main() -> int:
    """Run all checks, or those whose name has one of the arguments in it."""
    checks: dict[str, Callable[[], None]] = {name: lambda name=name: check_case(name) for name in CASES}
    for before in (False, True):
        for after in (False, True):
            for name in ("pipelined", "pipelined, dropout", "pipelined, AdamW"):
                title = f"resume, {name}, graphs {before} then {after}"
                checks[title] = lambda n=name, b=before, a=after: check_resume(n, b, a)
    checks["replays wait for nothing"] = check_replays_wait_for_nothing
    checks["memory"] = check_memory
    # A failed capture leaves torch in the worst state, so it comes last.
    checks |= {f"fallback, {k.__name__}": lambda k=k, m=m: check_fallback(k, m) for k, m in FALLBACKS.items()}
    failed = []
    for name, check in checks.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        started = time.perf_counter()
        try:
            with repeatable():
                check()
        except Exception:
            failed.append(name)
            print(f"FAIL {name}\n{traceback.format_exc(limit=-6)}", flush=True)
        else:
            print(f"PASS {name} ({time.perf_counter() - started:.1f} s)", flush=True)
    print(f"{len(failed)} failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
