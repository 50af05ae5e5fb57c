"""The fused kernels against torch's forward mode in fp64: on a GPU, or in Triton's interpreter (see conftest.py)."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from duals import ACTIVATIONS, Function, assert_same, numbers, ours, recorded, torchs
from semaug.network import kernels
from semaug.network.recording import OperatorRecord

needs_triton = pytest.mark.skipif(kernels.triton is None, reason="this build of torch comes without Triton")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    return torch.device("cpu")


def through(
    function: Function,
    tensors: list[Tensor],
    moving: list[bool],
    device: torch.device,
    record: OperatorRecord | None = None,
) -> tuple[Tensor, Tensor]:
    primal, tangent = ours(function, [tensor.to(device) for tensor in tensors], moving, record)
    return primal.cpu(), tangent.cpu()


# Activations are tested on a shape for which no input of theirs is near an edge, where rounding would decide.
BATCH_NORMS = [
    ((4, 5, 3, 3), dtype, activation)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for activation in ("none", "relu_", "relu6_", "hardtanh_", "add, relu_")
] + [
    (shape, dtype, "none")
    for shape in ((2, 64, 9, 9), (3, 130, 4, 5), (70, 7))
    for dtype in (torch.float32, torch.bfloat16)
]


@needs_triton
def test_a_grid_that_cuda_does_not_launch_is_left_to_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activation of 2³⁰ numbers would need more blocks; here the limit is lower."""
    x = numbers(600, 128, dtype=torch.float32).to(device)
    heads = numbers(3, 2, 5, 16, dtype=torch.float32).half().to(device)
    missing = (None, None)

    def applies() -> list[bool]:
        normalised = kernels.batch_norm((x, x), missing, missing, missing, 1e-5, None, True)
        return [
            normalised is not None,
            kernels.attention((heads, heads), (heads, heads), (heads, heads), 1.0) is not None,
        ]

    monkeypatch.setattr(kernels, "MOST_BLOCKS", 6)
    assert applies() == [True, True]
    monkeypatch.setattr(kernels, "MOST_BLOCKS", 4)
    assert applies() == [False, False]


@needs_triton
@pytest.mark.parametrize(("shape", "dtype", "activation"), BATCH_NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_kernel(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, activation: str, training: bool
) -> None:
    channels = shape[1]
    x = (numbers(*shape) + 20 * numbers(channels, seed=9).view(1, -1, *[1] * (len(shape) - 2))).to(dtype)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    parameters = [numbers(channels, seed=1, dtype=torch.float32), numbers(channels, seed=2, dtype=torch.float32)]
    statistics = (
        (None, None) if training else (numbers(channels, seed=3).float(), numbers(channels, seed=4).exp().float())
    )

    def normalise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        here = [None if s is None else s.to(x.device, torch.promote_types(x.dtype, w.dtype)) for s in statistics]
        return ACTIVATIONS[activation](F.batch_norm(x, *here, w, b, training))

    inputs = [x, *parameters]
    exact = torchs(normalise, [tensor.double() for tensor in inputs], [True] * 3)
    _, record = recorded(normalise, [tensor.to(device) for tensor in inputs])
    record.release_outputs()
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for known in (None, record):
        result = through(normalise, inputs, [True] * 3, device, known)
        assert result[1].dtype == dtype
        assert_same(result, exact, tolerance)


@needs_triton
def test_activations_are_fused_with_batch_norm_and_addition(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []

    def counted(name: str, bounds: int) -> None:
        kernel = getattr(kernels, name)

        def call(*args: object) -> object:
            calls.append((name, args[bounds] is not None))
            return kernel(*args)

        monkeypatch.setattr(kernels, name, call)

    counted("batch_norm", 5)
    counted("add_clamp_", 2)

    def block(x: Tensor) -> Tensor:
        y = F.relu(F.batch_norm(x, None, None, training=True), inplace=True)
        y = F.batch_norm(y, None, None, training=True)
        y += x
        return F.relu(y, inplace=True)

    x = numbers(2, 8, 4, 4, dtype=torch.float32).to(memory_format=torch.channels_last)
    _, record = recorded(block, [x.to(device)])
    result = through(block, [x], [True], device, record)
    assert calls == [("batch_norm", True), ("batch_norm", False), ("add_clamp_", True)]
    assert_same(result, torchs(block, [x.double()], [True]), 1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 64, 200])
@pytest.mark.parametrize("moving", [[True, True, True], [True, False, False]])
def test_layer_norm_kernel(device: torch.device, dtype: torch.dtype, width: int, moving: list[bool]) -> None:
    tensors = [
        numbers(2, 5, width, dtype=dtype) + 10,
        numbers(width, seed=1, dtype=dtype),
        numbers(width, seed=2, dtype=dtype),
    ]

    def normalise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), w, b, 1e-3)

    exact = torchs(normalise, [tensor.double() for tensor in tensors], moving)
    assert_same(through(normalise, tensors, moving, device), exact, 1e-4 if dtype == torch.float32 else 2e-2)


@needs_triton
@pytest.mark.parametrize(("length", "keys", "size"), [(5, 5, 8), (70, 70, 64), (33, 90, 24), (1, 3, 128)])
def test_attention_kernel(device: torch.device, length: int, keys: int, size: int) -> None:
    shapes = [(2, 3, length, size), (2, 3, keys, size), (2, 3, keys, size)]
    tensors = [numbers(*shape, seed=i, dtype=torch.float16) for i, shape in enumerate(shapes)]
    exact = torchs(F.scaled_dot_product_attention, [tensor.double() for tensor in tensors], [True] * 3)
    assert_same(through(F.scaled_dot_product_attention, tensors, [True] * 3, device), exact, 5e-3)


@needs_triton
def test_attention_kernel_on_slices_of_one_tensor(device: torch.device) -> None:
    """Queries, keys and values as views of one product, as transformers have them."""

    def attend(joint: Tensor) -> Tensor:
        query, key, value = joint.view(2, 21, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(2, 21, 64)

    joint = numbers(2, 21, 192, dtype=torch.float16)
    assert_same(through(attend, [joint], [True], device), torchs(attend, [joint.double()], [True]), 5e-3)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamp_kernel(device: torch.device, dtype: torch.dtype) -> None:
    x = numbers(3, 5, 41, 7, dtype=dtype).to(memory_format=torch.channels_last)

    def clamp(x: Tensor) -> Tensor:
        F.relu6(x, inplace=True)
        return x

    assert_same(through(clamp, [x], [True], device), torchs(clamp, [x], [True]), 0.0)
