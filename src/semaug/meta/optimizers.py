"""Optimisers whose steps a CUDA graph can hold, and their learning rates and states."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from semaug.util import devices

_OF_DEVICE = ("foreach", "fused", "capturable")  # settings that fit the device and do not belong to the state


def make_optimizer(
    kind: type[SGD] | type[Adam] | type[AdamW],
    groups: Iterable[Mapping[str, Any]],
    capturable: bool = True,
    **options: Any,
) -> Optimizer:
    """Make an optimiser whose step a CUDA graph can hold if the parameters are on a GPU.

    There the learning rates are tensors, which :func:`set_learning_rate` fills.

    Args:
        kind: Class of the optimiser.
        groups: Parameter groups, each a dictionary with at least "params", a list, and "lr".
        capturable: False for an optimiser that is made as on a CPU.
        **options: Further arguments of the class.

    Returns:
        The optimiser.
    """
    own = [dict(group) for group in groups]
    device = next((parameter.device for group in own for parameter in group["params"]), torch.device("cpu"))
    if devices.has_graphs(device) and capturable:
        for group in own:  # in fp32, which the fused kernels read
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        options |= {"fused": True} if kind is SGD else {"fused": True, "capturable": True}
    optimizer = kind(own, **options)
    # torch warns if a capturable optimiser takes a step outside a graph, which the first steps do.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


def set_learning_rate(group: dict[str, Any], value: float) -> None:
    """Set the learning rate of a parameter group; a tensor keeps its place in memory."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the state of an optimiser, possibly from a run on another kind of device.

    The tensors of its learning rates stay where they are.

    Raises:
        ValueError: If the state does not fit.
    """
    groups, rates, saved = [], [group["lr"] for group in optimizer.param_groups], state["param_groups"]
    for group, loaded in zip(optimizer.param_groups, saved, strict=True):
        groups.append({**loaded, **{name: group[name] for name in _OF_DEVICE if name in group}})
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, rate, loaded in zip(optimizer.param_groups, rates, saved, strict=True):
        group["lr"] = rate
        set_learning_rate(group, float(loaded["lr"]))


def capture_obstacle(optimizer: Optimizer) -> str | None:
    """Say in a clause why a CUDA graph cannot hold the steps of an optimiser; None if it can."""
    name = type(optimizer).__name__
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        return f"{name} wraps another optimiser in Python code"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks, which are Python code"
    for group in optimizer.param_groups:
        if not (isinstance(group["lr"], Tensor) and devices.has_graphs(group["lr"].device)):
            return f"the learning rate of {name} is not a tensor on the GPU"
        if not group.get("fused" if type(optimizer) is SGD else "capturable"):
            return f"{name} was not made with {'fused' if type(optimizer) is SGD else 'capturable'}=True"
    return None
