"""Any classifier seen as early blocks → late blocks → feature → linear head.

The meta loop needs a network in four ways: one ordinary forward pass; the late part alone, started from what the early
blocks put out in that pass; a pass at other late parameters; and the names of its blocks. None of this asks for the
model's source: :class:`Network` looks at it through *views*, shallow copies of the module tree that share parameters
(and, in the ordinary pass, buffers) with the model but have the head replaced by the identity, so that calling a view
gives the feature ``a``, and each early module replaced by one that keeps or plays back its output.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

LAST_OF_GROUP = (99999,)  # timm's marker for "belongs to the group before"

# Stem and blocks of torchvision's families in the form of timm's `group_matcher`: blocks are told apart and put in
# order by the numbers captured in a parameter's name; what matches nothing comes after the blocks.
TORCHVISION_MATCHERS: dict[str, dict[str, Any]] = {
    "ResNet": {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"},
    "DenseNet": {
        "stem": r"^features\.(?:conv|norm)0",
        "blocks": [
            (r"^features\.denseblock(\d+)\.denselayer(\d+)", None),
            (r"^features\.transition(\d+)", LAST_OF_GROUP),
        ],
    },
    "EfficientNet": {"stem": r"^features\.0\.", "blocks": r"^features\.(\d+)\.(\d+)\.block"},
    "MobileNetV2": {"stem": r"^features\.0\.", "blocks": r"^features\.(\d+)\.conv"},
    "MobileNetV3": {"stem": r"^features\.0\.", "blocks": r"^features\.(\d+)\.block"},
    "MNASNet": {"stem": r"^layers\.[0-7]\.", "blocks": r"^layers\.(\d+)\.(\d+)\.layers"},
    "ShuffleNetV2": {"stem": r"^conv1", "blocks": r"^stage(\d+)\.(\d+)"},
    "RegNet": {"stem": r"^stem", "blocks": r"^trunk_output\.block(\d+)\.block\d+-(\d+)"},
    "VisionTransformer": {
        "stem": r"^class_token|conv_proj|encoder\.pos_embedding",
        "blocks": r"^encoder\.layers\.encoder_layer_(\d+)",
    },
    "ConvNeXt": {
        "stem": r"^features\.0\.",
        "blocks": [(r"^features\.([1357])\.(\d+)", None), (r"^features\.([246])\.", LAST_OF_GROUP)],
    },
    "SwinTransformer": {
        "stem": r"^features\.0\.",
        "blocks": [(r"^features\.([1357])\.(\d+)", None), (r"^features\.([246])\.", LAST_OF_GROUP)],
    },
}


@dataclass(frozen=True)
class Block:
    """A named group of parameters that are frozen together in the pseudo update."""

    name: str
    parameters: tuple[str, ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s or a data-parallel wrapper."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_head(model: nn.Module, name: str | None = None) -> tuple[str, nn.Linear]:
    """The linear layer that makes the logits: `name` if given, else timm's classifier, else the last linear layer."""
    modules = dict(model.named_modules())
    if name is not None:
        if not isinstance(modules.get(name), nn.Linear):
            found = f"is a {type(modules[name]).__name__}" if name in modules else "does not exist"
            raise ValueError(f"the head must be an nn.Linear, but the module {name!r} {found}")
        return name, modules[name]
    inside: Iterable[tuple[str, nn.Module]] = modules.items()
    if hasattr(model, "get_classifier"):
        classifier = cast(Any, model).get_classifier()
        if not isinstance(classifier, nn.Module):
            raise ValueError(
                f"{type(model).__name__} has {len(classifier)} classifiers; the method needs a single linear head"
            )
        prefix = next(key for key, module in modules.items() if module is classifier)
        inside = [(key, module) for key, module in modules.items() if key == prefix or key.startswith(prefix + ".")]
    linear = [(key, module) for key, module in inside if isinstance(module, nn.Linear)]
    if not linear:
        kinds = ", ".join(sorted({type(module).__name__ for _, module in inside} - {type(model).__name__}))
        raise ValueError(f"the head of {type(model).__name__} is not an nn.Linear (found: {kinds or 'nothing'})")
    return linear[-1]


