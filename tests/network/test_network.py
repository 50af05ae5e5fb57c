"""Any classifier as early blocks → late blocks → feature → linear head."""

import copy
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import semaug
from semaug.network.network import Network
from tiny import TINY_BLOCKS, TinyNet

TORCHVISION = {  # name → number of blocks, first and last block
    "resnet18": (8, "layer1.0", "layer4.1"),
    "resnet34": (16, "layer1.0", "layer4.2"),
    "resnet50": (16, "layer1.0", "layer4.2"),
    "resnet101": (33, "layer1.0", "layer4.2"),
    "resnet152": (50, "layer1.0", "layer4.2"),
    "resnext50_32x4d": (16, "layer1.0", "layer4.2"),
    "densenet161": (78, "features.denseblock1.denselayer1", "features.denseblock4.denselayer24"),
    "efficientnet_b0": (16, "features.1.0.block", "features.7.0.block"),
    "mobilenet_v2": (17, "features.1.conv", "features.17.conv"),
    "mobilenet_v3_small": (11, "features.1.block", "features.11.block"),
    "regnet_x_400mf": (22, "trunk_output.block1.block1-0", "trunk_output.block4.block4-11"),
    "shufflenet_v2_x0_5": (16, "stage2.0", "stage4.3"),
    "mnasnet0_5": (16, "layers.8.0.layers", "layers.13.0.layers"),
    "vit_b_16": (12, "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_11"),
    "convnext_tiny": (18, "features.1.0", "features.7.2"),
    "swin_t": (12, "features.1.0", "features.7.1"),
}
TIMM = {
    "resnet50": (16, "layer1.0", "layer4.2"),
    "densenet121": (58, "features.denseblock1.denselayer1", "features.denseblock4.denselayer16"),
    "efficientnet_b0": (16, "blocks.0.0", "blocks.6.0"),
    "mobilenetv2_100": (17, "blocks.0.0", "blocks.6.0"),
    "regnetx_004": (22, "s1.b1", "s4.b12"),
    "vit_tiny_patch16_224": (12, "blocks.0", "blocks.11"),
    "convnext_atto": (12, "stages.0.blocks.0", "stages.3.blocks.1"),
    "swin_tiny_patch4_window7_224": (12, "layers.0.blocks.0", "layers.3.blocks.1"),
}
ALL = [("torchvision", name) for name in TORCHVISION] + [("timm", name) for name in TIMM]


@pytest.mark.parametrize(("library", "name"), ALL)
def test_blocks_are_named_in_order(library: str, name: str) -> None:
    with torch.device("cpu" if name.startswith("regnet") else "meta"):  # RegNet computes its widths with tensors
        model = torchvision.models.get_model(name) if library == "torchvision" else timm.create_model(name)
    count, first, last = (TORCHVISION if library == "torchvision" else TIMM)[name]
    names = [block.name for block in Network(model).blocks]
    assert names[0] == "stem"
    assert (len(names) - 1, names[1], names[-1]) == (count, first, last)
    assert len(set(names)) == len(names)


