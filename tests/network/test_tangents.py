"""The tangent rules against torch's own forward mode, in fp64."""

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

    kept = recorded(convolve, tensors) if record else None
    assert_same(ours(convolve, tensors, moving, kept and kept[1]), torchs(convolve, tensors, moving))


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
def test_batch_norm_and_what_follows_it(
    moving: list[bool], training: bool, record: str, activation: str, shape: tuple[int, ...]
) -> None:
    tensors = [numbers(*shape) + 3.0, numbers(3, seed=1), numbers(3, seed=2)]
    statistics = (None, None) if training else (numbers(3, seed=3), numbers(3, seed=4).exp())

    def normalise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ACTIVATIONS[activation](F.batch_norm(x, *statistics, w, b, training))

    expected = torchs(normalise, tensors, moving)
    kept = recorded(normalise, tensors) if record != "none" else None
    if kept is not None and record == "structure":
        kept[1].release_outputs()
    assert_same(ours(normalise, tensors, moving, kept and kept[1]), expected)


def test_batch_norm_moves_no_statistics() -> None:
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


def test_overwritten_outputs_are_computed_again() -> None:
    """A convolution whose output a later operator overwrites must not be taken from the record."""

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


def test_a_record_of_another_pass_is_left_alone() -> None:
    """Once the calls differ, nothing is taken from the record any more."""
    tensors = [numbers(2, 3, 5, 5), numbers(3, 3, 3, 3, seed=1)]
    _, record = recorded(lambda x, w: F.linear(F.conv2d(x, w, padding=1), numbers(5, 5)), tensors)

    def other(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.batch_norm(x, None, None, training=True), w, padding=1)

    assert_same(ours(other, tensors, [True, True], record), torchs(other, tensors, [True, True]))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "mnasnet0_5", "vit_tiny", "convnext_atto", "densenet121"])
@pytest.mark.parametrize("record", ["values", "structure", "none"])
def test_whole_networks(name: str, record: str) -> None:
    torch.manual_seed(0)
    if name in ("resnet18", "mobilenet_v2", "mnasnet0_5"):
        model = torchvision.models.get_model(name, num_classes=5)
    elif name == "vit_tiny":
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2)
    else:
        model = timm.create_model(name, num_classes=5)
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    names = [key for key, _ in model.named_parameters()]
    images = numbers(3, 3, 32, 32)

    def network(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (images,))

    tensors = [parameter.detach() for parameter in model.parameters()]
    moving = [True] * len(tensors)
    expected = torchs(network, tensors, moving)
    kept = recorded(network, tensors) if record != "none" else None
    if kept is not None and record == "structure":
        kept[1].release_outputs()
    assert_same(ours(network, tensors, moving, kept and kept[1]), expected, 1e-9)


def test_every_kept_operator_is_worth_keeping() -> None:
    """What a ResNet's record holds is held by its graph too: the record adds next to nothing."""
    model = torchvision.models.resnet18(num_classes=5).train()
    record, held = OperatorRecord(), set()

    def pack(tensor: Tensor) -> Tensor:
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), OperatorRecorder(record):
        output = model(torch.randn(2, 3, 32, 32))
    kept = [call.output for call in record.calls if call.output is not None]
    extra = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in held]
    assert len(kept) >= 30
    assert [tuple(tensor.shape) for tensor in extra] == [tuple(output.shape)]
    assert {call.function for call in record.calls} <= {*STORED, *FUSED}


def test_arguments_by_name_and_parts_with_gradients_keep_the_record_in_step() -> None:
    """What the recorder leaves out the tangent pass leaves out too, or a later call would get another one's output."""

    def network(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(input=x, weight=w, padding=1)
        with torch.enable_grad():
            y = F.conv2d(y, 2 * w, padding=1)
        return F.conv2d(y, 3 * w, padding=1)

    tensors = [numbers(2, 3, 5, 5), numbers(3, 3, 3, 3, seed=1)]
    _, record = recorded(network, tensors)
    assert_same(ours(network, tensors, [True, True], record), torchs(network, tensors, [True, True]))