def find_blocks(model: nn.Module, head: str, blocks: list[str] | None = None) -> list[Block]:
    """The model's blocks from input to output, by name; a first one called "stem" holds what comes before them.

    `blocks` lists the names of modules to take as blocks, in order. Otherwise timm's `group_matcher` says, or the
    table above for torchvision's families; in any other model each module in (nested) sequence is a block.
    """
    names = [name for name, _ in model.named_parameters() if not _below(name, head)]
    if blocks is not None:
        known = dict(model.named_modules())
        for block in blocks:
            if block not in known:
                raise ValueError(f"there is no module {block!r} to take as a block")
        return [Block(block, tuple(n for n in names if _below(n, block))) for block in blocks]
    if hasattr(model, "group_matcher"):
        matcher = cast(Any, model).group_matcher(coarse=False)
    elif type(model).__module__.startswith("torchvision."):
        matcher = TORCHVISION_MATCHERS.get(type(model).__name__)
    else:
        matcher = None
    if matcher is None:
        units = [name for name, module in _in_sequence(model) if any(True for _ in module.parameters())]
        return [Block(unit, tuple(n for n in names if _below(n, unit))) for unit in units if not _below(head, unit)]
    from timm.models import group_parameters  # here, so that the loss alone does not load timm

    groups: list[list[str]] = list(group_parameters(model, matcher).values())
    # The head's own group comes after the blocks: all that matches no pattern, such as a final norm.
    groups = [members for members in groups if not any(_below(name, head) for name in members)]
    return [Block(_block_name(matcher, members), tuple(members)) for members in groups]


