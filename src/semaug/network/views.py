"""Views of a model: shallow copies of its module tree that record and replay the outputs of early modules.

A view shares the model's parameters and never changes the model. Its head is the identity, so that a pass returns the
features. The output of each early module can be recorded on a :class:`Tape`; a later pass can replay it from there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree

from semaug.network.randomness import RandomState, random_state, restored_random_state, set_random_state
from semaug.network.recording import OperatorRecord, OperatorRecorder


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules of `model` into evaluation mode, and restore each module's own mode at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@dataclass
class Tape:
    """A record of one forward pass, from which its late part can be replayed.

    Args:
        images: The batch.
        random_state: The random generators at the start of the pass.
        outputs: For each early module, the output of each call and the random generators after it.
        late: Record of the late part's operators, which makes a tangent pass cheaper; None if not wanted.
        rest: Rest of a composite model's loss, with its graph; None for other models.
    """

    images: Tensor
    random_state: RandomState
    outputs: dict[str, list[tuple[Any, RandomState]]] = field(default_factory=dict)
    late: OperatorRecord | None = None
    rest: Tensor | None = None

    @classmethod
    def start(cls, images: Tensor, record: bool = False) -> "Tape":
        """An empty tape for a pass on `images` that begins now, with an operator record if `record`."""
        return cls(images.detach(), random_state(images.device), late=OperatorRecord() if record else None)


class _SyncBatchNorm(nn.SyncBatchNorm):
    """torch's layer in a view: it calls `F.batch_norm`, which can be differentiated twice and in forward mode."""

    forward = _BatchNorm.forward


