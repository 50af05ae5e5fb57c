"""Views of a model: shallow copies of its module tree that keep or play back what early modules put out.

A view shares the model's parameters, and nothing of the model is changed. It is kept in step with the model, so that a
drop rate or a mode that the owner changes later holds in the view too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from semaug.network.tangents import Record, Recorder

RandomState = tuple[Tensor, Tensor | None]


def random_state(device: torch.device) -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@dataclass
class Tape:
    """What one forward pass leaves for playing its late part again: images, early outputs, random-number states."""

    images: Tensor
    random_state: RandomState
    outputs: dict[str, list[tuple[Any, RandomState]]] = field(default_factory=dict)
    late: Record | None = None  # of the late part's operators: makes a tangent pass cheaper
    rest: Tensor | None = None  # of the loss, with its graph, where the model has more than the head's

    @classmethod
    def start(cls, images: Tensor, record: bool = False) -> "Tape":
        return cls(images.detach(), random_state(images.device), late=Record() if record else None)

    def record(self, early: "Early", output: Any) -> None:
        """Keep an early module's output, and the random numbers to come, for each of its calls in order."""
        kept = pytree.tree_map_only(Tensor, early.to_keep, output)
        self.outputs.setdefault(early.name, []).append((kept, random_state(self.images.device)))

    def play(self, early: "Early", call: int) -> Any:
        output, state = self.outputs[early.name][call]
        set_random_state(state, self.images.device)
        return pytree.tree_map_only(Tensor, torch.clone, output) if early.overwritten else output


class Early(nn.Module):
    """Stands for an early module in a view: runs it, keeping its output on a tape, or plays the output back."""

    def __init__(self, name: str, inner: nn.Module, constant: bool) -> None:
        super().__init__()
        self.name, self.inner = name, inner
        self.constant = constant  # run without a graph: only the late part's gradient is wanted
        self.needed = True  # by the late part; otherwise only the shape of the output is kept
        self.overwritten = False  # in place, by what follows: then the tape needs a copy
        self.records = False  # on `recording`, a new tape for each pass; a compiled pass looks at this flag alone
        self.recording: Tape | None = None
        self.recorder: Recorder | None = None
        self.playing: Tape | None = None
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        """What the model looks up on the module, such as the grid of a patch embedding."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.playing is not None:
            self.calls += 1
            return self.playing.play(self, self.calls - 1)
        if self.recorder is not None:  # which notes what the late part does
            self.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        with torch.no_grad() if self.constant else nullcontext():
            output = self.inner(*args, **kwargs)
        if self.records:
            if torch.compiler.is_compiling():
                _outside_the_graph(self, output)
            else:
                self.record(output)
        if self.recorder is not None:
            self.recorder.__enter__()  # type: ignore[no-untyped-call]
        return output

    def record(self, output: Any) -> None:
        assert self.recording is not None
        self.recording.record(self, output)

    def to_keep(self, tensor: Tensor) -> Tensor:
        if not self.needed:
            return tensor.new_zeros(()).expand(tensor.shape)
        return tensor.detach().clone() if self.overwritten else tensor.detach()


def _outside_the_graph(early: Early, output: Any) -> None:
    early.record(output)


@cache
def keep_recording_out_of_graphs() -> None:
    """To be called before a view is compiled; not on import, since torch's compiler takes seconds to import."""
    global _outside_the_graph
    _outside_the_graph = torch.compiler.disable(_outside_the_graph)


@dataclass
class Probe(Tape):
    """A tape that keeps early outputs with their graph and version, to see what becomes of them."""

    tensors: list[tuple[Early, Tensor, int]] = field(default_factory=list)

    def record(self, early: Early, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.tensors.append((early, leaf, leaf._version))
        super().record(early, output)


class View:
    """A shallow copy of a module tree, kept in step with it, with some modules replaced.

    A view that `tracks` shares the buffers, so that BatchNorm's running statistics move. In one that does not,
    BatchNorm in training mode has none to move (it normalises by the batch all the same).
    """

    def __init__(self, model: nn.Module, replace: Callable[[str, nn.Module], nn.Module | None], tracks: bool) -> None:
        self.tracks = tracks
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self.early: list[Early] = []
        self.root = self._copy(model, "", replace, {})
        self.places = self._find_places(model)
        self.refresh()

    def _find_places(self, model: nn.Module) -> dict[str, list[tuple[nn.Module, nn.Module, str]]]:
        """Where each parameter is found, by name: module, its twin and the attribute; several where it is shared."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        places: dict[str, list[tuple[nn.Module, nn.Module, str]]] = {name: [] for name in names.values()}
        for module, twin in self.pairs:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    places[names[parameter]].append((module, twin, key))
        return places

    @contextmanager
    def at(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the view, which must not be one that tracks, stand at other parameters for a while."""
        assert not self.tracks
        places = [(tensor, place) for name, tensor in parameters.items() for place in self.places[name]]
        for tensor, (_, twin, key) in places:
            twin._parameters[key] = tensor  # type: ignore[assignment]
        try:
            yield
        finally:
            for _, (module, twin, key) in places:
                twin._parameters[key] = module._parameters[key]

    def _copy(
        self,
        module: nn.Module,
        name: str,
        replace: Callable[[str, nn.Module], nn.Module | None],
        seen: dict[nn.Module, nn.Module],
    ) -> nn.Module:
        if module in seen:
            return seen[module]
        twin: nn.Module = module.__class__.__new__(module.__class__)
        twin.__dict__.update(module.__dict__)
        seen[module] = twin
        self.pairs.append((module, twin))
        twin.__dict__["_modules"] = {
            key: None if child is None else self._copy(child, f"{name}.{key}" if name else key, replace, seen)
            for key, child in module._modules.items()
        }
        replacement = replace(name, twin)
        if replacement is None:
            return twin
        if isinstance(replacement, Early):
            self.early.append(replacement)
            seen[module] = replacement  # wherever else the module is used, too
        return replacement

    def refresh(self) -> None:
        """Take over what the owner has changed since: train or eval mode, drop rates, replaced parameters."""
        for module, twin in self.pairs:
            children = twin.__dict__["_modules"]
            twin.__dict__.update(module.__dict__)
            twin.__dict__["_modules"] = children
            twin.__dict__["_compiled_call_impl"] = None
            if not self.tracks:
                twin.__dict__["_parameters"] = dict(module._parameters)
                if isinstance(module, _NormBase) and module.training:
                    twin.__dict__["_buffers"] = dict.fromkeys(module._buffers)
