"""Split a model into an early and a late part, and check the split by running the model on noise."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from semaug.isda.head import Head, weight_and_bias
from semaug.isda.precision import widened
from semaug.network.blocks import below
from semaug.network.hooks import hooked
from semaug.network.randomness import restored_random_state
from semaug.network.tangents import without_jit_warning
from semaug.network.views import View, evaluation_mode

OTHER_HEAD = "if another layer makes the logits, pass semaug.Network(model, head=NAME)"
"""Advice for models where the wrong layer was found as the head."""

_TOLERANCE = 1e-2  # relative difference of derivatives


@torch.enable_grad()
def split_model(
    model: nn.Module,
    head: tuple[str, Head],
    early_parameters: set[str],
    run: Callable[[View, Tensor, None], tuple[Tensor, Any]],
    run_head: Callable[[nn.Module, Tensor], Tensor],
    images: Tensor,
) -> tuple[View, View, set[str]]:
    """Make both views of a model.

    Args:
        model: The model; its modes and the random generators are left as they are.
        head: Name and module of its head.
        early_parameters: Names of the parameters of the early blocks.
        run: The whole pass of a view on images, without labels; returns features (N, D), and None.
        run_head: The pass of the model as far as the head needs it; returns logits (N, C).
        images: A batch like those to come.

    Returns:
        The view for ordinary passes, the one that updates no statistics, and the names of all early parameters: also
        those outside the blocks on which early outputs depend, such as an embedding.

    Raises:
        ValueError: The model's output is not that of its head alone.
    """
    early = set(early_parameters)
    with evaluation_mode(model), restored_random_state(images.device), _noise_in_head(model, head[1]):
        noise = torch.randn_like(images[:2].detach())
        while True:
            modules, logits = _early_modules(model, early, lambda: run_head(model, noise))
            main, other = (View(model, head[0], modules, tracks) for tracks in (True, False))
            outputs, features = _early_outputs(main, head, logits, lambda view: run(view, noise, None)[0])
            late = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in early}
            acting = {name for output in outputs for name in _used(output.tensor, late)}
            if not acting:
                break
            early |= acting
    needed = {outputs[int(i)].name for i in _used(features, {str(i): output.leaf for i, output in enumerate(outputs)})}
    overwritten: set[str] = set()
    changed: set[int] = set()  # tensors, of which a later output may be an alias
    for output in reversed(outputs):
        if output.shown._version != output.version or id(output.shown) in changed:
            overwritten.add(output.name)
            changed.add(id(output.tensor))
    for module in (*main.early, *other.early):
        module.needed, module.overwritten = module.name in needed, module.name in overwritten
    return main, other, early


@contextmanager
def _noise_in_head(model: nn.Module, head: Head) -> Iterator[None]:
    """Replace the parameters of the head by noise: a head that starts at zero would hide the layers after it."""
    noise = {
        parameter: nn.Parameter(torch.randn_like(parameter) * parameter[0].numel() ** -0.5, parameter.requires_grad)
        for parameter in head._parameters.values()
        if parameter is not None
    }
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter in noise
    ]
    try:
        for parameters, key, parameter in places:
            parameters[key] = noise[parameter]
        yield
    finally:
        for parameters, key, parameter in places:
            parameters[key] = parameter


def _early_modules(model: nn.Module, early_parameters: set[str], run: Callable[[], Tensor]) -> tuple[set[str], Tensor]:
    """Names of the outermost modules without late parameters that run before the early part ends; and the logits."""
    late = [name for name, _ in model.named_parameters() if name not in early_parameters]
    candidates: dict[str, bool] = {}  # name → whether it has parameters
    for name, module in model.named_modules() if early_parameters else ():
        if name and not any(below(parameter, name) for parameter in late):
            candidates[name] = any(True for _ in module.parameters())
    order: list[str] = []  # of calls that no other candidate makes
    running: list[str] = []
    inner: set[str] = set()

    def leave() -> None:
        name = running.pop()
        if running:
            inner.add(name)
        else:
            order.append(name)

    with ExitStack() as stack, torch.no_grad():
        for name in candidates:
            module = model.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(lambda *_, called=name: running.append(called)))
            stack.enter_context(module.register_forward_hook(lambda *_: leave()))
        logits = run()
    last = max((i for i, name in enumerate(order) if candidates[name]), default=-1)
    # A module without parameters that is called several times (a shared activation), or by another candidate too, is
    # run again in a replay: cheaper than distinguishing its calls.
    return {name for name in order[: last + 1] if candidates[name] or order.count(name) == 1} - inner, logits


class _Output(NamedTuple):
    """An output tensor of an early module, and the constant that took its place in the pass."""

    name: str
    tensor: Tensor
    leaf: Tensor
    shown: Tensor  # a copy of the leaf, which later operators may overwrite
    version: int


def _early_outputs(
    view: View, head: tuple[str, Head], expected: Tensor, run: Callable[[View], Tensor]
) -> tuple[list[_Output], Tensor]:
    """Run a view with constants in place of the early outputs, and check that the output is ``head(features)``."""
    outputs: list[_Output] = []

    def cut(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaf = tensor.detach().requires_grad_()
        shown = leaf.clone()
        outputs.append(_Output(name, tensor, leaf, shown, shown._version))
        return shown

    def cut_all(name: str, output: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: cut(name, tensor), output)

    message = (
        f"the output of {type(view.root).__name__} is not that of its linear layer {head[0]!r} alone, and the method "
        f"needs a single linear head; {OTHER_HEAD}"
    )
    try:
        with ExitStack() as stack:
            for module in view.early:
                stack.enter_context(hooked(module, partial(cut_all, module.name)))
            features = run(view)
        logits = F.linear(features, *weight_and_bias(head[1]))
        scale = float(logits.detach().abs().max()) + 1.0
        same = torch.allclose(logits, expected.flatten(1), rtol=1e-3, atol=1e-3 * scale)
    except (RuntimeError, TypeError) as error:
        raise ValueError(message) from error
    if not same:
        raise ValueError(message)
    return outputs, features


def _used(output: Tensor, inputs: dict[str, Any]) -> set[str]:
    """Names of the inputs on which an output depends."""
    if not output.requires_grad or not inputs:
        return set()
    gradients = torch.autograd.grad(output.sum(), list(inputs.values()), allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(inputs, gradients, strict=True) if gradient is not None}


@torch.enable_grad()
def check_late_part(
    model: nn.Module,
    head: Head,
    late_parameters: Callable[[], Mapping[str, Tensor]],
    run_head: Callable[[nn.Module, Tensor], Tensor],
    logits_at: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    images: Tensor,
    forward_mode: bool,
) -> bool:
    """Check, on noise, that a view at other late parameters is the model at them, and that its pass can be repeated.

    The former by derivatives: those of the logits in the late parameters must be the model's own.

    Args:
        model: The model.
        head: Its head.
        late_parameters: The late parameters of the model, by name.
        run_head: The pass of the model as far as the head needs it; returns logits (N, C).
        logits_at: The logits at other late parameters, by the view that updates no statistics.
        images: A batch like those to come.
        forward_mode: Whether to compare with forward mode too.

    Returns:
        Whether forward mode has the same derivatives. It does not know `torch.no_grad` inside the model.

    Raises:
        ValueError: The meta loop cannot run the model.
    """
    kind = type(model).__name__
    with restored_random_state(images.device):
        noise = torch.randn_like(images[:2].detach())
        versions = {name: buffer._version for name, buffer in model.named_buffers()}
        drawn = _host_randomness()
        logits_at({}, noise)
        changed = [name for name, buffer in model.named_buffers() if buffer._version != versions[name]]
        if changed:
            raise ValueError(
                f"the meta loop repeats passes, and in {kind} every pass changes the buffer {changed[0]!r}; "
                "learn Σ with a model without such layers"
            )
        if drawn != _host_randomness():
            raise ValueError(
                f"the meta loop repeats passes, and {kind} draws random numbers with Python or NumPy, which would "
                "differ; draw them with torch"
            )
        with _noise_in_head(model, head):
            own = late_parameters()
            point = {name: parameter.detach().clone().requires_grad_() for name, parameter in own.items()}
            with evaluation_mode(model):
                logits = run_head(model, noise).flatten(1)
            towards = torch.randn_like(logits)
            expected = _gradients(logits, towards, own.values())
            with evaluation_mode(model):  # entered anew, which clears what timm's attention keeps from pass to pass
                through = _gradients(logits_at(point, noise), towards, point.values())
            # Rounding is all that there is in some derivatives, as in those of an attention's key biases.
            rounding = 1e-4 * torch.stack([gradient.norm() for gradient in expected]).norm()
            for name, a, b in zip(own, expected, through, strict=True):
                if (a - b).norm() > _TOLERANCE * a.norm() + rounding:
                    raise ValueError(
                        f"the meta loop cannot run {kind} at other values of its parameter {name!r}: the weight of its "
                        "head is shared or computed, the logits are not those of the head, a hook changes its "
                        "gradient, or a module inside has another `forward` than its class (after torch.compile, say; "
                        "use `module.compile()`)"
                    )
            if not forward_mode or widened(noise) is not noise:  # forward mode in half precision proves nothing
                return True
            square = sum(float(gradient.square().sum()) for gradient in through)
            with evaluation_mode(model):
                along = _derivative_along(point, through, lambda values: (logits_at(values, noise) * towards).sum())
            return along is None or not abs(along - square) > _TOLERANCE * square


@torch.no_grad()
def _derivative_along(
    point: Mapping[str, Tensor], direction: Iterable[Tensor], function: Callable[[Mapping[str, Tensor]], Tensor]
) -> float | None:
    """The derivative of a function along a direction, in forward mode; None if an operator has no formula for it."""
    try:
        with without_jit_warning(), sdpa_kernel(SDPBackend.MATH), dual_level():
            pairs = zip(point.items(), direction, strict=True)
            value = function({name: make_dual(at.detach(), tangent) for (name, at), tangent in pairs})
            tangent = unpack_dual(value).tangent
            return None if tangent is None else float(tangent)
    except NotImplementedError:
        return None


def _host_randomness() -> tuple[object, ...]:
    """The states of the random generators of Python and NumPy."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def _gradients(output: Tensor, towards: Tensor, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    total = (output * towards).sum()
    return torch.autograd.grad(total, list(inputs), materialize_grads=True)
