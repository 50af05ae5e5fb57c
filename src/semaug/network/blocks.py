"""The parts of a classifier: its linear head, and its blocks from input to output."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from torch import nn

from semaug.isda.head import Head, is_linear

_LAST_OF_GROUP = (99999,)  # timm's marker for "belongs to the group before"
_STAGES = {
    "stem": r"^features\.0\.",
    "blocks": [(r"^features\.([1357])\.(\d+)", None), (r"^features\.([246])\.", _LAST_OF_GROUP)],
}
_TORCHVISION_MATCHERS: dict[str, dict[str, Any]] = {
    # Stem and blocks of torchvision's families in the form of timm's `group_matcher`: the numbers captured in a
    # parameter's name distinguish and order the blocks; what matches nothing comes after them.
    "ResNet": {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"},
    "DenseNet": {
        "stem": r"^features\.(?:conv|norm)0",
        "blocks": [
            (r"^features\.denseblock(\d+)\.denselayer(\d+)", None),
            (r"^features\.transition(\d+)", _LAST_OF_GROUP),
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
    "ConvNeXt": _STAGES,
    "SwinTransformer": _STAGES,
}


@dataclass(frozen=True)
class Block:
    """A named group of parameters that are frozen together in the pseudo update.

    Args:
        name: Name of the module, or "stem" for what comes before the first block.
        parameters: Names of the parameters.
    """

    name: str
    parameters: tuple[str, ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of `torch.compile` and data parallelism that `model` may have."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_head(model: nn.Module, name: str | None = None) -> tuple[str, Head]:
    """Find the linear layer that makes the logits.

    Args:
        model: Any classifier.
        name: Name of the layer. Default: timm's classifier, else the last `nn.Linear`, else the last 1×1 convolution.

    Returns:
        Name and module.

    Raises:
        ValueError: There is no such layer, or the model has several classifiers.
    """
    modules = dict(model.named_modules())
    if name is not None:
        module = modules.get(name)
        if not is_linear(module):
            problem = f"is a {type(module).__name__}" if name in modules else "does not exist"
            raise ValueError(f"the head must be an nn.Linear or a 1×1 convolution, but the module {name!r} {problem}")
        return name, module
    if hasattr(model, "get_classifier"):
        classifier = cast(Any, model).get_classifier()
        if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.ModuleList):
            raise ValueError(
                f"{type(model).__name__} has {len(classifier)} classifiers; the method needs a single linear head"
            )
        prefix = next(key for key, module in modules.items() if module is classifier)
        modules = {key: module for key, module in modules.items() if below(key, prefix)}
    candidates = [(key, module) for key, module in modules.items() if is_linear(module)]
    linear = [(key, module) for key, module in candidates if isinstance(module, nn.Linear)] or candidates
    if not linear:
        kinds = ", ".join(sorted({type(module).__name__ for module in modules.values()} - {type(model).__name__}))
        raise ValueError(
            f"the head of {type(model).__name__} is not an nn.Linear or a 1×1 convolution (found: {kinds or 'nothing'})"
        )
    return linear[-1]


def find_blocks(model: nn.Module, head: str, blocks: Sequence[str] | None = None) -> list[Block]:
    """Find a model's blocks, from input to output.

    Args:
        model: Any classifier.
        head: Name of its head.
        blocks: Names of the modules to use as blocks, in order. Default: the model's `block_names`, timm's
            `group_matcher`, a table for torchvision's families; in any other model, each module in a (nested) sequence
            or list is a block, and modules before them in the same wrapper are the stem.

    Returns:
        The blocks; the first is called "stem" if something comes before them.

    Raises:
        ValueError: The model has no module of a name in `blocks`.
    """
    names = [name for name, _ in model.named_parameters() if not below(name, head)]
    blocks = getattr(model, "block_names", None) if blocks is None else blocks
    if blocks is not None:
        known = dict(model.named_modules())
        for block in blocks:
            if block not in known:
                raise ValueError(f"there is no module {block!r} to use as a block")
        return [_block(block, names) for block in blocks]
    matcher: Any = None
    if hasattr(model, "group_matcher"):
        matcher = cast(Any, model).group_matcher(coarse=False)
    elif type(model).__module__.startswith("torchvision."):
        matcher = _TORCHVISION_MATCHERS.get(type(model).__name__)
    if matcher is None:
        return _blocks_in_sequence(model, names, head)
    from timm.models import group_parameters  # here, so that `import semaug` does not load timm

    groups: list[list[str]] = list(group_parameters(model, matcher).values())
    # The head's own group, which comes last, has all that matches no pattern, such as a final norm.
    groups = [members for members in groups if not any(below(name, head) for name in members)]
    if isinstance(matcher, Mapping):
        return [Block(_block_name(matcher, members), tuple(members)) for members in groups]
    labels = ["stem", *(members[0].rpartition(".")[0] for members in groups[1:])]  # the matcher is a function
    return [Block(label, tuple(members)) for label, members in zip(labels, groups, strict=True)]


def freeze_blocks(model: nn.Module, count: int) -> None:
    """Exclude the stem and the first blocks of a model from training.

    Args:
        model: Any classifier.
        count: Number of blocks; 0 freezes nothing, not even the stem.

    Raises:
        ValueError: The model has fewer blocks.
    """
    if count == 0:
        return
    blocks = find_blocks(model, find_head(model)[0])
    ends = [place + 1 for place, block in enumerate(blocks) if block.name != "stem"]
    if count > len(ends):
        raise ValueError(f"`freeze` must be at most {len(ends)}, the blocks of {type(model).__name__}, not {count}")
    frozen = {name for block in blocks[: ends[count - 1]] for name in block.parameters}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)


def _block(module: str, names: list[str]) -> Block:
    return Block(module, tuple(name for name in names if below(name, module)))


def _blocks_in_sequence(model: nn.Module, names: list[str], head: str) -> list[Block]:
    units = [name for name, module in in_sequence(model, inside=True) if any(True for _ in module.parameters())]
    units = [unit for unit in units if not below(head, unit)]

    def is_of_wrapper(unit: str) -> bool:
        parent = unit.rpartition(".")[0]
        return bool(parent) and not isinstance(model.get_submodule(parent), _LISTS)

    stem = list(takewhile(is_of_wrapper, units))
    blocks = [Block("stem", tuple(n for n in names if any(below(n, unit) for unit in stem)))] if stem else []
    return blocks + [_block(unit, names) for unit in units[len(stem) :]]


def _block_name(matcher: Mapping[str, Any], parameters: list[str]) -> str:
    """The part of a parameter's name that the matcher's pattern covers, the commonest one in the group; or "stem"."""
    names: Counter[str] = Counter()
    for kind, patterns in matcher.items():
        for pattern in [patterns] if isinstance(patterns, str) else [entry[0] for entry in patterns or ()]:
            for match in filter(None, (re.match(pattern, parameter) for parameter in parameters)):
                names["stem" if kind == "stem" else match[0].rstrip(".")] += 1
    return names.most_common(1)[0][0] if names else parameters[0].rpartition(".")[0]


def below(name: str, prefix: str) -> bool:
    """Whether the module or parameter `name` is the module `prefix` or inside it."""
    return name == prefix or name.startswith(prefix + ".")


_LISTS = nn.Sequential | nn.ModuleList


def in_sequence(module: nn.Module, prefix: str = "", inside: bool = False) -> Iterable[tuple[str, nn.Module]]:
    """The children of a module by name, in order, with nested sequences replaced by their members.

    With `inside`, lists, and modules that hold a list or sequence of blocks, are replaced by their members too.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential) or (inside and isinstance(child, nn.ModuleList)):
            yield from in_sequence(child, f"{prefix}{name}.")
        elif inside and any(isinstance(part, _LISTS) and _has_blocks(part) for part in child.modules()):
            yield from in_sequence(child, f"{prefix}{name}.", inside)
        else:
            yield prefix + name, child


def _has_blocks(modules: nn.Module) -> bool:
    """Whether a list has two modules of one kind that have children themselves."""
    kinds = Counter(type(child) for child in modules.children() if any(True for _ in child.children()))
    return max(kinds.values(), default=0) > 1
