"""The meta loop against a literal transcription of Algorithm 1, and its promises to the caller."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import semaug
from algorithm1 import Literal, Released
from semaug.meta.updates import MicroBatch
from semaug.network.network import Network
from semaug.training.optimization import layer_groups
from tiny import TINY_BLOCKS, TinyNet, batches


class VarianceNet(nn.Module):
    """The default CovNet as a plain module: features → variances."""

    def __init__(self, covnet: semaug.CovNet) -> None:
        super().__init__()
        self.layers = nn.Sequential(*copy.deepcopy(covnet.layers.hidden), copy.deepcopy(covnet.layers.output))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).sigmoid()


def pair(
    frozen: int | str, order: str, sgd: dict[str, Any], **options: Any
) -> tuple[semaug.LearnableAugmentation, Literal]:
    """A learner and its literal counterpart, with equal weights."""
    model = TinyNet().double()
    other = copy.deepcopy(model)
    covnet = semaug.CovNet(6, width=5).double()
    network = Network(model, frozen_blocks=frozen, blocks=TINY_BLOCKS)
    count = 0 if frozen == "stem" else frozen
    early = [block + "." for block in TINY_BLOCKS[: count + 1]] if frozen else []
    late = [name for name, _ in model.named_parameters() if not any(name.startswith(prefix) for prefix in early)]
    literal = Literal(
        other,
        "fc",
        VarianceNet(covnet),
        late,
        lr=0.2,
        meta_lr=3.0,
        strength=4.0,
        momentum=sgd.get("momentum", 0.0),
        nesterov=sgd.get("nesterov", False),
        weight_decay=sgd.get("weight_decay", 0.0),
        detach_real=options.get("detach_real", False),
        clip=options.get("clip_norm"),
        interval=options.get("interval", 1),
    )
    learner = semaug.LearnableAugmentation(
        network,
        torch.optim.SGD(model.parameters(), lr=0.2, **sgd),
        covnet,
        torch.optim.SGD(covnet.parameters(), lr=3.0),
        strength=4.0,
        order=order,
        **options,
    )
    return learner, literal


def assert_same(learner: semaug.LearnableAugmentation, literal: Literal) -> None:
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(learner.network.model.state_dict(), literal.model.state_dict(), **close)
    for mine, theirs in zip(learner.source.parameters(), literal.covnet.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    for name, parameter in learner.network.model.named_parameters():
        buffer = learner.optimizer.state[parameter].get("momentum_buffer")
        if buffer is not None:
            torch.testing.assert_close(buffer, literal.buffers[name], **close)


SGD_RULES = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]
VARIANTS = [
    {},
    {"engine": "double_backward"},
    {"detach_real": True},
    {"interval": 3},
    {"interval": 2},
    {"interval": 4},
    {"clip_norm": 0.5},
]
CASES = [(2, rule, {}) for rule in SGD_RULES] + [(0, SGD_RULES[2], variant) for variant in VARIANTS]
CASES += [("stem", SGD_RULES[1], {})]


@pytest.mark.parametrize(("frozen", "sgd", "options"), CASES)
def test_ten_half_steps_equal_algorithm_1(frozen: int | str, sgd: dict[str, Any], options: dict[str, Any]) -> None:
    learner, literal = pair(frozen, "paper", sgd, **options)
    initial = copy.deepcopy(learner.source.state_dict())
    torch.manual_seed(3)
    for images, labels in batches(5):
        learner.step(images, labels)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for images, labels in batches(5):
        halves = list(zip(images.chunk(2), labels.chunk(2), strict=True))
        literal.paper_half_step(*halves[0], *halves[1])
        literal.paper_half_step(*halves[1], *halves[0])
    assert_same(learner, literal)
    assert torch.equal(torch.get_rng_state(), after)
    moved = max(float((value - initial[name]).abs().max()) for name, value in learner.source.state_dict().items())
    assert moved > 1e-4, "CovNet hardly moved, so the comparison would show little"


@pytest.mark.parametrize(("frozen", "sgd", "options"), CASES)
def test_ten_pipelined_half_steps_equal_their_transcription(
    frozen: int | str, sgd: dict[str, Any], options: dict[str, Any]
) -> None:
    learner, literal = pair(frozen, "pipelined", sgd, **options)
    torch.manual_seed(3)
    for images, labels in batches(5):
        learner.step(images, labels)
    torch.manual_seed(3)
    for images, labels in batches(5):
        for half, half_labels in zip(images.chunk(2), labels.chunk(2), strict=True):
            literal.pipelined_half_step(half, half_labels)
    assert_same(learner, literal)


class AdamWithGroups(Literal):
    """Algorithm 1 with AdamW, written out, and a rate and weight decay for each parameter."""

    groups: dict[str, tuple[float, float]]
    eps = 1e-3

    def sgd(self, name: str, value: Tensor, gradient: Tensor, keep: bool) -> Tensor:
        rate, decay = self.groups[name]
        count, first, second = self.buffers.get(name, (0, 0.0, 0.0))
        count, first, second = count + 1, 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        if keep:
            self.buffers[name] = (count, first.detach(), second.detach())
        root = (second / (1 - 0.999**count) + 1e-300).sqrt()
        value = value.detach() * (1 - rate * decay)
        return value - rate * first / (1 - 0.9**count) / (root + self.eps)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_the_meta_loop_follows_adamw_with_layer_decay(order: Any) -> None:
    model, covnet = TinyNet().double(), semaug.CovNet(6, width=5).double()
    groups = layer_groups(model, 0.05, 0.1, 0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    literal = AdamWithGroups(
        TinyNet().double(), "fc", VarianceNet(covnet), list(names.values()), lr=0, meta_lr=3.0, strength=4.0
    )
    literal.model.load_state_dict(model.state_dict())
    literal.groups = {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(set(literal.groups.values())) == 10
    learner = semaug.LearnableAugmentation(
        Network(model, blocks=TINY_BLOCKS), torch.optim.AdamW(groups, eps=literal.eps), covnet,
        torch.optim.SGD(covnet.parameters(), lr=3.0), strength=4.0, order=order,
    )  # fmt: skip
    before = covnet.layers.output.weight.detach().clone()
    torch.manual_seed(3)
    for images, labels in batches(3):
        learner.step(images, labels)
    torch.manual_seed(3)
    for images, labels in batches(3):
        first, second = zip(images.chunk(2), labels.chunk(2), strict=True)
        for half, other in ((first, second), (second, first)):
            if order == "paper":
                literal.paper_half_step(*half, *other)
            else:
                literal.pipelined_half_step(*half)
    assert_same(learner, literal)
    assert float((covnet.layers.output.weight.detach() - before).abs().max()) > 1e-4


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_class_weights_multiply_both_losses(order: str) -> None:
    """Twice the losses and half the learning rates are the same steps; with other weights both engines agree."""

    def trained(weights: list[float], factor: float = 1.0, engine: str = "jvp") -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        learner, _ = pair(0, order, {}, engine=engine, class_weights=torch.tensor(weights))
        assert learner.meta_optimizer is not None
        for optimizer in (learner.optimizer, learner.meta_optimizer):
            optimizer.param_groups[0]["lr"] *= factor
        for images, labels in batches(3):
            learner.step(images, labels)
        return [learner.network.model.state_dict(), learner.source.state_dict()]

    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(trained([2.0] * 4, 0.5), trained([1.0] * 4), **close)
    uneven = [0.5, 3.0, 0.0, 2.0]
    torch.testing.assert_close(trained(uneven), trained(uneven, engine="double_backward"), **close)
    assert not torch.allclose(trained(uneven)[0]["fc.weight"], trained([1.0] * 4)[0]["fc.weight"])


def test_a_step_with_class_weights_follows_the_weighted_cross_entropy() -> None:
    model = TinyNet().double()
    expected, weights = copy.deepcopy(model), torch.tensor([0.5, 3.0, 0.0, 2.0], dtype=torch.float64)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    options: dict[str, Any] = {"strength": 0.0, "class_weights": weights}
    learner = semaug.LearnableAugmentation(model, optimizers[0], semaug.Constant(0.0), **options)
    [(images, labels)] = batches(1)
    torch.manual_seed(3)
    learner.step(images, labels)
    torch.manual_seed(3)
    for half, half_labels in zip(images.chunk(2), labels.chunk(2), strict=True):
        losses = nn.functional.cross_entropy(expected(half), half_labels, reduction="none")
        optimizers[1].zero_grad()
        (weights[half_labels] * losses).mean().backward()
        optimizers[1].step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="need 4 class_weights"):
        semaug.LearnableAugmentation(model, optimizers[0], class_weights=torch.ones(5))


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("interval", [1, 2, 3, 4, 9, 10, 100])
def test_both_halves_of_batches_train_covnet_in_turn(order: str, interval: int) -> None:
    """In one of `interval` half steps on average, and with few kinds of steps, each of which needs a CUDA graph."""
    learner, _ = pair(0, order, {}, interval=interval)
    algorithm, steps, kinds = learner.algorithm, [], set()
    for algorithm.half_steps in range(0, 4 * interval, 2):
        kind = tuple(algorithm.is_differentiated(later) for later in (0, 1))
        kinds.add(kind)
        steps += kind
    chosen = [half_step for half_step, differentiated in enumerate(steps) if differentiated]
    assert len(chosen) == 4
    assert [half_step % 2 for half_step in chosen] in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert len(kinds) <= 3


def test_eight_half_steps_of_resnet_18_equal_the_authors_released_code() -> None:
    """Four epochs of one batch: a warm-up with λ = 0, then the cosine with λ = λ0/4, λ0/2 and 3/4 λ0."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=5, channels=(16, 32, 64, 128)).double()
    covnet = semaug.CovNet(128).double()
    settings = {"lr": 0.03, "meta_lr": 1.0, "strength": 10.0, "epochs": 4, "warmup_epochs": 1, "batches": 1}
    released = Released(copy.deepcopy(model), "fc", VarianceNet(covnet), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    meta_optimizer = torch.optim.SGD(covnet.parameters(), lr=1.0)
    learner = semaug.LearnableAugmentation(model, optimizer, covnet, meta_optimizer, strength=10.0, frozen_blocks=0)
    start = copy.deepcopy((model.state_dict(), covnet.state_dict()))
    for epoch, (images, labels) in enumerate(batches(4, classes=5, pixels=40)):
        released.train_batch(epoch, 0, images, labels)
        for group, rate in ((optimizer.param_groups[0], 0.03), (meta_optimizer.param_groups[0], 1.0)):
            group["lr"] = rate * released.rate_factor(epoch, 0)
        learner.set_progress(epoch / 4)
        learner.step(images, labels)

    def largest(ours: dict[str, Tensor], theirs: list[Tensor]) -> float:
        return max(float((a - b).detach().abs().max()) for a, b in zip(ours.values(), theirs, strict=True))

    ours = dict(model.named_parameters()), dict(covnet.named_parameters())
    theirs = list(released.model.parameters()), list(released.covnet.parameters())
    differences = [largest(a, b) for a, b in zip(ours, theirs, strict=True)]
    moved = [largest(a, [old[name] for name in a]) for a, old in zip(ours, start, strict=True)]
    print(f"network differs by {differences[0]:.1e}, moved by {moved[0]:.1e}; "
          f"CovNet by {differences[1]:.1e}, moved by {moved[1]:.1e}")  # fmt: skip
    assert moved[0] > 0.01
    assert moved[1] > 1e-4
    assert differences[0] < 1e-11
    assert differences[1] < 1e-13
    torch.testing.assert_close(dict(model.named_buffers()), dict(released.model.named_buffers()), rtol=1e-9, atol=1e-11)


def test_both_engines_leave_the_same_random_numbers_to_the_caller() -> None:
    states = []
    for engine in ("jvp", "double_backward"):
        torch.manual_seed(0)
        learner, _ = pair(1, "paper", {}, engine=engine)
        torch.manual_seed(5)
        learner.step(*batches(1)[0])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_batchnorm_statistics_move_once_per_half_step(order: str) -> None:
    learner, _ = pair(1, order, {})
    for steps, (images, labels) in enumerate(batches(3), start=1):
        learner.step(images, labels)
        counts = {int(v) for n, v in learner.network.model.state_dict().items() if n.endswith("num_batches_tracked")}
        assert counts == {2 * steps}


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_layers_converted_to_torchs_sync_batch_norm_train_like_batch_norm(order: Any) -> None:
    states = []
    for convert in (nn.SyncBatchNorm.convert_sync_batchnorm, lambda model: model):
        torch.manual_seed(0)
        model = convert(TinyNet().double())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        learner = semaug.LearnableAugmentation(model, sgd, semaug.CovNet(6).double(), order=order, strength=10.0)
        for images, labels in batches(2):
            learner.step(images, labels)
        states.append({**model.state_dict(), **learner.source.state_dict()})
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_pseudo_update_touches_neither_parameters_nor_optimiser() -> None:
    learner, _ = pair(1, "paper", {"momentum": 0.9})
    images, labels = batches(1)[0]
    learner.step(images, labels)
    batch, meta_batch = [MicroBatch(images[:4], labels[:4])], [MicroBatch(images[4:], labels[4:])]
    learner.executor.meta_loss(batch)  # the pass that the real update shares moves BatchNorm's statistics
    before = copy.deepcopy((learner.network.model.state_dict(), learner.optimizer.state_dict()))
    point, pseudo = learner.algorithm.pseudo_update(batch)
    learner.algorithm.meta_update(pseudo, learner.executor.meta_loss_at(point, meta_batch), detach=True)
    after = (learner.network.model.state_dict(), learner.optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(("order", "forwards"), [("paper", 2), ("pipelined", 1)])
def test_each_half_batch_goes_forward_as_often_as_promised(order: str, forwards: int) -> None:
    learner, _ = pair(0, order, {})
    learner.step(*batches(1)[0])  # the first step looks at the model
    counts = {"ordinary": 0, "tangent": 0}

    def count(module: nn.Module, args: Any, output: Any) -> None:
        counts["tangent" if forward_ad._current_level >= 0 else "ordinary"] += 1

    learner.network.model.stem[0].register_forward_hook(count)
    for images, labels in batches(3):
        learner.step(images, labels)
    assert counts == {"ordinary": 2 * forwards * 3, "tangent": 2 * 3}


class Watched(torch.autograd.Function):
    """Doubles its input, and notes whether its backward pass was itself being recorded for differentiation."""

    second_order = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Watched.second_order |= torch.is_grad_enabled()
        return 2 * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent


class WatchedNet(TinyNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(Watched.apply(self.blocks(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize(("engine", "second_order"), [("jvp", False), ("double_backward", True)])
def test_only_double_backward_has_a_second_order_graph_through_the_backbone(
    order: str, engine: str, second_order: bool
) -> None:
    Watched.second_order = False
    model, covnet = WatchedNet().double(), semaug.CovNet(6).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = semaug.LearnableAugmentation(
        model, optimizer, covnet, order=order, engine=engine, strength=10.0, frozen_blocks=0
    )
    assert "meta_loss" in learner.step(*batches(1)[0])
    assert Watched.second_order == second_order


class NoForwardFormula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class SineNet(TinyNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(NoForwardFormula.apply(self.blocks(self.stem(x)).mean((2, 3))))


def test_operator_without_forward_formula_falls_back_with_a_warning_that_names_it() -> None:
    results = []
    for engine in ("jvp", "double_backward"):
        torch.manual_seed(0)
        model, covnet = SineNet().double(), semaug.CovNet(6).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        learner = semaug.LearnableAugmentation(model, optimizer, covnet, engine=engine, strength=10.0, frozen_blocks=0)
        if engine == "jvp":
            with pytest.warns(UserWarning, match="NoForwardFormula has no forward-mode formula"):
                learner.step(*batches(1)[0])
        else:
            learner.step(*batches(1)[0])
        results.append(covnet.state_dict())
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


class Plain(nn.Module):
    """Four layers, of which some may be checkpointed, and a scale that may be a constant."""

    def __init__(self, checkpointed: slice = slice(0, 0), scaled: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 6), *[nn.Linear(6, 6) for _ in range(3)]])
        self.fc = nn.Linear(6, 4)
        self.checkpointed, self.scaled = checkpointed, scaled

    def forward(self, images: Tensor) -> Tensor:
        features = images.flatten(1)
        span = range(4)[self.checkpointed]
        for layer in self.layers[: span.start]:
            features = layer(features).tanh()
        if span:
            features = checkpoint(self.inside, features, span, use_reentrant=False)
        for layer in self.layers[span.stop :]:
            features = layer(features).tanh()
        if self.scaled:
            with torch.no_grad():
                scale = features.norm(dim=1, keepdim=True)
            features = features / scale
        return self.fc(features)

    def inside(self, features: Tensor, span: range) -> Tensor:
        for place in span:
            features = self.layers[place](features).tanh()
        return features


def trained(model: nn.Module, **options: Any) -> list[Tensor]:
    """The parameters of model and CovNet after three batches, always from the same start."""
    torch.manual_seed(0)
    for parameter, start in zip(model.parameters(), Plain().parameters(), strict=True):
        parameter.data.copy_(start)
    covnet = semaug.CovNet(6)
    model, covnet = model.double(), covnet.double()
    optimizers = torch.optim.SGD(model.parameters(), lr=0.2), torch.optim.SGD(covnet.parameters(), lr=50.0)
    learner = semaug.LearnableAugmentation(model, optimizers[0], covnet, optimizers[1], strength=5.0, **options)
    for batch in batches(3, pixels=2):
        learner.step(*batch)
    return [*covnet.parameters(), *model.parameters()]


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("engine", ["jvp", "double_backward"])
@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_gradient_checkpointing_changes_nothing(order: str, engine: str, frozen: int) -> None:
    options = {"order": order, "engine": engine, "frozen_blocks": frozen}
    expected = trained(Plain(), **options)
    for span in (slice(2, 4), slice(1, 3)):  # late layers, and early and late ones together
        torch.testing.assert_close(trained(Plain(span), **options), expected, rtol=1e-10, atol=1e-12)


class Chosen(nn.Module):
    """A layer that chooses its `forward` when it is made, as in timm's FasterNet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.forward = self.chosen

    def chosen(self, features: Tensor) -> Tensor:
        return self.linear(features)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_a_method_that_a_module_chose_as_its_forward_runs_at_other_parameters(order: str) -> None:
    model = Plain()
    model.layers[2] = Chosen()
    chosen, plain = trained(model, order=order, frozen_blocks=0), trained(Plain(), order=order, frozen_blocks=0)
    torch.testing.assert_close(chosen, plain, rtol=1e-12, atol=0)


def test_what_the_network_computes_without_gradients_is_a_constant_in_the_meta_gradient_too() -> None:
    """Forward mode does not know torch.no_grad inside the network."""
    expected = trained(Plain(scaled=True), engine="double_backward", frozen_blocks=0)
    with pytest.warns(UserWarning, match="Plain uses torch.no_grad inside, which forward mode ignores; double backw"):
        result = trained(Plain(scaled=True), engine="jvp", frozen_blocks=0)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_joint_training_drives_the_variance_to_zero_and_the_meta_loop_does_not() -> None:
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(4, 3, 9, 9, dtype=torch.float64, generator=generator)
    means = {}
    for method in (semaug.JointAugmentation, semaug.LearnableAugmentation):
        torch.manual_seed(0)
        model, covnet = TinyNet(drop=0.0).double(), semaug.CovNet(6).double()
        learner = method(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            covnet,
            torch.optim.SGD(covnet.parameters(), lr=2.0),
            strength=5.0,
        )
        for images, labels in batches(60, size=16):
            metrics = learner.step(prototypes[labels] + 2 * images, labels)
        means[method] = float(metrics["variance_mean"])
    assert means[semaug.JointAugmentation] < 0.02
    assert means[semaug.LearnableAugmentation] > 0.4


@pytest.mark.parametrize(
    "source",
    [
        lambda: semaug.Constant(0.5),
        lambda: semaug.ClassCovariance(4, 6),
        lambda: semaug.ClassCovariance(4, 6, "full"),
        lambda: semaug.ClassCovariance(4, 6, sharing="neighbours"),
        lambda: semaug.CovNet(6, fixed_trace=0.5),
        lambda: semaug.CovNet(6, activation="softplus"),
        lambda: semaug.CovNet(6),
    ],
)
@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_every_source_trains_in_both_orders_with_equal_engines(source: Any, order: str) -> None:
    states = []
    for engine in ("jvp", "double_backward"):
        torch.manual_seed(0)
        model, covariance = TinyNet().double(), source().double()
        learner = semaug.LearnableAugmentation(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            covariance,
            torch.optim.Adam(covariance.parameters(), lr=0.01) if list(covariance.parameters()) else None,
            strength=3.0,
            frozen_blocks=0,
            order=order,
            engine=engine,
        )
        torch.manual_seed(1)
        for images, labels in batches(3):
            metrics = learner.step(images, labels)
        assert all(value.isfinite() for value in metrics.values())
        assert ("meta_loss" in metrics) == bool(list(covariance.parameters()))
        states.append({**model.state_dict(), **covariance.state_dict()})
    torch.testing.assert_close(*states, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_training_resumes_exactly_from_a_saved_state(order: str) -> None:
    data = batches(4)
    learner, _ = pair(1, order, {"momentum": 0.9})
    torch.manual_seed(1)
    for images, labels in data[:2]:
        learner.step(images, labels)
    file = io.BytesIO()
    states = (learner.network.model, learner.optimizer, learner)
    torch.save([part.state_dict() for part in states], file)
    random_state = torch.get_rng_state()
    for images, labels in data[2:]:
        learner.step(images, labels)

    resumed, _ = pair(1, order, {"momentum": 0.9})
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for part, state in zip((resumed.network.model, resumed.optimizer, resumed), saved, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random_state)
    for images, labels in data[2:]:
        metrics = resumed.step(images, labels)
    torch.testing.assert_close(resumed.network.model.state_dict(), learner.network.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(resumed.source.state_dict(), learner.source.state_dict(), rtol=0, atol=0)
    assert metrics["drift"] > 0


def test_diagnostics_are_what_they_say() -> None:
    learner, _ = pair(0, "paper", {}, interval=100)
    learner.network.model.eval()  # no dropout, no batch statistics: the numbers can be computed from outside
    images, labels = batches(1, size=2)[0]
    model, covnet = copy.deepcopy(learner.network.model), copy.deepcopy(learner.source)
    learner.optimizer.param_groups[0]["lr"] = 0.0
    metrics = learner.step(images, labels)
    features = model.blocks(model.stem(images)).mean((2, 3))
    variance = covnet(features, labels).diagonal()
    losses = semaug.isda_loss(
        features, labels, model.fc.weight, model.fc.bias, semaug.Diagonal(variance), 4.0, reduction="none"
    )
    plain = nn.functional.cross_entropy(model.fc(features), labels, reduction="none")
    # Step 0 also moved CovNet, by a meta-gradient of 0 at lr 0, so both half steps saw the same networks.
    torch.testing.assert_close(metrics["train_loss"], losses.mean())
    torch.testing.assert_close(metrics["augmentation_share"], (1 - plain / losses).mean())
    torch.testing.assert_close(metrics["variance_mean"], variance.mean())
    torch.testing.assert_close(metrics["variance_std_dims"], variance.std(1, correction=0).mean())
    assert metrics["accuracy"] == (model.fc(features).argmax(1) == labels).double().mean()
    assert metrics["drift"] == 0


def test_strength_grows_with_progress() -> None:
    learner, _ = pair(0, "paper", {})
    assert learner.strength == 4.0
    learner.set_progress(0.25)
    assert learner.strength == 1.0
    with pytest.raises(ValueError, match="step"):
        learner.set_progress(1.5)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_odd_batches_are_cut_as_evenly_as_can_be_and_single_images_refused(order: str) -> None:
    learner, _ = pair(0, order, {})
    images, labels = batches(1, size=5)[0]
    assert learner.step(images, labels)["train_loss"].isfinite()
    with pytest.raises(ValueError, match="at least 2 images"):
        learner.step(images[:1], labels[:1])
    with pytest.raises(ValueError, match="5 images came with 4 labels"):
        learner.step(images, labels[:4])


def test_bad_values_are_refused_before_any_parameter_changes() -> None:
    learner, _ = pair(0, "paper", {})
    images, labels = batches(1)[0]
    before = copy.deepcopy(dict(learner.network.model.named_parameters()))
    with pytest.raises(ValueError, match=r"labels must lie in 0 … 3"):
        learner.step(images, labels + 1 + labels.max())
    images[0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        learner.step(images, labels)
    torch.testing.assert_close(dict(learner.network.model.named_parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"order": "random"}, "order must be"),
        ({"engine": "magic"}, "engine must be"),
        ({"interval": 0}, "interval must be"),
        ({"micro_batch": 0}, "micro_batch must be"),
        ({"strength": -1.0}, "strength must be a finite number ≥ 0, not -1"),
        ({"clip_norm": -1.0}, "clip_norm must be positive, not -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"clip_norm": float("nan")}, "clip_norm must be positive"),
        ({"frozen_blocks": 99}, r"frozen_blocks must be in 0 … \d+"),
    ],
)
def test_impossible_options_are_refused(option: dict[str, Any], message: str) -> None:
    model = TinyNet()
    with pytest.raises(ValueError, match=message):
        semaug.LearnableAugmentation(model, torch.optim.SGD(model.parameters(), lr=0.1), **option)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_stays_close_to_full_precision(order: str, dtype: torch.dtype) -> None:
    results = []
    for autocast in (None, dtype):
        torch.manual_seed(0)
        model, covnet = TinyNet(width=16, drop=0.0), semaug.CovNet(16)
        learner = semaug.LearnableAugmentation(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            covnet,
            torch.optim.SGD(covnet.parameters(), lr=50.0),
            order=order,
            autocast=autocast,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10) if autocast == torch.float16 else None,
            strength=10.0,
            frozen_blocks=0,
        )
        start = torch.cat([p.detach().flatten().clone() for p in covnet.parameters()])
        for images, labels in batches(3):
            metrics = learner.step(images.float(), labels)
        assert metrics["train_loss"].dtype == torch.float32
        results.append(torch.cat([p.detach().flatten() for p in covnet.parameters()]) - start)
    assert torch.cosine_similarity(*results, dim=0) > 0.9
    assert 0.7 < results[1].norm() / results[0].norm() < 1.4


def test_an_overflow_in_fp16_leaves_the_step_out() -> None:
    model, covnet = TinyNet(drop=0.0), semaug.CovNet(6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    learner = semaug.LearnableAugmentation(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        covnet,
        autocast=torch.float16,
        scaler=scaler,
        strength=10.0,
        frozen_blocks=0,
    )
    before = copy.deepcopy([*model.parameters(), *covnet.parameters()])
    images, labels = batches(1)[0]
    learner.step(images.float(), labels)
    torch.testing.assert_close([*model.parameters(), *covnet.parameters()], before, rtol=0, atol=0)
    assert scaler.get_scale() < 2.0**40


@pytest.mark.parametrize(
    ("kind", "make", "order"),
    [
        (semaug.LearnableAugmentation, lambda: semaug.ClassCovariance(5, 6), "paper"),
        (semaug.LearnableAugmentation, lambda: semaug.ClassCovariance(5, 6, form="full"), "paper"),
        (semaug.LearnableAugmentation, lambda: semaug.CovNet(6), "paper"),
        (semaug.LearnableAugmentation, lambda: semaug.CovNet(6), "pipelined"),
        (semaug.JointAugmentation, lambda: semaug.CovNet(6), None),
    ],
)
def test_after_an_overflow_in_a_forward_pass_training_continues(kind: Any, make: Any, order: str | None) -> None:
    """One image overflows fp16 once; neither statistics nor parameters may hold what is not finite from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 6), nn.ReLU(), nn.Linear(6, 5))
    learner = kind(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        make(),
        autocast=torch.float16,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10),
        check_values=False,
        **({} if order is None else {"order": order}),
    )
    losses = []
    for step in range(4):
        learner.set_progress(0.5)
        images = torch.randn(8, 3, 8, 8)
        if step == 1:
            images[0] *= 1e7
        losses.append(learner.step(images, torch.arange(8) % 5)["train_loss"])
        numbers = [*model.parameters(), *learner.source.state_dict().values()]
        assert all(value.isfinite().all() for value in numbers)
    assert [bool(loss.isfinite()) for loss in losses] == [True, False, True, True]


class GroupNormNet(TinyNet):
    """Without BatchNorm, so that images do not see each other and a batch may be cut."""

    def __init__(self) -> None:
        super().__init__(drop=0.0)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(2, child.num_features))


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize(("micro_batch", "size"), [(2, 8), (1, 6), (3, 14)])
@pytest.mark.parametrize("method", [semaug.LearnableAugmentation, semaug.JointAugmentation])
def test_micro_batches_give_the_same_training(method: Any, order: str, micro_batch: int, size: int) -> None:
    states, metrics = [], []
    for pieces in (None, micro_batch):
        torch.manual_seed(0)
        model, covnet = GroupNormNet().double(), semaug.CovNet(6).double()
        learner = method(
            Network(model, frozen_blocks=1, blocks=TINY_BLOCKS),
            torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True),
            covnet,
            torch.optim.SGD(covnet.parameters(), lr=3.0),
            strength=4.0,
            order=order,
            clip_norm=1.0,
            micro_batch=pieces,
        )
        for images, labels in batches(5, size=size):
            metrics.append(learner.step(images, labels))
        states.append({**model.state_dict(), **covnet.state_dict()})
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)
    for name in ("train_loss", "accuracy", "variance_mean"):
        torch.testing.assert_close(metrics[4][name], metrics[9][name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("order", "same"),
    [
        # In each half step two micro-batches go: first, on the meta half, forward-mode, real.
        ("paper", [(0, 4), (1, 5), (0, 6), (1, 7), (8, 12), (9, 13), (8, 14), (9, 15)]),
        # First, forward-mode (on the half batch before), real.
        ("pipelined", [(0, 4), (1, 5), (4, 8), (5, 9), (6, 10), (7, 11)]),
    ],
)
def test_micro_batches_move_statistics_once_and_repeat_their_masks(order: str, same: list[tuple[int, int]]) -> None:
    learner, _ = pair(1, order, {}, micro_batch=2)
    images, labels = batches(1)[0]
    learner.step(images, labels)
    drawn: list[Tensor] = []
    learner.network.model.drop.register_forward_hook(lambda module, args, output: drawn.append(output == 0))
    learner.step(images, labels)
    assert len(drawn) == max(max(pair) for pair in same) + 1
    assert all(torch.equal(drawn[i], drawn[j]) for i, j in same)
    counts = {int(v) for n, v in learner.network.model.state_dict().items() if n.endswith("num_batches_tracked")}
    assert counts == {8}, "two micro-batches in each of four half steps"


def test_a_network_with_another_number_of_frozen_blocks_is_refused() -> None:
    model = TinyNet()
    network = Network(model, frozen_blocks=1, blocks=TINY_BLOCKS)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for other in (0, 2):
        with pytest.raises(ValueError, match=f"has frozen_blocks=1, not {other}"):
            semaug.LearnableAugmentation(network, sgd, frozen_blocks=other, strength=10.0)
    without_meta_loop = semaug.LearnableAugmentation(network, sgd, semaug.Constant(), strength=10.0)
    assert without_meta_loop.network.frozen_blocks == 1


class Dense(nn.Sequential):
    """No convolutions, which crash some CPUs in bf16."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize("engine", ["jvp", "double_backward"])
@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_a_network_of_half_precision_has_its_losses_in_fp32(order: Any, engine: Any) -> None:
    images, labels = torch.randn(8, 3, 4, 4).bfloat16(), torch.arange(8) % 4
    model = Dense().bfloat16()
    losses = []
    for own in (model, copy.deepcopy(model).float()):
        source = semaug.CovNet(8)
        source.load_state_dict(losses[0][1] if losses else source.state_dict())
        learner = semaug.LearnableAugmentation(
            own, torch.optim.SGD(own.parameters(), lr=0.01), source, order=order, engine=engine, strength=10.0
        )
        initial = copy.deepcopy(source.state_dict())
        metrics = learner.step(images.to(own[1].weight.dtype), labels)
        assert all(metrics[name].dtype == torch.float32 for name in ("train_loss", "meta_loss"))
        losses.append((metrics, initial))
    (half, _), (full, _) = losses
    for name in ("train_loss", "meta_loss"):
        torch.testing.assert_close(half[name], full[name], rtol=2e-2, atol=0)
    assert half["meta_gradient_norm"] == pytest.approx(float(full["meta_gradient_norm"]), rel=0.2)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_autocast_around_the_step_is_as_good_as_the_option(order: Any) -> None:
    images, labels = torch.randn(8, 3, 4, 4), torch.arange(8) % 4
    results = []
    for around in (False, True):
        torch.manual_seed(0)
        model = Dense()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        learner = semaug.LearnableAugmentation(
            model, optimizer, order=order, frozen_blocks=1, autocast=None if around else torch.bfloat16, strength=10.0
        )
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                metrics = learner.step(images, labels)
        results.append(({**model.state_dict(), **learner.source.state_dict()}, metrics))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="fp16 needs scaler"):
        learner.step(images, labels)
    fp16 = semaug.LearnableAugmentation(model, optimizer, frozen_blocks=1, autocast=torch.float16)
    fp16.set_progress(0.5)
    with pytest.raises(ValueError, match="fp16 needs scaler"):
        fp16.step(images, labels)
    learner.step(images, labels)  # without autocast in full precision again
    assert learner.executor.precision is None


@pytest.mark.parametrize("source", [lambda: semaug.ClassCovariance(4, 8), lambda: semaug.CovNet(8)])
@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_the_second_half_step_sees_the_weights_of_the_first_in_half_precision(order: Any, source: Any) -> None:
    """Autocast caches half-precision copies of weights, which must not outlive an update of the weights."""
    images, labels = torch.randn(8, 3, 4, 4), torch.arange(8) % 4
    states = []
    for clear in (False, True):
        torch.manual_seed(0)
        model = Dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if clear:
            optimizer.register_step_post_hook(lambda *_: torch.clear_autocast_cache())
        learner = semaug.LearnableAugmentation(
            model, optimizer, source(), order=order, autocast=torch.bfloat16, strength=10.0, frozen_blocks=0
        )
        learner.step(images, labels)
        states.append(model.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [(True, False), (False, True)])
def test_precision_may_change_in_the_middle_of_a_pipelined_run(changes: tuple[bool, bool], tmp_path: Path) -> None:
    torch.manual_seed(1)
    images, labels = torch.randn(8, 3, 4, 4), torch.arange(8) % 4
    gradients = []
    for engine, steps in (("jvp", changes), ("double_backward", changes), ("jvp", (False, False))):
        torch.manual_seed(0)
        model = Dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        learner = semaug.LearnableAugmentation(
            model, optimizer, order="pipelined", frozen_blocks=1, engine=engine, strength=10.0
        )
        for half_precision in steps:
            if learner.half_steps:  # what is kept of the last half step goes through a file, its precision too
                torch.save(learner.state_dict(), tmp_path / "state.pt")
                learner.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
                before = [parameter.detach().clone() for parameter in learner.source.parameters()]
            with torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
                learner.step(images, labels)
        moved = zip(learner.source.parameters(), before, strict=True)
        gradients.append(torch.cat([(after - earlier).detach().flatten() for after, earlier in moved]))
    ours, theirs, full = gradients
    assert full.norm() > 0
    for other in (theirs, full):
        assert (ours - other).norm() < 0.05 * full.norm()
