"""Any classifier seen as early blocks → late blocks → feature → linear head.

The meta loop needs a network in four ways: one ordinary forward pass; the late part alone, started from what the early
blocks put out in that pass; a pass at other late parameters; and the names of its blocks. None of this asks for the
model's source: :class:`Network` looks at it through *views* (:mod:`semaug.network.views`) that have the head replaced by the
identity, so that calling one gives the feature ``a``, and each early module by one that keeps or plays back its output.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from semaug.isda.head import weight_and_bias
from semaug.network.batchnorm import OverRanks
from semaug.network.blocks import below, find_blocks, find_head, unwrapped
from semaug.network.tangents import Recorder
from semaug.network.views import Early, Probe, Tape, View, keep_recording_out_of_graphs, random_state, set_random_state
from semaug.util import distributed

__all__ = ["Composite", "Network", "Tape"]


@dataclass(frozen=True)
class Composite:
    """How a model with more than one loss hands over the linear head to augment, and the rest of its loss.

    ``run(model, images)`` is the forward pass and returns what it likes; ``logits`` picks from that the logits which
    the head puts out; ``rest(model, outputs, labels)`` is the rest of the loss, a mean over the samples. Where the
    head's logits need only a part of the pass, its beginning, ``run_head(model, images)`` gives them without the rest:
    the tangent pass is cheaper then. ``after(model, outputs)`` is called once for each batch that is trained on, for
    running statistics of the model's own; ``run`` and ``rest`` must not move any but BatchNorm's.

    The model that the functions get is a view of the real one (with the head replaced by the identity, in some passes
    at other parameters), so they must look parameters up in it and not in the real one.
    """

    run: Callable[[nn.Module, Tensor], Any]
    logits: Callable[[Any], Tensor]
    rest: Callable[[nn.Module, Any, Tensor], Tensor]
    run_head: Callable[[nn.Module, Tensor], Tensor] | None = None
    after: Callable[[nn.Module, Any], None] | None = None


@contextmanager
def _short_indices() -> Iterator[None]:
    """Keep what max-pooling remembers for the backward pass, an int64 for each output, in half of the room.

    Beside the graph of the training batch, that of the meta batch is what takes the most memory in a step.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, bool]:
        long = tensor.dtype == torch.int64
        return (tensor.int() if long else tensor), long

    def unpack(packed: tuple[Tensor, bool]) -> Tensor:
        tensor, long = packed
        return tensor.long() if long else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _logits(output: Any) -> Tensor:
    """What a model puts out, or its logits where it puts out more, as those of Hugging Face do."""
    return cast(Tensor, getattr(output, "logits", output))


