"""The pseudo step is the optimiser's own step, and its sensitivity that step's derivative."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from semaug.meta.sensitivity import pseudo_step

RULES = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-dampened": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-maximize": lambda p: SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "adam": lambda p: Adam(p, lr=0.1, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.1),
}


def prepared(rule: str, steps: int) -> tuple[Optimizer, list[nn.Parameter], list[Tensor]]:
    parameters = [
        nn.Parameter(torch.randn(3, 2, dtype=torch.float64)),
        nn.Parameter(torch.randn(4, dtype=torch.float64)),
    ]
    optimizer = RULES[rule]([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}])
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, parameters, [torch.randn_like(parameter) for parameter in parameters]


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_pseudo_step_is_the_optimisers_step_and_leaves_its_state(rule: str, steps: int) -> None:
    optimizer, parameters, gradients = prepared(rule, steps)
    before = copy.deepcopy(optimizer.state_dict())
    predicted = pseudo_step(optimizer, parameters, gradients)
    after = optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    for parameter, (point, _) in zip(parameters, predicted, strict=True):
        torch.testing.assert_close(point, parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("rule", RULES)
def test_sensitivity_is_the_derivative_of_the_step(rule: str, steps: int) -> None:
    optimizer, parameters, gradients = prepared(rule, steps)
    epsilon = 1e-5
    up = pseudo_step(optimizer, parameters, [g + epsilon for g in gradients])
    down = pseudo_step(optimizer, parameters, [g - epsilon for g in gradients])
    for (_, slope), (high, _), (low, _) in zip(pseudo_step(optimizer, parameters, gradients), up, down, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(slope, dtype=high.dtype).expand_as(high), (high - low) / (2 * epsilon), rtol=1e-6, atol=1e-8
        )


def test_adam_has_a_finite_sensitivity_where_no_gradient_was_seen() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    [(point, slope)] = pseudo_step(Adam([parameter], lr=0.1), [parameter], [torch.zeros_like(parameter)])
    assert point.isfinite().all()
    assert torch.as_tensor(slope).isfinite().all()


def test_other_optimisers_take_a_plain_gradient_step_and_say_so() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = RMSprop([parameter], lr=0.5)
    with pytest.warns(UserWarning, match="RMSprop is a plain gradient step"):
        [(point, slope)] = pseudo_step(optimizer, [parameter], [torch.tensor([1.0, 2.0], dtype=torch.float64)])
    assert point.tolist() == [0.5, 0.0]
    assert slope == -0.5


class Wrapper:
    """As Lightning and Accelerate wrap an optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapped_optimiser_follows_its_own_rule() -> None:
    parameter, gradient = torch.nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    adam = torch.optim.AdamW([parameter], lr=0.1)
    found = [pseudo_step(each, [parameter], [gradient])[0] for each in (adam, Wrapper(adam))]
    torch.testing.assert_close(*found, rtol=0, atol=0)
