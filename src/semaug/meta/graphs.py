"""Training steps as CUDA graphs: a step is captured once for each kind, and then replayed.

A step launches thousands of kernels, and on small images the host cannot launch them as fast as a GPU computes. A
replay is a single launch of the same kernels with the same arguments, so its results are equal to the bit. What changes
from step to step is therefore in tensors that stay where they are: images and labels, learning rates, λ, and what the
pipelined order carries from one step to the next.

Steps of one kind run the same kernels. The first few are ordinary steps. The last of them is observed: it shows which
random states the step uses, and whether the host waits for the GPU in it, in which case no step is captured. A capture
executes nothing.
"""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from semaug.meta.algorithm import Algorithm1
from semaug.meta.diagnostics import Metrics
from semaug.meta.optimizers import capture_obstacle
from semaug.meta.updates import Update, is_shape, map_update
from semaug.network.randomness import GraphRandomness, RandomState, Rehearsal
from semaug.util import distributed
from semaug.util.devices import stream_for

WARM_UP = 3  # ordinary steps of the first kind before it is captured
MOST_GRAPHS = 8  # steps of further kinds are not captured

Run = Callable[[Tensor, Tensor], Metrics]
"""Takes a step on images and labels."""


class StepGraphs:
    """Takes steps, by CUDA graphs where that is possible.

    After a replay the parameters' ``.grad`` is None.

    Args:
        algorithm: The algorithm, whose state on the host follows the replays.
        run: Takes an ordinary step: two half steps of the algorithm.
    """

    def __init__(self, algorithm: Algorithm1, run: Run) -> None:
        self._algorithm, self._executor, self._run = algorithm, algorithm.executor, run
        self._obstacle: str | None = None  # why no step is captured any more
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Forget all graphs. Call it when tensors that they use were replaced."""
        self._kinds: dict[Any, _Kind] = {}
        self._inputs: dict[Any, Tensor] = {}
        self._carried: dict[Any, _Carried] = {}
        self._fingerprint: list[Any] = []
        self._pool: Any = None

    @property
    def captured(self) -> int:
        """The number of graphs."""
        return sum(kind.graph is not None for kind in self._kinds.values())

    def step(self, images: Tensor, labels: Tensor) -> Metrics:
        """Take a step on images (N, 3, H, W) and labels (N,) or (N, C); returns its metrics."""
        obstacle = self._obstacle or self._present_obstacle()
        if obstacle is not None:
            self._warn(obstacle)
            return self._run(images, labels)
        fingerprint = self._make_fingerprint()
        if fingerprint != self._fingerprint:
            self.reset()
            self._fingerprint = fingerprint
        kind = self._kind_of(images, labels)
        if kind is None:
            return self._run(images, labels)
        if kind.graph is None:
            kind.steps += 1
            if kind.rehearsal is None:
                # Only the first kind needs more than one ordinary step: optimisers make their states in it.
                last = self.captured > 0 or kind.steps >= WARM_UP
                return self._rehearse(kind, images, labels) if last else self._run(images, labels)
            if not self._capture(kind, images, labels):
                return self._run(images, labels)
        return self._replay(kind, images, labels)

    # -- conditions for a capture -------------------------------------------------------------------------------------

    def _present_obstacle(self) -> str | None:
        executor = self._executor
        if distributed.is_running():
            return "several processes train together"
        if executor.mixed.scaler is not None:
            return "the gradient scaler decides on the host whether a step is taken"
        if executor.passes.check_values:
            return "check_values reads values on the host"
        optimizers = [executor.optimizer, executor.meta_optimizer]
        return next((reason for o in optimizers if o is not None and (reason := capture_obstacle(o))), None)

    def _warn(self, obstacle: str) -> None:
        if not self._has_warned and distributed.rank() == 0:
            warnings.warn(f"semaug: training steps do not use CUDA graphs, because {obstacle}", stacklevel=4)
        self._has_warned = True

    def _give_up(self, obstacle: str) -> None:
        self.reset()
        self._obstacle = obstacle
        self._warn(obstacle)

    def _make_fingerprint(self) -> list[Any]:
        """Constants of a captured graph: addresses of tensors, and settings of modules and optimisers."""
        executor = self._executor
        values: list[Any] = []
        for module in (executor.network.model, executor.source, self._algorithm.strength):
            for part in module.modules():
                values += [value for value in vars(part).values() if type(value) in (bool, int, float)]
                tensors = (*part._parameters.values(), *part._buffers.values())
                values += [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors if tensor is not None]
        for optimizer in (executor.optimizer, executor.meta_optimizer):
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                values += [_address(value) for name, value in group.items() if name != "params"]
                for parameter in group["params"]:
                    values += [_address(value) for value in optimizer.state.get(parameter, {}).values()]
        return values + [tensor.data_ptr() for tensor in executor.diagnostics.initial]

    def _kind_of(self, images: Tensor, labels: Tensor) -> "_Kind | None":
        """The kind of the next step; None if there are too many kinds."""
        algorithm = self._algorithm
        differentiated = tuple(algorithm.is_differentiated(later) for later in (0, 1))
        carried = None if algorithm.last_real is None else _structure(algorithm.last_real)
        key = _layout(images), _layout(labels), differentiated, self._executor.precision, carried
        if key not in self._kinds and len(self._kinds) == MOST_GRAPHS:
            return None
        return self._kinds.setdefault(key, _Kind())

    # -- ordinary step, capture, replay -------------------------------------------------------------------------------

    def _rehearse(self, kind: "_Kind", images: Tensor, labels: Tensor) -> Metrics:
        """Take an ordinary step and observe it."""
        kind.rehearsal = Rehearsal(images.device, _states(self._algorithm.last_real))
        with kind.rehearsal.running(), _noting_waits() as waits:
            metrics = self._run(images, labels)
        obstacle = kind.rehearsal.obstacle
        if waits:
            obstacle = f"the host waits for the GPU within a step ({waits[0]})"
        if obstacle is not None:
            self._give_up(obstacle)
        elif self._algorithm.last_real is not None:
            self._carried_like(self._algorithm.last_real)  # allocated here, outside the memory of the graphs
        return metrics

    def _carried_like(self, update: Update) -> "_Carried":
        key = _structure(update)
        if key not in self._carried:
            self._carried[key] = _Carried(update)
        return self._carried[key]

    def _static(self, name: str, like: Tensor) -> Tensor:
        key = name, _layout(like)
        if key not in self._inputs:
            self._inputs[key] = _empty_like(like)
        return self._inputs[key]

    def _capture(self, kind: "_Kind", images: Tensor, labels: Tensor) -> bool:
        """Capture the next step without taking it; returns whether that was possible."""
        algorithm = self._algorithm
        before = algorithm.half_steps, algorithm.last_real
        try:
            self._record(kind, images, labels)
        except Exception as error:
            kind.graph = None
            algorithm.strength.discard()
            if self._pool is not None:
                with suppress(RuntimeError):  # if the failed capture still takes memory from the pool
                    torch._C._cuda_endAllocateToPool(images.device.index, self._pool)
            reason = str(_first_cause(error)).strip().partition("\n")[0]
            self._give_up(f"a step could not be captured ({type(_first_cause(error)).__name__}: {reason})")
        finally:
            algorithm.half_steps, algorithm.last_real = before
            self._drop_gradients()  # they are in the memory of the graph
        return kind.graph is not None

    def _record(self, kind: "_Kind", images: Tensor, labels: Tensor) -> None:
        algorithm = self._algorithm
        assert kind.rehearsal is not None
        kind.images, kind.labels = self._static("images", images), self._static("labels", labels)
        carried = None
        if algorithm.last_real is not None:
            kind.carried_in = self._carried_like(algorithm.last_real)
            carried = map_update(kind.carried_in.update, _same, _token)
        randomness = kind.randomness = GraphRandomness(kind.rehearsal, _states(carried))
        self._drop_gradients()
        gc.collect()  # a forgotten autograd graph would tie the parameters' gradients to another stream
        torch.clear_autocast_cache()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), stream_for("capture", images.device)  # captures share its memory
        with (
            torch.cuda.device(images.device),
            randomness.capturing(graph),
            # Other threads load images in the meantime.
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._run_in_place(kind, carried)
        kind.graph = graph

    def _run_in_place(self, kind: "_Kind", carried: Update | None) -> None:
        """Take a step whose inputs and results are in tensors that stay where they are."""
        algorithm = self._algorithm
        algorithm.last_real = carried
        metrics = self._run(kind.images, kind.labels)
        if algorithm.last_real is not None:
            out = self._carried[_structure(algorithm.last_real)]
            out.copy_from(algorithm.last_real)
            kind.carried_out = out.like(algorithm.last_real)
        kind.metrics = {name: value.detach() for name, value in metrics.items()}

    def _replay(self, kind: "_Kind", images: Tensor, labels: Tensor) -> Metrics:
        algorithm = self._algorithm
        assert kind.graph is not None and kind.randomness is not None  # noqa: PT018
        kind.images.copy_(images)
        kind.labels.copy_(labels)
        if kind.carried_in is not None:
            assert algorithm.last_real is not None
            kind.carried_in.copy_from(algorithm.last_real)
        states = kind.randomness.prepare_replay(_states(algorithm.last_real))
        kind.graph.replay()
        algorithm.half_steps += 2
        algorithm.last_real = None if kind.carried_out is None else map_update(kind.carried_out, _same, states.of)
        copies = {name: torch.empty_like(value) for name, value in kind.metrics.items()}
        torch._foreach_copy_(list(copies.values()), list(kind.metrics.values()))  # the next replay overwrites them
        return copies

    def _drop_gradients(self) -> None:
        for optimizer in (self._executor.optimizer, self._executor.meta_optimizer):
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
        self._executor.network.model.zero_grad(set_to_none=True)


@dataclass
class _Kind:
    """Steps that run the same kernels."""

    steps: int = 0  # ordinary ones
    rehearsal: Rehearsal | None = None
    randomness: GraphRandomness | None = None
    graph: torch.cuda.CUDAGraph | None = None
    images: Tensor = field(default_factory=lambda: torch.empty(0))
    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    carried_in: "_Carried | None" = None
    carried_out: Update | None = None  # with tokens in place of random states
    metrics: Metrics = field(default_factory=dict)


class _Carried:
    """An update that crosses from one step to the next, in tensors that stay where they are.

    Args:
        update: An update of the same kind.
    """

    def __init__(self, update: Update) -> None:
        copies: dict[Any, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            key = tensor.data_ptr(), _layout(tensor)
            if key not in copies:
                copies[key] = tensor.new_zeros(()).expand(tensor.shape) if is_shape(tensor) else _empty_like(tensor)
            return copies[key]

        self.update = map_update(update, copy, _same)

    def copy_from(self, update: Update) -> None:
        """Take over the values of another update of the same kind."""
        pairs: dict[torch.dtype, dict[int, tuple[Tensor, Tensor]]] = {}
        for target, source in zip(_tensors(self.update), _tensors(update), strict=True):
            if target is not source and not is_shape(target):
                pairs.setdefault(target.dtype, {})[id(target)] = target, source
        for of_type in pairs.values():
            targets, sources = zip(*of_type.values(), strict=True)
            torch._foreach_copy_(targets, sources)

    def like(self, update: Update) -> Update:
        """An update with the tensors of this one and the rest of another."""
        tensors = iter(_tensors(self.update))
        return map_update(update, lambda _: next(tensors), _same)


def _same(value: Any) -> Any:
    return value


def _token(state: RandomState) -> RandomState:
    """A random state that is known by its identity alone."""
    return state[0], state[1]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, requires_grad=False)


def _tensors(update: Update) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_update(update, lambda tensor: tensors.append(tensor) or tensor, _same)  # type: ignore[func-returns-value]
    return tensors


def _states(update: Update | None) -> list[RandomState]:
    states: list[RandomState] = []
    if update is not None:
        map_update(update, _same, lambda state: states.append(state) or state)  # type: ignore[func-returns-value]
    return states


def _structure(update: Update) -> Any:
    """The properties that two updates of the same kind have in common."""
    parts = []
    for part in update.batch:
        assert part.tape is not None
        late = part.tape.late
        bounds = None if late is None else tuple(call.bounds for call in late.calls)
        names = tuple((name, len(calls)) for name, calls in part.tape.outputs.items())
        parts.append((part.share, part.weight, bounds, names))
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(update))
    return tuple(parts), tuple(update.parameters), update.precision, shapes


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _first_cause(error: BaseException) -> BaseException:
    """The error that the end of a capture has hidden."""
    while error.__context__ is not None:
        error = error.__context__
    return error


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """List where this thread makes the host wait for the GPU."""
    waits: list[str] = []
    thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, *rest)
            elif threading.get_ident() == thread:
                waits.append(f"{filename.rpartition('/')[2]}:{lineno}")

        warnings.filterwarnings("ignore", message=".*Synchronization debug mode")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
