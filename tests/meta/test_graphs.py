"""What the host does for CUDA graphs: optimisers that can be captured, and updates that cross steps."""

import copy
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim import SGD, Adam, AdamW, Optimizer

import graphed
import semaug
from semaug.meta.graphs import _Carried, _structure
from semaug.meta.optimizers import capture_obstacle, load_optimizer_state, make_optimizer, set_learning_rate
from semaug.meta.state import update_from_state, update_to_state
from semaug.meta.updates import Update, map_update
from tiny import TinyNet, batches


def updates(count: int, **options: Any) -> list[Update]:
    """The updates that a pipelined learner carries from one step to the next."""
    torch.manual_seed(0)
    model = TinyNet().double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = semaug.CovNet(6).double()
    meta_optimizer = SGD(source.parameters(), lr=0.1)
    learner = semaug.LearnableAugmentation(
        model, optimizer, source, meta_optimizer, strength=3.0, order="pipelined", frozen_blocks=4, **options
    )
    found = []
    for images, labels in batches(count):
        learner.step(images, labels)
        assert learner.algorithm.last_real is not None
        found.append(learner.algorithm.last_real)
    return found


def tensors(update: Update) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_update(update, lambda tensor: found.append(tensor) or tensor, lambda state: state)  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_carried_update_takes_over_the_values_of_another_in_memory_of_its_own(micro_batch: int | None) -> None:
    first, second = updates(2, micro_batch=micro_batch)
    carried = _Carried(first)
    addresses = [tensor.data_ptr() for tensor in tensors(carried.update)]
    expected = copy.deepcopy(tensors(second))
    carried.copy_from(second)
    for tensor in tensors(second):
        if any(tensor.stride()):
            tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(tensors(carried.update), expected, strict=True))
    assert [tensor.data_ptr() for tensor in tensors(carried.update)] == addresses


def test_of_outputs_that_the_late_part_does_not_use_only_the_shape_is_carried() -> None:
    (update,) = updates(1)
    assert any(not any(tensor.stride()) and tensor.ndim for tensor in tensors(update))
    assert memory(_Carried(update).update) <= memory(update)  # a whole batch where the update has a half of it


def test_of_outputs_that_the_late_part_does_not_use_only_the_shape_is_restored() -> None:
    (update,) = updates(1)
    restored = update_from_state(update_to_state(update), torch.device("cpu"))
    assert restored is not None
    assert [tensor.shape for tensor in tensors(restored)] == [tensor.shape for tensor in tensors(update)]
    assert memory(restored) <= memory(update)


def memory(update: Update) -> int:
    """Bytes of all tensors."""
    return sum(storage.nbytes() for storage in {t.data_ptr(): t.untyped_storage() for t in tensors(update)}.values())


def test_updates_are_of_one_kind_if_their_batches_have_the_same_shape() -> None:
    first, second = updates(2)
    (other,) = updates(1, micro_batch=2)
    assert _structure(first) == _structure(second) != _structure(other)


def test_like_combines_the_tensors_of_one_update_with_the_random_states_of_another() -> None:
    first, second = updates(2)
    carried = _Carried(first)
    combined = carried.like(second)
    assert [id(tensor) for tensor in tensors(combined)] == [id(tensor) for tensor in tensors(carried.update)]
    assert combined.batch[0].tape is not None
    assert second.batch[0].tape is not None
    assert combined.batch[0].tape.random_state is second.batch[0].tape.random_state


def test_half_steps_to_come_are_known_in_advance() -> None:
    model = TinyNet()
    learner = semaug.LearnableAugmentation(
        model, SGD(model.parameters(), lr=0.1), strength=1.0, interval=3, check_values=False
    )
    expected = [learner.algorithm.is_differentiated(later) for later in range(6)]
    assert expected == [True, False, False] * 2
    for images, labels in batches(3):
        both = [learner.algorithm.is_differentiated(later) for later in (0, 1)]
        assert both == expected[learner.half_steps : learner.half_steps + 2]
        learner.step(images.float(), labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: SGD(parameters, lr=0.1), "learning rate of SGD is not a tensor on the GPU"),
        (lambda parameters: AdamW(parameters, lr=torch.tensor(0.1), capturable=False), "learning rate of AdamW"),
    ],
)
def test_the_reason_why_an_optimiser_is_not_captured(make: Any, message: str) -> None:
    assert message in (capture_obstacle(make(TinyNet().parameters())) or "")


def test_an_optimiser_with_hooks_is_not_captured() -> None:
    optimizer = SGD(TinyNet().parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    assert "SGD has hooks" in (capture_obstacle(optimizer) or "")


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_on_a_cpu_optimisers_are_made_as_by_torch(kind: Any) -> None:
    parameters = list(TinyNet().parameters())
    ours, theirs = make_optimizer(kind, [{"params": parameters, "lr": 0.1}]), kind(parameters, lr=0.1)
    assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loaded_state_leaves_the_place_of_a_learning_rate_and_the_settings_of_the_device(as_tensor: bool) -> None:
    def make(lr: Any) -> Optimizer:
        model = torch.nn.Linear(2, 2)
        optimizer = AdamW(model.parameters(), lr=lr, foreach=None if as_tensor else False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    saved = make(0.25 if as_tensor else torch.tensor(0.25)).state_dict()
    optimizer = make(torch.tensor(0.5) if as_tensor else 0.5)
    rate, foreach = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["foreach"]
    load_optimizer_state(optimizer, saved)
    assert optimizer.param_groups[0]["foreach"] == foreach
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert not as_tensor or optimizer.param_groups[0]["lr"] is rate
    set_learning_rate(optimizer.param_groups[0], 0.125)
    assert float(optimizer.param_groups[0]["lr"]) == 0.125
    assert not as_tensor or optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("case", ["paper", "pipelined", "resnet18, drop path", "P2P-Net, pipelined", "double backward"])
def test_no_autograd_graph_outlives_a_step(case: str) -> None:
    """One that does ties the gradients of its parameters to the stream of that step, and no later one is captured."""
    training = graphed.Training(False, "cpu", **graphed.CASES[case])
    parameters = [p for p in training.learner.network.model.parameters() if p.requires_grad]
    ends = [get_gradient_edge(parameter).node for parameter in parameters]
    for number in range(len(ends)):
        ends[number].metadata["first"] = True
    training.run(last=1)  # with the checks of the model, which are made once
    ends.clear()
    assert not any("first" in get_gradient_edge(parameter).node.metadata for parameter in parameters)
