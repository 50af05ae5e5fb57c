"""Any classifier as early blocks → late blocks → feature → linear head.

The meta loop runs a network in four ways: an ordinary pass; a pass with the graph of the late part only; a pass at
other late parameters; and a replay of the late part of an earlier pass. :class:`Network` offers them for any model,
through two views (:mod:`semaug.network.views`): one for ordinary passes, one that updates no statistics.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.isda.head import weight_and_bias
from semaug.network.batchnorm import BatchNormOverRanks
from semaug.network.blocks import find_blocks, find_head, unwrapped
from semaug.network.recording import OperatorRecorder
from semaug.network.split import OTHER_HEAD, check_late_part, split_model
from semaug.network.views import Tape, View
from semaug.util import distributed

__all__ = ["Composite", "FrozenBlocks", "Network", "Tape"]

FrozenBlocks = int | Literal["stem", "auto"]
"""The frozen part in the pseudo update: nothing (0), the stem alone, or the stem and N blocks. "auto" is five
eighths of the blocks, rounded down, as the paper's ten of ResNet-50's sixteen."""


@dataclass(frozen=True)
class Composite:
    """How to run a model with several losses, one of which belongs to the head that is augmented.

    L_train is the whole loss. L_meta is the cross-entropy of that head alone, as in the paper's P2P-Net.

    The functions are called with a view of the model: its head is replaced by the identity, and in some passes its
    parameters have other values. They must therefore use the parameters of the model that they are called with. They
    must not change any buffers; BatchNorm's running statistics and those that `after` updates are the exceptions.

    Args:
        run: ``run(model, images)`` is the forward pass; it may return anything.
        logits: ``logits(outputs)`` selects the head's logits (N, C) from what `run` returned.
        rest: ``rest(model, outputs, labels)`` is the rest of the loss, a mean over the samples.
        run_head: ``run_head(model, images)`` returns the head's logits without the rest of the pass, if they need only
            the beginning of it. This makes the tangent pass cheaper. Default: `run` and `logits`.
        after: ``after(model, outputs)`` updates running statistics of the model's own, once for each batch that is
            trained on. It is called with the real model. Default: nothing.

    >>> import torchvision
    >>> googlenet = torchvision.models.googlenet(init_weights=False)  # with two auxiliary classifiers
    >>> composite = Composite(
    ...     run=lambda model, images: model(images),
    ...     logits=lambda outputs: outputs.logits,
    ...     rest=lambda model, outputs, labels: 0.3 * nn.functional.cross_entropy(outputs.aux_logits2, labels),
    ... )
    >>> Network(googlenet, head="fc", composite=composite).num_classes
    1000
    """

    run: Callable[[nn.Module, Tensor], Any]
    logits: Callable[[Any], Tensor]
    rest: Callable[[nn.Module, Any, Tensor], Tensor]
    run_head: Callable[[nn.Module, Tensor], Tensor] | None = None
    after: Callable[[nn.Module, Any], None] | None = None


class Network:
    """A classifier as early blocks → late blocks → feature → linear head.

    The pseudo update of the meta loop moves the late part only. The split is made, and checked on noise, at the first
    pass. Nothing of the model changes; it can be trained, saved and switched to evaluation as before.

    Args:
        model: Any classifier whose logits come from one linear layer or 1×1 convolution. Wrappers of `torch.compile`
            and data parallelism are removed.
        frozen_blocks: Number of blocks that form the early part, together with the stem; ``"stem"`` for the stem alone,
            which the paper calls n = 0; 0 makes everything late. ``"auto"``: five eighths of the blocks, rounded down,
            as the paper's ten of ResNet-50's sixteen; 0 in a composite model.
        head: Name of the linear layer that makes the logits. Default: timm's classifier, or the last linear layer.
        blocks: Names of the modules to use as blocks, in order. Default: the model's own description (timm), a table
            (torchvision), or the members of the model's sequences and lists.
        compile: Backend of `torch.compile` for ordinary passes, such as "inductor"; None does not compile.
        composite: How to run a model with several losses. Default: the model's output, or the ``logits`` of its output,
            is that of the head.
        sync_batch_norm: Whether BatchNorm normalises by the images of all ranks. With several ranks, layers of the
            class `torch.nn.SyncBatchNorm` imply it, for all layers.

    Raises:
        ValueError: The model has no single linear head, `frozen_blocks` is out of range or the model has no stem to
            freeze, or `compile` is combined with `composite` or `sync_batch_norm`.

    >>> import torch, torchvision
    >>> network = Network(torchvision.models.resnet18(), frozen_blocks=4)
    >>> [block.name for block in network.blocks][:3]
    ['stem', 'layer1.0', 'layer1.1']
    >>> network.features(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 512])
    """

    def __init__(
        self,
        model: nn.Module,
        frozen_blocks: FrozenBlocks = 0,
        head: str | None = None,
        blocks: list[str] | None = None,
        compile: str | None = None,
        composite: Composite | None = None,
        sync_batch_norm: bool = False,
    ) -> None:
        self.model = unwrapped(model)
        if isinstance(self.model, torch.jit.ScriptModule):
            raise ValueError("a TorchScript module cannot be split; pass the Python module that it was made from")
        has_sync = any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules())
        sync_batch_norm = sync_batch_norm or (has_sync and distributed.is_running())
        if compile is not None and composite is not None:
            raise ValueError("compile does not work with a composite model, whose pass is more than a call")
        if compile is not None and sync_batch_norm:
            raise ValueError("compile does not work with sync_batch_norm: the ranks communicate within a pass")
        self.composite = composite
        self.sync_batch_norm = sync_batch_norm
        self.head_name, self.head = find_head(self.model, head)
        self.blocks = find_blocks(self.model, self.head_name, blocks)
        places = [place for place, block in enumerate(self.blocks) if block.name != "stem"]
        if frozen_blocks == "auto":
            frozen_blocks = 0 if composite is not None else 5 * len(places) // 8
        count = 0 if frozen_blocks == "stem" else frozen_blocks
        if not isinstance(count, int) or not 0 <= count <= len(places):
            raise ValueError(
                f"frozen_blocks must be in 0 … {len(places)}, the number of blocks of {type(self.model).__name__}, "
                f"or 'stem' or 'auto', not {frozen_blocks}"
            )
        self.frozen_blocks = frozen_blocks
        early = self.blocks[: [*places, None][count]] if frozen_blocks else []
        if frozen_blocks == "stem" and not early:
            raise ValueError(f"frozen_blocks='stem': nothing comes before the blocks of {type(self.model).__name__}")
        self._early_parameters = {name for block in early for name in block.parameters}
        self._pools = any(isinstance(module, nn.MaxPool2d) for module in self.model.modules())
        self._backend = compile
        self._passes_checked = False
        self.forward_mode = True  # whether meta-gradients may be computed in forward mode
        self._views: tuple[View, View] | None = None  # for ordinary passes, and for those that update no statistics

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        return self.head.weight.shape[0]

    @property
    def feature_dim(self) -> int:
        """The dimension D of the features."""
        return self.head.weight.shape[1]

    @property
    def is_compiled(self) -> bool:
        """Whether ordinary passes are compiled with `torch.compile`."""
        return self._backend is not None

    def frozen_text(self) -> str:
        """Say what is frozen in the pseudo update, as in "the pseudo update freezes the stem and 10 of 16 blocks"."""
        frozen, count = self.frozen_blocks, sum(block.name != "stem" for block in self.blocks)
        stem = "the stem" if any(block.name == "stem" for block in self.blocks) else ""
        blocks = f"{frozen} of {count} blocks" if frozen != "stem" else ""
        what = " and ".join(filter(None, (stem, blocks))) if frozen else "nothing"
        return f"the pseudo update freezes {what}"

    def late_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of late part and head, which the pseudo update moves, by name."""
        parameters = dict(self.model.named_parameters()) if self._views is None else self._views[1].model_parameters()
        return {n: p for n, p in parameters.items() if p.requires_grad and n not in self._early_parameters}

    def head_parameters(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Weight (C, D) of the head, and its bias (C,) or None; the model's own unless they are in `parameters`."""
        weight, bias = weight_and_bias(self.head)
        weight = parameters.get(f"{self.head_name}.weight", weight).flatten(1)
        return weight, parameters.get(f"{self.head_name}.bias", bias)

    def features(self, images: Tensor) -> Tensor:
        """Features (N, D) of `images` before the head, with their graph: the input of :class:`~semaug.ISDALoss`."""
        return self.forward(images)[0]

    def forward(self, images: Tensor, labels: Tensor | None = None, record: bool = False) -> tuple[Tensor, Tape]:
        """The ordinary pass, which updates BatchNorm's running statistics.

        Args:
            images: Batch (N, …).
            labels: Labels of the batch, for the rest of a composite model's loss.
            record: Whether to record the late part's operators, for a tangent pass while the graph exists.

        Returns:
            Features (N, D) with their graph, and the tape of the pass.
        """
        tape = Tape.start(images, record and self._backend is None)
        return self._record(self._view(images, tracks=True), tape, labels), tape

    def forward_late(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tape]:
        """A pass like :meth:`forward`, but with the graph of the late part only, which updates no statistics."""
        tape = Tape.start(images)
        return self._record(self._view(images, tracks=False), tape, labels), tape

    @contextmanager
    def at(self, parameters: Mapping[str, Tensor], images: Tensor) -> Iterator[Tensor]:
        """A pass at other late parameters, which updates no statistics and has no graph in the early part.

        Of a composite model only as much is run as the head needs. A backward pass belongs into the `with` block: a
        model with gradient checkpointing repeats modules in it, at the parameters that it has then.

        Args:
            parameters: Values of late parameters, by name; the others are the model's own.
            images: Batch (N, …).

        Yields:
            Features (N, D).
        """
        view = self._view(images, tracks=False)
        with view.at(parameters), self._batch_norm():
            with _short_indices() if self._pools else nullcontext():
                features = self._checked(self._run_head(view.root, images), images)
            yield features

    def forward_at(self, parameters: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The features (N, D) of :meth:`at`, for a model without gradient checkpointing."""
        with self.at(parameters, images) as features:
            return features

    @contextmanager
    def replaying(self, parameters: Mapping[str, Tensor], tape: Tape) -> Iterator[Tensor]:
        """The late part of a recorded pass, repeated with the same early outputs and random masks.

        Args:
            parameters: Values of late parameters, by name; the others are the model's own.
            tape: Tape of the recorded pass.

        Yields:
            Features (N, D). As in :meth:`at`, a backward pass belongs into the `with` block.
        """
        view = self._view(tape.images, tracks=False)
        with view.replaying(tape), view.at(parameters), self._batch_norm():
            yield self._checked(self._run_head(view.root, tape.images), tape.images)

    def replay(self, parameters: Mapping[str, Tensor], tape: Tape) -> Tensor:
        """The features (N, D) of :meth:`replaying`, for a model without gradient checkpointing."""
        with self.replaying(parameters, tape) as features:
            return features

    def prepare(self, images: Tensor) -> None:
        """Make the split, which the first pass does otherwise; later calls do nothing.

        Args:
            images: A batch like those to come; only its shape, type and device matter.

        Raises:
            ValueError: The model's output is not that of its head alone.
        """
        if self._views is not None:
            return
        main, other, self._early_parameters = split_model(
            self.model, (self.head_name, self.head), self._early_parameters, self._run, self._run_head, images
        )
        self._views = main, other
        if self._backend is not None:
            for early in main.early:  # recording is Python code on objects that change with each pass
                early.record = torch.compiler.disable(early.record)  # type: ignore[method-assign]
            # Several backward passes go through the graph. torch reads this when it compiles and in each backward
            # pass, so it cannot be set for one model only.
            torch._functorch.config.donated_buffer = False
            main.call = torch.compile(main.root, backend=self._backend)

    def check_meta_passes(self, images: Tensor, forward_mode: bool) -> None:
        """Check on noise, once, that passes at other late parameters and repeated passes are those of the model.

        Args:
            images: As in :meth:`prepare`.
            forward_mode: Whether meta-gradients are to be computed in forward mode.

        Raises:
            ValueError: The meta loop cannot run the model.
        """
        if self._passes_checked:
            return
        self._passes_checked = True
        model, head, late = self.model, self.head, self.late_parameters
        if not check_late_part(model, head, late, self._run_head, self._logits_at, images, forward_mode):
            self.use_reverse_mode(f"{type(self.model).__name__} uses torch.no_grad inside, which forward mode ignores")

    def use_reverse_mode(self, reason: str) -> None:
        """Let double backward compute meta-gradients from now on, with a warning that states the `reason`."""
        self.forward_mode = False
        warnings.warn(
            f"semaug: {reason}; double backward computes the meta-gradient instead (the same result, at a higher cost)",
            stacklevel=3,
        )

    def _logits_at(self, parameters: Mapping[str, Tensor], images: Tensor) -> Tensor:
        weight, bias = self.head_parameters(parameters)
        with self.at(parameters, images) as features:
            return F.linear(features, weight, bias)

    def _view(self, images: Tensor, tracks: bool) -> View:
        self.prepare(images)
        assert self._views is not None
        view = self._views[0 if tracks else 1]
        view.refresh()
        return view

    def _over_ranks(self) -> bool:
        return self.sync_batch_norm and distributed.is_running()

    def _batch_norm(self) -> AbstractContextManager[Any]:
        return BatchNormOverRanks() if self._over_ranks() else nullcontext()

    def _record(self, view: View, tape: Tape, labels: Tensor | None) -> Tensor:
        recorder = None if tape.late is None else OperatorRecorder(tape.late, batch_norm=not self._over_ranks())
        with self._batch_norm(), view.recording(tape, recorder):
            features, tape.rest = self._run(view, tape.images, labels)
            return features

    def _run(self, view: View, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features, and the rest of a composite model's loss if there are labels."""
        if self.composite is None:
            return self._checked(model_logits(view.call(images)), images), None
        outputs = self.composite.run(view.root, images)
        features = self._checked(self.composite.logits(outputs), images)
        if labels is None:
            return features, None
        rest = self.composite.rest(view.root, outputs, labels)
        if view.tracks and self.composite.after is not None:
            with torch.no_grad():
                self.composite.after(self.model, outputs)
        return features, rest

    def _run_head(self, root: nn.Module, images: Tensor) -> Tensor:
        """The head's output, or its input in a view, from as much of the pass as it needs."""
        if self.composite is None:
            return model_logits(root(images))
        if self.composite.run_head is not None:
            return self.composite.run_head(root, images)
        return self.composite.logits(self.composite.run(root, images))

    def _checked(self, features: Any, images: Tensor) -> Tensor:
        if isinstance(features, Tensor) and features.shape[2:] == (1, 1):  # before a head that is a 1×1 convolution
            features = features.flatten(1)
        if not isinstance(features, Tensor) or features.shape != (images.shape[0], self.feature_dim):
            kind, head = type(self.model).__name__, f"the linear layer {self.head_name!r}, taken as the head"
            if not isinstance(features, Tensor):
                raise ValueError(
                    f"{kind} returns a {type(features).__name__}, not the logits of {head}; describe its outputs with "
                    "semaug.Composite"
                )
            raise ValueError(
                f"the output of {kind} is not that of {head}, whose input should have shape "
                f"({images.shape[0]}, {self.feature_dim}), not {tuple(features.shape)}; {OTHER_HEAD}"
            )
        return features


def model_logits(output: Any) -> Tensor:
    """A model's output, or its ``logits`` where it is an object that has them, as in Hugging Face's models."""
    return cast(Tensor, getattr(output, "logits", output))


@contextmanager
def _short_indices() -> Iterator[None]:
    """Save the int64 indices of max-pooling for the backward pass in 32 bits.

    The graph of the meta batch exists beside that of the training batch, so its size decides the peak memory.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, bool]:
        long = tensor.dtype == torch.int64
        # Detached: an output that its own node saved would hold the whole graph alive, where Python cannot see it.
        return (tensor.int() if long else tensor.detach()), long

    def unpack(packed: tuple[Tensor, bool]) -> Tensor:
        tensor, long = packed
        return tensor.long() if long else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
