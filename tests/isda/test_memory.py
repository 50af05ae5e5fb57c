"""Memory of the loss: no tensor of size N×C×D, and nothing of size C×D but the weight and its gradient."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import references
from semaug import Diagonal, isda_loss
from semaug.isda import quadratic
from semaug.isda.loss import isda_loss_along


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest output of any operator, and how many operators ran."""

    def __init__(self):
        super().__init__()
        self.largest = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        self.largest = max([self.largest, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


def large_problem(n, c, d):
    """Labels, and fp32 leaves of the loss: features, weight, bias, variance."""
    leaves = [torch.randn(n, d), torch.randn(c, d) / d**0.5, torch.zeros(c), torch.rand(n, d)]
    return torch.randint(c, (n,)), [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_tensor_of_the_loss_is_much_larger_than_its_inputs_and_logits(smoothing):
    n, c, d = 64, 10_000, 512
    labels, leaves = large_problem(n, c, d)
    features, weight, bias, variance = leaves
    with LargestTensor() as record:
        loss = isda_loss(features, labels, weight, bias, Diagonal(variance), label_smoothing=smoothing)
        forward = record.operators
        loss.backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert forward > 5
    assert record.operators > forward + 5
    assert c * d <= record.largest < 4 * max(n * c, c * d, n * d)
    assert record.largest < min(n * c * d, n * d * d)


class LargeAllocations(TorchDispatchMode):
    """Records the operators that allocate more than `numbers` numbers in fp32."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.operators = numbers, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {memory(leaf).data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        outputs = [memory(leaf) for leaf in tree_leaves(out) if torch.is_tensor(leaf)]
        self.operators += [func for new in outputs if new.nbytes() > 4 * self.numbers and new.data_ptr() not in inputs]
        return out


def memory(tensor):
    return tensor.untyped_storage()


@pytest.fixture
def many_classes(monkeypatch):
    """A problem in which only the gradient of the weight may take more than 2·N·C numbers, and a record of the rest."""
    n, c, d = 16, 4096, 256
    monkeypatch.setattr(quadratic, "_CHUNK", 2 * n * c)
    assert 2 * n * c == c * d / 8
    return (*large_problem(n, c, d), LargeAllocations(2 * n * c))


def test_forward_and_backward_allocate_nothing_large_but_the_gradient_of_the_weight(many_classes):
    labels, (features, weight, bias, variance), record = many_classes
    with record:
        isda_loss(features, labels, weight.detach(), bias, Diagonal(variance)).backward()
        loss = isda_loss(features, labels, weight, bias, Diagonal(variance))
        assert record.operators == []
        gradient = torch.autograd.grad(loss, (features, weight, bias, variance))[1]
    assert record.operators == [torch.ops.aten.new_empty.default]
    assert gradient.shape == weight.shape


def test_soft_labels_allocate_nothing_large_but_the_gradient_of_the_weight(many_classes):
    labels, (_, weight, _, variance), record = many_classes
    labels = F.one_hot(labels, 4096) * 0.9 + 0.1 / 4096
    with record:
        result = Diagonal(variance).quadratic(weight, labels)
        assert record.operators == []
        torch.autograd.grad(result.sum(), (weight, variance))
    assert record.operators == [torch.ops.aten.new_empty.default]


def test_the_derivative_along_a_direction_allocates_nothing_large(many_classes):
    """This is the part of the meta gradient that concerns the head."""
    labels, (features, weight, bias, variance), record = many_classes
    head = [part.detach() for part in (features, weight, bias)]
    direction = [*(torch.randn_like(part) for part in head), None]
    with record:
        along = isda_loss_along(head[0], labels, *head[1:], Diagonal(variance), direction=direction)
        (gradient,) = torch.autograd.grad(along, variance)
    assert record.operators == []
    assert gradient.norm() > 0


def test_the_graph_saves_nothing_large_but_the_weight(many_classes):
    labels, (features, weight, bias, variance), _ = many_classes
    saved = {}

    def save(tensor):
        saved[memory(tensor).data_ptr()] = memory(tensor).nbytes() / 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        isda_loss(features, labels, weight, bias, Diagonal(variance))
    assert saved.pop(memory(weight).data_ptr()) == weight.numel()
    assert sum(saved.values()) < 2 * 16 * 4096


def test_the_record_of_large_allocations_sees_only_new_memory():
    with LargeAllocations(99) as record:
        large = torch.zeros(10, 10)
        large.T.add_(1)[2:].expand(3, 8, 10)
        large[:5] + large[5:]
        large.sum(0, keepdim=True).expand(1000, 10)
        assert record.operators == [torch.ops.aten.zeros.default]
        large.T + 1
    assert len(record.operators) == 2


def test_the_record_of_the_largest_tensor_catches_the_naive_formula():
    n, c, d = 16, 100, 32
    labels, (features, weight, bias, variance) = large_problem(n, c, d)
    with LargestTensor() as record:
        references.naive_loss(features, labels, weight, bias, torch.diag_embed(variance), 1.0)
    assert record.largest >= max(n * c * d, n * d * d)
    assert record.largest >= 4 * max(n * c, c * d, n * d)


def test_the_record_of_the_largest_tensor_sees_the_backward_pass():
    class LargeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(1000, 3).clone().mean(0)

    x = torch.ones(3, requires_grad=True)
    with LargestTensor() as record:
        loss = LargeBackward.apply(x)
        assert record.largest <= 3
        loss.backward()
    assert record.largest == 3000