class View:
    """A shallow copy of a model that follows the model's later changes.

    Args:
        model: The model.
        head: Name of the head, which is replaced by the identity.
        early: Names of the early modules.
        tracks: Whether the view shares the buffers, so that BatchNorm's running statistics change. If not, BatchNorm in
            training mode normalises by the batch and updates nothing, and early modules run without a graph.
    """

    # The present pass:
    mode: Literal["run", "record", "replay"] = "run"
    tape: Tape | None = None
    recorder: OperatorRecorder | None = None

    def __init__(self, model: nn.Module, head: str, early: set[str], tracks: bool) -> None:
        self.tracks = tracks
        self.early: list[EarlyModule] = []
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # a module and its copy
        self.root = self._copy(model, "", head, early, {})
        self.call: Callable[[Tensor], Any] = self.root  # or a compiled version of it
        names = {parameter: name for name, parameter in model.named_parameters()}
        # Where a parameter is used: module, copy and attribute; several places if it is shared.
        self._places: dict[str, list[tuple[nn.Module, nn.Module, str]]] = {name: [] for name in names.values()}
        for module, copy in self._pairs:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._places[names[parameter]].append((module, copy, key))
        # Methods that a module has as attributes, such as one of several as its `forward`, are bound to the module.
        self._bound = [
            (copy, key, value)
            for module, copy in self._pairs
            for key, value in module.__dict__.items()
            if isinstance(value, MethodType) and value.__self__ is module
        ]
        self._finish_pass()
        self.refresh()

    def _copy(
        self, module: nn.Module, name: str, head: str, early: set[str], seen: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module in seen:
            return seen[module]
        kind = _SyncBatchNorm if type(module) is nn.SyncBatchNorm else module.__class__
        copy: nn.Module = kind.__new__(kind)
        copy.__dict__.update(module.__dict__)
        seen[module] = copy
        self._pairs.append((module, copy))
        copy.__dict__["_modules"] = {
            key: None if child is None else self._copy(child, f"{name}.{key}" if name else key, head, early, seen)
            for key, child in module._modules.items()
        }
        if name == head:
            return nn.Identity()
        if name in early:
            self.early.append(EarlyModule(name, copy, self))
            seen[module] = self.early[-1]  # wherever else the module is used, too
        return seen[module]

    def refresh(self) -> None:
        """Take over the model's changes since: train or eval mode, drop rates, replaced parameters."""
        for module, copy in self._pairs:
            children = copy.__dict__["_modules"]
            copy.__dict__.update(module.__dict__)
            copy.__dict__["_modules"] = children
            copy.__dict__["_compiled_call_impl"] = None
            if not self.tracks:
                copy.__dict__["_parameters"] = dict(module._parameters)
                if isinstance(module, _NormBase) and module.training:
                    copy.__dict__["_buffers"] = dict.fromkeys(module._buffers)
        for copy, key, method in self._bound:
            copy.__dict__[key] = MethodType(method.__func__, copy)

    def model_parameters(self) -> dict[str, Any]:
        """The model's parameters by name; faster than `named_parameters`."""
        return {name: places[0][0]._parameters[places[0][2]] for name, places in self._places.items()}

    @contextmanager
    def at(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other values of some `parameters`, by name, in a view that does not track."""
        assert not self.tracks
        places = [(tensor, place) for name, tensor in parameters.items() for place in self._places[name]]
        for tensor, (_, copy, key) in places:
            copy._parameters[key] = tensor  # type: ignore[assignment]
        try:
            yield
        finally:
            for _, (module, copy, key) in places:
                copy._parameters[key] = module._parameters[key]

    @contextmanager
    def recording(self, tape: Tape, recorder: OperatorRecorder | None = None) -> Iterator[None]:
        """Record the early modules' outputs on `tape`, and the late part's operators by `recorder`."""
        self.mode, self.tape, self.recorder = "record", tape, recorder
        try:
            with recorder or nullcontext():
                yield
        finally:
            self._finish_pass()

    @contextmanager
    def replaying(self, tape: Tape) -> Iterator[None]:
        """Replay the early modules' outputs from `tape`, with the random numbers of the recorded pass."""
        self.mode, self.tape = "replay", tape
        try:
            with restored_random_state(tape.images.device, tape.random_state):
                yield
        finally:
            self._finish_pass()

    def _finish_pass(self) -> None:
        self.mode, self.tape, self.recorder = "run", None, None
        self.calls: Counter[str] = Counter()  # of early modules that were replayed


@contextmanager
def _paused(recorder: OperatorRecorder) -> Iterator[None]:
    """Suspend the recorder's mode inside the block; afterwards it is active again, also after an error."""
    recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        recorder.__enter__()  # type: ignore[no-untyped-call]


class EarlyModule(nn.Module):
    """Stands for an early module in a view: runs it, records its output, or replays the recorded output.

    Args:
        name: The module's name in the model.
        inner: The module's copy.
        view: The view, whose mode decides.
    """

    def __init__(self, name: str, inner: nn.Module, view: View) -> None:
        super().__init__()
        self.name, self.inner, self.view = name, inner, view
        self.needed = True  # by the late part; otherwise only the output's shape is recorded
        self.overwritten = False  # the output, in place, by later operators: the tape then needs a copy

    def __getattr__(self, name: str) -> Any:
        """Attributes that the model reads from the module, such as the grid of a patch embedding."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, or return its recorded output."""
        view = self.view
        if view.mode == "replay":
            return self._replay()
        # The recorder records the late part only.
        with nullcontext() if view.recorder is None else _paused(view.recorder):
            with nullcontext() if view.tracks else torch.no_grad():
                output = self.inner(*args, **kwargs)
            if view.mode == "record":
                self.record(output)
        return output

    def record(self, output: Any) -> None:
        """Append an `output`, and the random generators after it, to the tape."""
        tape = self.view.tape
        assert tape is not None
        stored = pytree.tree_map_only(Tensor, self._stored, output)
        tape.outputs.setdefault(self.name, []).append((stored, random_state(tape.images.device)))

    def _stored(self, tensor: Tensor) -> Tensor:
        if not self.needed:
            return tensor.new_zeros(()).expand(tensor.shape)
        return tensor.detach().clone() if self.overwritten else tensor.detach()

    def _replay(self) -> Any:
        tape = self.view.tape
        assert tape is not None
        calls = tape.outputs[self.name]
        output, state = calls[self.view.calls[self.name] % len(calls)]  # a checkpointed module is called once more
        self.view.calls[self.name] += 1
        set_random_state(state, tape.images.device)
        return pytree.tree_map_only(Tensor, torch.clone, output) if self.overwritten else output