class Network:
    """A classifier as early blocks → late blocks → feature → linear head.

    ``frozen_blocks`` is the number of blocks (not counting the stem) that belong, with the stem, to the early part;
    0 makes everything late. ``head`` and ``blocks`` name modules where the model's own description does not fit.
    The split is made, and checked against the model itself, at the first forward pass. ``compile`` is the backend by
    which `torch.compile` speeds up the ordinary pass ("inductor", as a rule); the other passes run as they are.
    ``composite`` tells how a model with several losses is run; without it, the model's output, or its ``logits``, is
    that of the head. With ``sync_batch_norm``, BatchNorm normalises by the images of all ranks where there are several
    (:mod:`semaug.network.batchnorm`), otherwise by those of its own.

    >>> import torchvision
    >>> network = Network(torchvision.models.resnet18(), frozen_blocks=4)
    >>> [block.name for block in network.blocks][:3]
    ['stem', 'layer1.0', 'layer1.1']
    """

    def __init__(
        self,
        model: nn.Module,
        frozen_blocks: int = 0,
        head: str | None = None,
        blocks: list[str] | None = None,
        compile: str | None = None,
        composite: Composite | None = None,
        sync_batch_norm: bool = False,
    ) -> None:
        self.model = unwrapped(model)
        if isinstance(self.model, torch.jit.ScriptModule):
            raise ValueError("a TorchScript module cannot be split; pass the Python module that it was made from")
        if compile is not None and composite is not None:
            raise ValueError("compile does not go with a composite model, whose pass is more than a call")
        if compile is not None and sync_batch_norm:
            raise ValueError("compile does not go with sync_batch_norm: the ranks talk in the middle of a pass")
        self.composite = composite
        self.sync_batch_norm = sync_batch_norm
        self.head_name, self.head = find_head(self.model, head)
        self.blocks = find_blocks(self.model, self.head_name, blocks)
        freezable = sum(block.name != "stem" for block in self.blocks)
        if not 0 <= frozen_blocks <= freezable:
            raise ValueError(
                f"frozen_blocks must lie in 0 … {freezable}, the number of blocks of {type(self.model).__name__}, "
                f"not {frozen_blocks}"
            )
        self.frozen_blocks = frozen_blocks
        self._early_names = self._frozen_parameters()
        self._pools = any(isinstance(module, nn.MaxPool2d) for module in self.model.modules())
        self._backend = compile
        self._compiled: Callable[[Tensor], Any] | None = None
        self._main: View | None = None
        self._other: View | None = None

    def _frozen_parameters(self) -> set[str]:
        names: set[str] = set()
        remaining = self.frozen_blocks
        for block in self.blocks if remaining else []:
            if block.name != "stem":
                if not remaining:
                    break
                remaining -= 1
            names.update(block.parameters)
        return names

    @property
    def num_classes(self) -> int:
        return self.head.weight.shape[0]

    @property
    def feature_dim(self) -> int:
        return self.head.weight.shape[1]

    def late_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that the pseudo update moves, the head's among them, by name."""
        if self._other is None:
            parameters = dict(self.model.named_parameters())
        else:  # the same, without a walk through the whole model
            found = ((name, places[0]) for name, places in self._other.places.items())
            parameters = {name: cast(nn.Parameter, module._parameters[key]) for name, (module, _, key) in found}
        return {n: p for n, p in parameters.items() if p.requires_grad and n not in self._early_names}

    def head_parameters(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Weight (C, D) and bias (C,) of the head among `parameters`, or the model's own where they are not."""
        weight, bias = weight_and_bias(self.head)
        weight = parameters.get(f"{self.head_name}.weight", weight).flatten(1)
        return weight, parameters.get(f"{self.head_name}.bias", bias)

    def features(self, images: Tensor) -> Tensor:
        """Features (N, D) before the head, with their graph: what :class:`~semaug.ISDALoss` takes."""
        return self.forward(images)[0]

    def forward(self, images: Tensor, labels: Tensor | None = None, record: bool = False) -> tuple[Tensor, Tape]:
        """The ordinary pass: features (N, D) with their graph, BatchNorm's statistics moved, and the tape.

        With `labels`, the tape of a composite model has the rest of its loss. With `record`, for a tangent pass while
        the graph lives, it notes what the late part's operators put out.
        """
        tape = Tape.start(images, record and self._backend is None)
        return self._record(self._main_view(images), tape, labels), tape

    def forward_late(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tape]:
        """Features with the graph of the late part alone, and the tape; no statistics moved."""
        tape = Tape.start(images)
        return self._record(self._other_view(images), tape, labels), tape

    def forward_again(self, tape: Tape, labels: Tensor | None = None) -> tuple[Tensor, Tape]:
        """The ordinary pass on the images of a recorded one, with the same random masks."""
        device = tape.images.device
        now = random_state(device)
        set_random_state(tape.random_state, device)
        try:
            return self.forward(tape.images, labels)
        finally:
            set_random_state(now, device)

    def forward_at(
        self, parameters: Mapping[str, Tensor], images: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Features of `images` at other late parameters, and the rest of a composite model's loss.

        No gradient goes into the early part, no statistics are moved.
        """
        other = self._other_view(images)
        with other.at(parameters), self._batch_norm(), _short_indices() if self._pools else nullcontext():
            return self._run(other, images, labels)

    def replay(self, parameters: Mapping[str, Tensor], tape: Tape) -> Tensor:
        """The late part of a recorded pass again, at `parameters`, with the same early outputs and random masks."""
        return self._play(self._other_view(tape.images), tape, parameters)

    def _batch_norm(self) -> AbstractContextManager[Any]:
        return OverRanks() if self._over_ranks() else nullcontext()

    def _over_ranks(self) -> bool:
        return self.sync_batch_norm and distributed.is_running()

    def _run(self, view: View, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features and, of a composite model, the rest of the loss."""
        if self.composite is None:
            run = self._compiled if view is self._main and self._compiled is not None else view.root
            return self._checked(_logits(run(images)), images), None
        outputs = self.composite.run(view.root, images)
        features = self._checked(self.composite.logits(outputs), images)
        if labels is None:
            return features, None
        rest = self.composite.rest(view.root, outputs, labels)
        if view is self._main and self.composite.after is not None:
            with torch.no_grad():
                self.composite.after(self.model, outputs)
        return features, rest

    def _run_head(self, root: nn.Module, images: Tensor) -> Tensor:
        """What the head puts out, or in a view what goes into it."""
        if self.composite is None:
            return _logits(root(images))
        if self.composite.run_head is not None:
            return self.composite.run_head(root, images)
        return self.composite.logits(self.composite.run(root, images))

    def _record(self, view: View, tape: Tape, labels: Tensor | None = None) -> Tensor:
        recorder = None if tape.late is None else Recorder(tape.late, batch_norm=not self._over_ranks())
        for early in view.early:
            early.records, early.recording, early.recorder = True, tape, recorder
        try:
            with self._batch_norm(), recorder or nullcontext():
                features, tape.rest = self._run(view, tape.images, labels)
                return features
        finally:
            for early in view.early:
                early.records, early.recording, early.recorder = False, None, None

    def _play(self, view: View, tape: Tape, parameters: Mapping[str, Tensor]) -> Tensor:
        now = random_state(tape.images.device)
        for early in view.early:
            early.playing, early.calls = tape, 0
        set_random_state(tape.random_state, tape.images.device)
        try:
            with view.at(parameters), self._batch_norm():
                return self._checked(self._run_head(view.root, tape.images), tape.images)
        finally:
            set_random_state(now, tape.images.device)
            for early in view.early:
                early.playing = None

    def _checked(self, features: Any, images: Tensor) -> Tensor:
        if isinstance(features, Tensor) and features.shape[2:] == (1, 1):  # before a head that is a 1×1 convolution
            features = features.flatten(1)
        if not isinstance(features, Tensor) or features.shape != (images.shape[0], self.feature_dim):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(
                f"the input of the head {self.head_name!r} of {type(self.model).__name__} should have shape "
                f"({images.shape[0]}, {self.feature_dim}), not {shape}: its output is not that of a linear head"
            )
        return features

    def prepare(self, images: Tensor) -> None:
        """Make the split on a look at how the model runs on such images; later calls do nothing."""
        if self._main is None or self._other is None:
            self._main, self._other = self._split(images)
            if self._backend is not None:
                keep_recording_out_of_graphs()
                # More than one backward pass goes through the graph. torch looks at this when it compiles and in each
                # backward pass, so it cannot be set for one model alone.
                torch._functorch.config.donated_buffer = False
                self._compiled = torch.compile(self._main.root, backend=self._backend)

    def _main_view(self, images: Tensor) -> View:
        self.prepare(images)
        assert self._main is not None
        self._main.refresh()
        return self._main

    def _other_view(self, images: Tensor) -> View:
        self.prepare(images)
        assert self._other is not None
        self._other.refresh()
        return self._other

    def _split(self, images: Tensor) -> tuple[View, View]:
        """Make the two views, on a look at how the model runs on one or two images of noise."""
        was_training = {module: module.training for module in self.model.modules()}
        state = random_state(images.device)
        images = torch.randn_like(images[:2].detach())
        try:
            self.model.eval()
            while True:
                main, other = self._make_views(self._early_units(images) if self._early_names else set())
                misplaced = self._look(main, other, images)
                if not misplaced:
                    return main, other
                self._early_names |= misplaced
        finally:
            for module, training in was_training.items():
                module.training = training
            set_random_state(state, images.device)

    def _make_views(self, units: set[str]) -> tuple[View, View]:
        def view(tracks: bool) -> View:
            def replace(name: str, module: nn.Module) -> nn.Module | None:
                if name == self.head_name:
                    return nn.Identity()
                return Early(name, module, constant=not tracks) if name in units else None

            return View(self.model, replace, tracks)

        return view(tracks=True), view(tracks=False)

    def _early_units(self, images: Tensor) -> set[str]:
        """The outermost modules with no late parameter that run before the early part ends."""
        late = [name for name, _ in self.model.named_parameters() if name not in self._early_names]
        candidates: dict[str, bool] = {}  # name → holds early parameters
        for name, module in self.model.named_modules():
            if name and not any(below(parameter, name) for parameter in late):
                candidates[name] = any(True for _ in module.parameters())
        order: list[str] = []  # of calls that are not made by another candidate
        running: list[str] = []
        inner: set[str] = set()

        def leave() -> None:
            name = running.pop()
            if running:
                inner.add(name)
            else:
                order.append(name)

        handles = []
        for name in candidates:
            module = self.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(lambda *_, called=name: running.append(called)))
            handles.append(module.register_forward_hook(lambda *_: leave()))
        try:
            with torch.no_grad():
                self._run_head(self.model, images)
        finally:
            for handle in handles:
                handle.remove()
        last = max((i for i, name in enumerate(order) if candidates[name]), default=-1)
        # A module without parameters that is called again later (a shared activation), or one that another calls too,
        # is cheaper to run than to tell its calls apart.
        return {name for name in order[: last + 1] if candidates[name] or order.count(name) == 1} - inner

    @torch.enable_grad()
    def _look(self, main: View, other: View, images: Tensor) -> set[str]:
        """Check the head, and see which early outputs the late part uses and which are overwritten.

        Returns the names of late parameters that act on early outputs (an embedding that no pattern names, say).
        """
        probe = Probe(images, random_state(images.device))
        self._check_head(main, probe)
        late = {
            name: parameter for name, parameter in self.late_parameters().items() if not below(name, self.head_name)
        }
        misplaced: set[str] = set()
        for early, tensor, version in probe.tensors:
            early.overwritten |= tensor._version != version
            if tensor.requires_grad and late:
                found = torch.autograd.grad(tensor.sum(), list(late.values()), allow_unused=True, retain_graph=True)
                misplaced.update(name for name, gradient in zip(late, found, strict=True) if gradient is not None)
        if misplaced or not main.early:
            return misplaced

        tape = Tape(images, probe.random_state)
        leaves: list[tuple[str, Tensor]] = []

        def as_leaves(name: str, output: Any) -> Any:
            def as_leaf(tensor: Tensor) -> Tensor:
                if tensor.is_floating_point():
                    tensor = tensor.detach().clone().requires_grad_()
                    leaves.append((name, tensor))
                return tensor

            return pytree.tree_map_only(Tensor, as_leaf, output)

        for name, calls in probe.outputs.items():
            tape.outputs[name] = [(as_leaves(name, output), state) for output, state in calls]
        overwritten = {early.name for early in main.early if early.overwritten}
        for early in other.early:
            early.overwritten = early.name in overwritten
        features = self._play(other, tape, {})
        found = torch.autograd.grad(features.sum(), [tensor for _, tensor in leaves], allow_unused=True)
        used = {name for (name, _), gradient in zip(leaves, found, strict=True) if gradient is not None}
        for early in (*main.early, *other.early):
            early.needed = early.name in used
        return misplaced

    def _check_head(self, main: View, probe: Tape) -> None:
        """See that the model's output is ``head(features)`` and nothing else."""
        expected = self._run_head(self.model, probe.images)
        try:
            logits = F.linear(self._record(main, probe), *self.head_parameters({}))
            scale = float(logits.detach().abs().max()) + 1.0
            same = torch.allclose(logits, expected.flatten(1), rtol=1e-3, atol=1e-3 * scale)
        except (RuntimeError, TypeError) as error:
            raise self._not_a_head() from error
        if not same:
            raise self._not_a_head()

    def _not_a_head(self) -> ValueError:
        return ValueError(
            f"the output of {type(self.model).__name__} is not that of its linear layer {self.head_name!r} alone, and "
            "the method needs a single linear head; if another layer makes the logits, name it with head=…"
        )
