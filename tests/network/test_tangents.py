"""The tangent rules against torch's own forward mode, in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual
from torch.nn import functional as F

from duals import ACTIVATIONS, Function, assert_same, numbers, ours, recorded, torchs
from semaug.network.recording import FUSED, STORED, OperatorRecord, OperatorRecorder
from semaug.network.tangents import TangentRules


def which(count: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=count, max_size=count).filter(any)


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 5, 6), (3, 4, 1, 1), {}),
    ((2, 4, 5, 6), (6, 2, 3, 3), {"stride": 2, "padding": 1, "groups": 2}),
    ((2, 4, 7, 7), (4, 1, 3, 3), {"padding": "same", "groups": 4}),
    ((2, 4, 7, 7), (4, 4, 3, 3), {"dilation": (2, 1)}),
]


@given(case=st.sampled_from(CONVOLUTIONS), moving=which(3), record=st.booleans())
@settings(max_examples=40, deadline=None)
def test_convolution(case: Any, moving: list[bool], record: bool) -> None:
    shape, kernel, options = case
    tensors = [numbers(*shape), numbers(*kernel, seed=1), numbers(kernel[0], seed=2)]

    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, **options)

    known = recorded(convolve, tensors) if record else None
    assert_same(ours(convolve, tensors, moving, known and known[1]), torchs(convolve, tensors, moving))


@pytest.mark.parametrize(("function", "dimensions"), [(F.conv1d, 1), (F.conv3d, 3)])
def test_convolution_in_other_dimensions(function: Function, dimensions: int) -> None:
    tensors = [numbers(2, 3, *[5] * dimensions), numbers(4, 3, *[3] * dimensions, seed=1)]
    assert_same(ours(function, tensors, [True, True]), torchs(function, tensors, [True, True]))


@given(moving=which(3), lead=st.sampled_from([(5,), (2, 3), (2, 3, 4), ()]))
@settings(max_examples=30, deadline=None)
def test_linear(moving: list[bool], lead: tuple[int, ...]) -> None:
    tensors = [numbers(*lead, 6), numbers(4, 6, seed=1), numbers(4, seed=2)]
    assert_same(ours(F.linear, tensors, moving), torchs(F.linear, tensors, moving))


@given(
    moving=which(3),
    training=st.booleans(),
    record=st.sampled_from(["values", "structure", "none"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    shape=st.sampled_from([(6, 3), (4, 3, 5), (2, 3, 5, 4)]),
)
@settings(max_examples=120, deadline=None)
def test_batch_norm_and_the_activation_after_it(
    moving: list[bool], training: bool, record: str, activation: str, shape: tuple[int, ...]
) -> None:
    tensors = [numbers(*shape) + 3.0, numbers(3, seed=1), numbers(3, seed=2)]
    statistics = (None, None) if training else (numbers(3, seed=3), numbers(3, seed=4).exp())

    def normalise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ACTIVATIONS[activation](F.batch_norm(x, *statistics, w, b, training))

    expected = torchs(normalise, tensors, moving)
    known = recorded(normalise, tensors) if record != "none" else None
    if known is not None and record == "structure":
        known[1].release_outputs()
    assert_same(ours(normalise, tensors, moving, known and known[1]), expected)


def test_batch_norm_leaves_the_running_statistics_alone() -> None:
    norm = nn.BatchNorm2d(3).double()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with torch.no_grad(), dual_level(), TangentRules():
        F.batch_norm(
            make_dual(numbers(4, 3, 2, 2), numbers(4, 3, 2, 2, seed=1)),
            norm.running_mean,
            norm.running_var,
            training=True,
        )
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_overwritten_outputs_are_not_reused() -> None:

    def network(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, w).__iadd__(0.3), inplace=True)

    tensors = [numbers(2, 3, 5, 5), numbers(4, 3, 3, 3, seed=1)]
    output, record = recorded(network, tensors)
    before = output.detach().clone()
    assert_same(ours(network, tensors, [True, True], record), torchs(network, tensors, [True, True]))
    assert torch.equal(output.detach(), before)


def test_the_record_is_used() -> None:
    tensors = [numbers(2, 3, 5, 5), numbers(4, 3, 3, 3, seed=1)]
    _, record = recorded(F.conv2d, tensors)
    assert record.calls[0].output is not None
    record.calls[0].output = 7 * torch.ones(2, 4, 3, 3, dtype=torch.float64)
    record.calls[0].version = record.calls[0].output._version
    assert (ours(F.conv2d, tensors, [True, True], record)[0] == 7).all()


def test_nothing_is_reused_after_a_call_that_differs_from_the_record() -> None:
    tensors = [numbers(2, 3, 5, 5), numbers(3, 3, 3, 3, seed=1)]
    _, record = recorded(lambda x, w: F.linear(F.conv2d(x, w, padding=1), numbers(5, 5)), tensors)

    def other(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.batch_norm(x, None, None, training=True), w, padding=1)

    assert_same(ours(other, tensors, [True, True], record), torchs(other, tensors, [True, True]))


NETWORKS: dict[str, Callable[[], nn.Module]] = {  # each with 16 values or more per channel under every BatchNorm
    "resnet": lambda: timm.create_model("resnet18", channels=(8, 16, 32, 64), num_classes=5),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(width_mult=0.25, num_classes=5),
    "mnasnet": lambda: torchvision.models.MNASNet(0.35, num_classes=5),
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=2, embed_dim=48),
    "convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 32, 64), num_classes=5),
    "densenet": lambda: timm.create_model("densenet121", block_config=(2, 3, 3, 2), growth_rate=8, num_classes=5),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(name: str) -> None:
    model = NETWORKS[name]().double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    names = [key for key, _ in model.named_parameters()]
    images = numbers(4, 3, 64, 64)

    def network(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (images,))

    tensors = [parameter.detach() for parameter in model.parameters()]
    moving = [True] * len(tensors)
    expected = torchs(network, tensors, moving)
    output, record = recorded(network, tensors)
    assert_same(ours(network, tensors, moving), expected, 1e-9)
    assert_same(ours(network, tensors, moving, record), expected, 1e-9)
    record.release_outputs()
    assert_same(ours(network, tensors, moving, record), expected, 1e-9)
    del output  # the graph, which holds the recorded tensors


def test_a_record_holds_only_tensors_that_the_graph_holds_too() -> None:
    model = torchvision.models.resnet18(num_classes=5).train()
    record, held = OperatorRecord(), set()

    def pack(tensor: Tensor) -> Tensor:
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), OperatorRecorder(record):
        output = model(torch.randn(2, 3, 32, 32))
    stored = [call.output for call in record.calls if call.output is not None]
    extra = [tensor for tensor in stored if tensor.untyped_storage().data_ptr() not in held]
    assert len(stored) >= 30
    assert [tuple(tensor.shape) for tensor in extra] == [tuple(output.shape)]
    assert {call.function for call in record.calls} <= {*STORED, *FUSED}


def test_calls_with_keywords_or_gradients_do_not_shift_the_record() -> None:
    """The tangent pass skips the same calls as the recorder; a later call would get the wrong output otherwise."""

    def network(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(input=x, weight=w, padding=1)
        with torch.enable_grad():
            y = F.conv2d(y, 2 * w, padding=1)
        return F.conv2d(y, 3 * w, padding=1)

    tensors = [numbers(2, 3, 5, 5), numbers(3, 3, 3, 3, seed=1)]
    _, record = recorded(network, tensors)
    assert_same(ours(network, tensors, [True, True], record), torchs(network, tensors, [True, True]))