def small_vit() -> nn.Module:
    sizes = {"patch_size": 16, "num_layers": 4, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return torchvision.models.VisionTransformer(image_size=64, num_classes=5, **sizes)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "densenet121",
        "efficientnet_b0",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "regnet_x_400mf",
        "shufflenet_v2_x0_5",
        "mnasnet0_5",
        "vit",
        "convnext_tiny",
        "swin_t",
    ],
)
def test_the_late_part_of_torchvisions_families_replays_exactly(name: str) -> None:
    """The families of timm are tested in test_families.py."""
    model = small_vit() if name == "vit" else torchvision.models.get_model(name, num_classes=5)
    count = sum(block.name != "stem" for block in Network(model).blocks)
    network = Network(model, frozen_blocks=count // 2)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features, tape = network.forward(images)
        late = {key: parameter.detach() for key, parameter in network.late_parameters().items()}
        torch.testing.assert_close(network.replay(late, tape), features, rtol=1e-4, atol=1e-5)
        head_only = Network(model, frozen_blocks=count)
        features, tape = head_only.forward(images)
        torch.testing.assert_close(head_only.replay({}, tape), features, rtol=1e-4, atol=1e-5)
        model.eval()
        features, _ = network.forward(images)
        torch.testing.assert_close(network.head(features), model(images), rtol=1e-4, atol=1e-5)


def test_a_tape_stores_only_the_activation_that_the_late_part_reads() -> None:
    """Of the outputs of all other early modules, it stores the shape."""
    network = Network(torchvision.models.resnet50(num_classes=5), frozen_blocks=10)
    _, tape = network.forward(torch.randn(2, 3, 64, 64))
    held = {name: sum(output.untyped_storage().nbytes() for output, _ in calls) for name, calls in tape.outputs.items()}
    big = {name for name, size in held.items() if size > 4}
    assert big == {"layer3.2"}
    late = set(network.late_parameters())
    assert {"layer3.3.conv1.weight", "layer4.2.bn3.bias", "fc.weight"} <= late
    assert not any(name.startswith(("conv1", "layer1", "layer2", "layer3.2")) for name in late)


@pytest.mark.parametrize("model", [torchvision.models.resnet18(), timm.create_model("resnet18")])
def test_the_stem_alone_may_be_frozen(model: nn.Module) -> None:
    network = Network(model, frozen_blocks="stem")
    network.prepare(torch.randn(2, 3, 64, 64))
    frozen = {name for name, _ in model.named_parameters()} - set(network.late_parameters())
    assert frozen == {"conv1.weight", "bn1.weight", "bn1.bias"}


def test_five_eighths_of_the_blocks_are_frozen_by_the_word_auto() -> None:
    for name, frozen in (("resnet50", 10), ("resnet18", 5)):
        network = Network(getattr(torchvision.models, name)(), frozen_blocks="auto")
        assert network.frozen_blocks == frozen
    assert network.frozen_text() == "the pseudo update freezes the stem and 5 of 8 blocks"
    assert Network(TinyNet(), frozen_blocks="auto", blocks=TINY_BLOCKS).frozen_blocks == 1
    assert Network(TinyNet(), blocks=TINY_BLOCKS).frozen_text() == "the pseudo update freezes nothing"
    assert Network(TinyNet(), "stem", blocks=TINY_BLOCKS).frozen_text() == "the pseudo update freezes the stem"
    assert Network(nn.Linear(4, 2), frozen_blocks="auto").frozen_blocks == 0


class OutOfMemory(nn.Conv2d):
    """A convolution that can be made to fail."""

    fails = False

    def forward(self, images: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(images)


def test_an_error_in_an_early_module_is_raised_as_it_is_and_ends_no_mode_of_the_caller() -> None:
    model = nn.Sequential(OutOfMemory(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    network, images = Network(model, frozen_blocks=1), torch.randn(2, 3, 5, 5)
    network.prepare(images)
    model[0].fails = True
    with torch.device("meta"):
        with pytest.raises(torch.OutOfMemoryError):
            network.forward(images, record=True)
        assert torch.empty(1).is_meta
    model[0].fails = False
    _, tape = network.forward(images, record=True)
    assert tape.late is not None
    assert [call.function for call in tape.late.calls] == [torch.conv2d]


def test_preparing_a_network_does_not_change_the_model() -> None:
    model = TinyNet()
    before = copy.deepcopy(model.state_dict())
    modules = {name: (module, dict(module.__dict__)) for name, module in model.named_modules()}
    network = Network(model, frozen_blocks=1, blocks=TINY_BLOCKS)
    model.train()
    state = torch.get_rng_state()
    network.prepare(torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert {name: (module, dict(module.__dict__)) for name, module in model.named_modules()} == modules


def test_views_follow_later_changes_of_the_model() -> None:
    model = TinyNet(drop=0.0).double()
    network = Network(model, frozen_blocks=1, blocks=TINY_BLOCKS)
    images = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    plain, _ = network.forward(images)
    model.blocks[2].drop.p = 0.9  # a drop-rate schedule
    dropped, tape = network.forward(images)
    assert not torch.equal(plain, dropped)
    late = dict(network.late_parameters())
    torch.testing.assert_close(network.replay(late, tape), dropped, rtol=0, atol=0)
    model.eval()
    model.fc.weight = nn.Parameter(torch.zeros_like(model.fc.weight))  # a replaced parameter
    assert network.head_parameters(network.late_parameters())[0] is model.fc.weight
    features, _ = network.forward(images)
    torch.testing.assert_close(network.head(features), model(images))


def test_replays_and_passes_at_other_parameters_leave_running_statistics_alone() -> None:
    model = TinyNet()
    network = Network(model, frozen_blocks=1, blocks=TINY_BLOCKS)
    images = torch.randn(4, 3, 9, 9)
    _, tape = network.forward(images)
    before = copy.deepcopy(model.state_dict())
    late = dict(network.late_parameters())
    network.replay(late, tape)
    network.forward_at(late, images)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_passes_at_other_parameters_give_no_gradient_to_the_early_part() -> None:
    model = TinyNet()
    network = Network(model, frozen_blocks=2, blocks=TINY_BLOCKS)
    point = {name: p.detach().clone().requires_grad_() for name, p in network.late_parameters().items()}
    network.forward_at(point, torch.randn(4, 3, 9, 9)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(value.grad is not None for name, value in point.items() if not name.startswith("fc"))


def test_passes_at_other_parameters_have_the_same_gradient_through_pooling() -> None:
    model = timm.create_model("resnet18", channels=(8, 16, 16, 16), num_classes=5).double().eval()
    network = Network(model)
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    point = {name: p.detach().clone().requires_grad_() for name, p in network.late_parameters().items()}
    network.head(network.forward_at(point, images)).square().sum().backward()
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("fc."):
            torch.testing.assert_close(point[name].grad, parameter.grad, rtol=1e-12, atol=1e-12)


class Overwriting(nn.Module):
    """The late part changes the early part's output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.b(self.a(x.flatten(1)).tanh_()))


def test_outputs_that_are_overwritten_in_place_are_copied() -> None:
    network = Network(Overwriting().double(), frozen_blocks=1)
    features, tape = network.forward(torch.randn(2, 3, 2, 2, dtype=torch.float64))
    late = {name: parameter.detach() for name, parameter in network.late_parameters().items()}
    for _ in range(2):  # a replay does not change the tape either
        torch.testing.assert_close(network.replay(late, tape), features.detach(), rtol=0, atol=0)
    features.sum().backward()


class Embedded(nn.Module):
    """A parameter outside all blocks that acts before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(6, 3)
        self.position = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.b(self.a(x.flatten(1) + self.position)))


def test_parameters_that_act_on_early_outputs_become_early() -> None:
    network = Network(Embedded(), frozen_blocks=1)
    network.forward(torch.randn(2, 3, 2, 2))
    assert set(network.late_parameters()) == {"b.weight", "b.bias", "fc.weight", "fc.bias"}


class Repeated(nn.Module):
    """An early module that is called twice, and one activation shared by both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.fc = nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.b(self.act(self.a(self.act(self.a(x.flatten(1))))))))


def test_modules_called_more_than_once_replay_call_by_call() -> None:
    network = Network(Repeated().double(), frozen_blocks=1)
    features, tape = network.forward(torch.randn(4, 3, 2, 2, dtype=torch.float64))
    late = {name: parameter.detach() for name, parameter in network.late_parameters().items()}
    torch.testing.assert_close(network.replay(late, tape), features.detach(), rtol=0, atol=0)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(12, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.flatten(1))
        return self.one(features) + self.two(features)


class Pooled(nn.Module):
    """The same network with an `nn.Linear` and with a 1×1 convolution as head."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.body, self.convolution = nn.Conv2d(3, 6, 1), convolution
        self.fc = nn.Conv2d(6, 4, 1) if convolution else nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.body(x).tanh().mean((2, 3), keepdim=True)
        return self.fc(pooled).flatten(1) if self.convolution else self.fc(pooled.flatten(1))


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("engine", ["jvp", "double_backward"])
def test_a_1x1_convolution_is_a_linear_head(order: Any, engine: Any) -> None:
    linear, convolution = Pooled(False).double(), Pooled(True).double()
    convolution.load_state_dict(
        {name: v.view_as(convolution.state_dict()[name]) for name, v in linear.state_dict().items()}
    )
    images, labels = torch.randn(8, 3, 4, 4, dtype=torch.float64), torch.arange(8) % 4
    covnet, losses = semaug.CovNet(6).double(), []
    for model in (linear, convolution):
        features = Network(model).features(images)
        losses.append(semaug.ISDALoss(4, 6).double()(features, labels, model.fc, 1.0))
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        source = copy.deepcopy(covnet)
        meta = torch.optim.SGD(source.parameters(), lr=5.0)
        learner = semaug.LearnableAugmentation(
            model, sgd, source, meta, order=order, engine=engine, strength=10.0, frozen_blocks=0
        )
        losses += [learner.step(images, labels)["train_loss"] for _ in range(4)]
        assert (
            max(
                float((a - b).abs().max())
                for a, b in zip(source.state_dict().values(), covnet.state_dict().values(), strict=True)
            )
            > 1e-4
        )
    torch.testing.assert_close(losses[:5], losses[5:], rtol=1e-10, atol=1e-12)


class Grid(nn.Module):
    """A patch embedding whose attribute the model reads, and a module that two others share."""

    def __init__(self) -> None:
        super().__init__()
        self.grid, self.patch = (2, 3), nn.Linear(4, 6)
        self.position = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Shares(self.position), Shares(self.position)])
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x.flatten(1).view(-1, 3, 4))
        for block in self.blocks:
            x = block(x) / self.patch.out_features
        return self.fc(x.mean(1))


class Shares(nn.Module):
    def __init__(self, position: nn.Module) -> None:
        super().__init__()
        self.layer, self.position = nn.Linear(6, 6), position

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.position(x)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_attributes_of_frozen_modules_and_shared_modules(order: Any) -> None:
    model = Grid().double()
    network = Network(model, 2, blocks=["patch", "blocks.0", "blocks.1"])
    images, labels = torch.randn(6, 3, 2, 2, dtype=torch.float64), torch.arange(6) % 3
    learner = semaug.LearnableAugmentation(
        network, torch.optim.SGD(model.parameters(), lr=0.1), order=order, strength=10.0
    )
    learner.source.double()
    learner.step(images, labels)
    features, tape = network.forward(images, record=True)
    late = {name: parameter.detach() for name, parameter in network.late_parameters().items()}
    torch.testing.assert_close(network.replay(late, tape), features.detach(), rtol=0, atol=0)
    torch.testing.assert_close(network.head(features), model(images))


class Output(NamedTuple):
    logits: Tensor


class Wrapping(nn.Module):
    """Blocks in a list, inside a wrapper with a stem, and an output that is more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Linear(12, 6)
        self.backbone.layers = nn.ModuleList([Shares(nn.Linear(6, 6)) for _ in range(3)])
        self.backbone.norm = nn.LayerNorm(6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Output:
        x = self.backbone.embedding(x.flatten(1))
        for layer in self.backbone.layers:
            x = x + layer(x)
        return Output(self.classifier(self.backbone.norm(x)))


def test_lists_of_blocks_in_a_wrapper_and_outputs_with_logits() -> None:
    model = Wrapping()
    layers = [f"backbone.layers.{i}" for i in range(3)]
    assert [block.name for block in Network(model).blocks] == ["stem", *layers, "backbone.norm"]
    for frozen in range(5):
        network = Network(model, frozen)
        features, tape = network.forward(torch.randn(2, 3, 2, 2))
        late = {name: parameter.detach() for name, parameter in network.late_parameters().items()}
        assert len(late) == [18, 12, 8, 4, 2][frozen]
        torch.testing.assert_close(network.replay(late, tape), features.detach())
        assert set(tape.outputs) <= {"backbone.embedding", *layers, "backbone.norm"}
        assert len(tape.outputs) == (0 if frozen == 0 else frozen + 1)


def test_models_that_cannot_be_split_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="not an nn.Linear or a 1×1 convolution"):
        Network(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()))
    with pytest.raises(ValueError, match="2 classifiers; the method needs a single linear head"):
        Network(timm.create_model("deit_tiny_distilled_patch16_224"))
    with pytest.raises(ValueError, match="not that of its linear layer 'two' alone"):
        Network(TwoHeads()).forward(torch.randn(2, 3, 2, 2))
    with pytest.raises(ValueError, match="'body' alone|should have shape"):
        Network(TwoHeads(), head="body").forward(torch.randn(2, 3, 2, 2))
    with pytest.raises(ValueError, match="the module 'nowhere' does not exist"):
        Network(TwoHeads(), head="nowhere")
    with pytest.raises(ValueError, match="the module '0' is a Conv2d"):
        Network(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), head="0")
    with pytest.raises(ValueError, match="no module 'blocks.9'"):
        Network(TinyNet(), blocks=["blocks.9"])
    with pytest.raises(ValueError, match="0 … 3, the number of blocks of TinyNet, or 'stem' or 'auto', not 4"):
        Network(TinyNet(), frozen_blocks=4, blocks=TINY_BLOCKS)
    with pytest.raises(ValueError, match="or 'stem' or 'auto', not head"):
        Network(TinyNet(), frozen_blocks="head", blocks=TINY_BLOCKS)
    with pytest.raises(ValueError, match="nothing comes before the blocks of TinyNet"):
        Network(TinyNet(), frozen_blocks="stem", blocks=TINY_BLOCKS[1:])
    with pytest.raises(ValueError, match="TorchScript"):
        Network(torch.jit.trace(TinyNet().eval(), torch.randn(1, 3, 9, 9)))


def test_wrapped_models_are_unwrapped() -> None:
    model = TinyNet()
    assert Network(torch.compile(model)).model is model
    assert Network(nn.DataParallel(model)).model is model


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_compiled_pass_is_compiled_once_and_equals_the_eager_one(frozen: int) -> None:
    """Features, replay, statistics and the gradients of two backward passes."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    model = TinyNet(drop=0.0).double()
    eager = Network(copy.deepcopy(model), frozen, blocks=TINY_BLOCKS)
    compiled = Network(model, frozen, blocks=TINY_BLOCKS, compile="aot_eager")
    graphs = []
    for seed in range(4):
        images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        results = []
        for network in (eager, compiled):
            features, tape = network.forward(images)
            loss, late = features.square().sum(), network.late_parameters()
            gradients = [
                torch.autograd.grad(loss, list(late.values()), retain_graph=True, allow_unused=True) for _ in range(2)
            ]
            replayed = network.replay(dict(late), tape)
            results.append((features.detach(), replayed.detach(), *gradients, network.model.state_dict()))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        graphs.append(counters["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1:] == graphs[1:2] * 3