def _block_name(matcher: Any, parameters: list[str]) -> str:
    """The part of a parameter's name that the matcher's pattern takes, the commonest one in the group; or "stem"."""
    found: Counter[str] = Counter()
    for kind, patterns in matcher.items() if isinstance(matcher, Mapping) else ():
        for pattern in [patterns] if isinstance(patterns, str) else [entry[0] for entry in patterns or ()]:
            for match in filter(None, (re.match(pattern, parameter) for parameter in parameters)):
                found["stem" if kind == "stem" else match[0].rstrip(".")] += 1
    return found.most_common(1)[0][0] if found else parameters[0].rpartition(".")[0]


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _in_sequence(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential):
            yield from _in_sequence(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


RandomState = tuple[Tensor, Tensor | None]


def _random_state(device: torch.device) -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@dataclass
class Tape:
    """What one forward pass leaves for playing its late part again: images, early outputs, random-number states."""

    images: Tensor
    random_state: RandomState
    outputs: dict[str, list[tuple[Any, RandomState]]] = field(default_factory=dict)

    @classmethod
    def start(cls, images: Tensor) -> "Tape":
        return cls(images.detach(), _random_state(images.device))

    def record(self, early: "_Early", output: Any) -> None:
        """Keep an early module's output, and the random numbers to come, for each of its calls in order."""
        kept = pytree.tree_map_only(Tensor, early.to_keep, output)
        self.outputs.setdefault(early.name, []).append((kept, _random_state(self.images.device)))

    def play(self, early: "_Early", call: int) -> Any:
        output, state = self.outputs[early.name][call]
        _set_random_state(state, self.images.device)
        return pytree.tree_map_only(Tensor, torch.clone, output) if early.overwritten else output


class _Early(nn.Module):
    """Stands for an early module in a view: runs it, keeping its output on a tape, or plays the output back."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner
        self.needed = True  # by the late part; otherwise only the shape of the output is kept
        self.overwritten = False  # in place, by what follows: then the tape needs a copy
        self.recording: Tape | None = None
        self.playing: Tape | None = None
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.playing is not None:
            self.calls += 1
            return self.playing.play(self, self.calls - 1)
        if self.recording is None:  # a pass at other late parameters, for whose gradient this part is a constant
            with torch.no_grad():
                return self.inner(*args, **kwargs)
        output = self.inner(*args, **kwargs)
        self.recording.record(self, output)
        return output

    def to_keep(self, tensor: Tensor) -> Tensor:
        if not self.needed:
            return tensor.new_zeros(()).expand(tensor.shape)
        return tensor.detach().clone() if self.overwritten else tensor.detach()


@dataclass
class _Probe(Tape):
    """A tape that keeps early outputs with their graph and version, to see what becomes of them."""

    tensors: list[tuple[_Early, Tensor, int]] = field(default_factory=list)

    def record(self, early: _Early, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.tensors.append((early, leaf, leaf._version))
        super().record(early, output)


class _View:
    """A shallow copy of a module tree, kept in step with it, with some modules replaced.

    A view that `tracks` shares the buffers, so that BatchNorm's running statistics move. In one that does not,
    BatchNorm in training mode has none to move (it normalises by the batch all the same).
    """

    def __init__(self, model: nn.Module, replace: Callable[[str, nn.Module], nn.Module | None], tracks: bool) -> None:
        self.tracks = tracks
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self.early: list[_Early] = []
        self.root = self._copy(model, "", replace, {})
        self.refresh()

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
        if isinstance(replacement, _Early):
            self.early.append(replacement)
        seen[module] = replacement
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


class Network:
    """A classifier as early blocks → late blocks → feature → linear head.

    ``frozen_blocks`` is the number of blocks (not counting the stem) that belong, with the stem, to the early part;
    0 makes everything late. ``head`` and ``blocks`` name modules where the model's own description does not fit.
    The split is made, and checked against the model itself, at the first forward pass.

    >>> import torchvision
    >>> network = Network(torchvision.models.resnet18(), frozen_blocks=4)
    >>> [block.name for block in network.blocks][:3]
    ['stem', 'layer1.0', 'layer1.1']
    """

    def __init__(
        self, model: nn.Module, frozen_blocks: int = 0, head: str | None = None, blocks: list[str] | None = None
    ) -> None:
        self.model = unwrapped(model)
        if isinstance(self.model, torch.jit.ScriptModule):
            raise ValueError("a TorchScript module cannot be split; pass the Python module that it was made from")
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
        self._main: _View | None = None
        self._other: _View | None = None

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
        return self.head.out_features

    @property
    def feature_dim(self) -> int:
        return self.head.in_features

    def late_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that the pseudo update moves, the head's among them, by name."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and name not in self._early_names
        }

    def head_parameters(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head among `parameters`, or the model's own where they are not."""
        weight = parameters.get(f"{self.head_name}.weight", self.head.weight)
        return weight, parameters.get(f"{self.head_name}.bias", self.head.bias)

    def forward(self, images: Tensor) -> tuple[Tensor, Tape]:
        """The ordinary pass: features (N, D) with their graph, BatchNorm's statistics moved, and the tape."""
        main, _ = self._views(images)
        tape = Tape.start(images)
        return self._record(main, tape), tape

    def forward_at(self, parameters: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Features of `images` at other late parameters; no gradient into the early part, no statistics moved."""
        _, other = self._views(images)
        return self._checked(functional_call(other.root, dict(parameters), (images,)), images)

    def replay(self, parameters: Mapping[str, Tensor], tape: Tape) -> Tensor:
        """The late part of a recorded pass again, at `parameters`, with the same early outputs and random masks."""
        _, other = self._views(tape.images)
        return self._play(other, tape, parameters)

    def _record(self, view: _View, tape: Tape) -> Tensor:
        for early in view.early:
            early.recording = tape
        try:
            return self._checked(view.root(tape.images), tape.images)
        finally:
            for early in view.early:
                early.recording = None

    def _play(self, view: _View, tape: Tape, parameters: Mapping[str, Tensor]) -> Tensor:
        now = _random_state(tape.images.device)
        for early in view.early:
            early.playing, early.calls = tape, 0
        _set_random_state(tape.random_state, tape.images.device)
        try:
            return self._checked(functional_call(view.root, dict(parameters), (tape.images,)), tape.images)
        finally:
            _set_random_state(now, tape.images.device)
            for early in view.early:
                early.playing = None

    def _checked(self, features: Any, images: Tensor) -> Tensor:
        if not isinstance(features, Tensor) or features.shape != (images.shape[0], self.feature_dim):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(
                f"the input of the head {self.head_name!r} of {type(self.model).__name__} should have shape "
                f"({images.shape[0]}, {self.feature_dim}), not {shape}: its output is not that of a linear head"
            )
        return features

    def _views(self, images: Tensor) -> tuple[_View, _View]:
        if self._main is None or self._other is None:
            self._main, self._other = self._split(images)
        self._main.refresh()
        self._other.refresh()
        return self._main, self._other

    def _split(self, images: Tensor) -> tuple[_View, _View]:
        """Make the two views, on a look at how the model runs on one or two images of noise."""
        was_training = {module: module.training for module in self.model.modules()}
        state = _random_state(images.device)
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
            _set_random_state(state, images.device)

    def _make_views(self, units: set[str]) -> tuple[_View, _View]:
        def replace(name: str, module: nn.Module) -> nn.Module | None:
            if name == self.head_name:
                return nn.Identity()
            return _Early(name, module) if name in units else None

        return _View(self.model, replace, tracks=True), _View(self.model, replace, tracks=False)

    def _early_units(self, images: Tensor) -> set[str]:
        """The outermost modules with no late parameter that run before the early part ends."""
        late = [name for name, _ in self.model.named_parameters() if name not in self._early_names]
        outermost: dict[str, bool] = {}  # name → holds early parameters
        for name, module in self.model.named_modules():
            inside = any(_below(name, other) for other in outermost)
            if name and not inside and not any(_below(parameter, name) for parameter in late):
                outermost[name] = any(True for _ in module.parameters())
        order: list[str] = []
        handles = [
            self.model.get_submodule(name).register_forward_hook(lambda *_, called=name: order.append(called))
            for name in outermost
        ]
        try:
            with torch.no_grad():
                self.model(images)
        finally:
            for handle in handles:
                handle.remove()
        last = max((i for i, name in enumerate(order) if outermost[name]), default=-1)
        # A module without parameters that is called again later (a shared activation) is cheaper to run than to tell
        # its calls apart.
        return {name for name in order[: last + 1] if outermost[name] or order.count(name) == 1}

    @torch.enable_grad()
    def _look(self, main: _View, other: _View, images: Tensor) -> set[str]:
        """Check the head, and see which early outputs the late part uses and which are overwritten.

        Returns the names of late parameters that act on early outputs (an embedding that no pattern names, say).
        """
        probe = _Probe(images, _random_state(images.device))
        self._check_head(main, probe)
        late = {
            name: parameter for name, parameter in self.late_parameters().items() if not _below(name, self.head_name)
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
        for early in main.early:
            early.needed = early.name in used
        return misplaced

    def _check_head(self, main: _View, probe: Tape) -> None:
        """See that the model's output is ``head(features)`` and nothing else."""
        expected = self.model(probe.images)
        try:
            logits = self.head(self._record(main, probe))
            scale = float(logits.detach().abs().max()) + 1.0
            same = torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * scale)
        except (RuntimeError, TypeError) as error:
            raise self._not_a_head() from error
        if not same:
            raise self._not_a_head()

    def _not_a_head(self) -> ValueError:
        return ValueError(
            f"the output of {type(self.model).__name__} is not that of its linear layer {self.head_name!r} alone; "
            "name the layer that makes the logits with head=…"
        )
