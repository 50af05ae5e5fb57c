"""What a classifier is made of: its linear head, and its blocks from input to output."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from torch import nn

from semaug.isda.head import Head, is_linear

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


def find_head(model: nn.Module, name: str | None = None) -> tuple[str, Head]:
    """The linear layer that makes the logits: `name` if given, else timm's classifier, else the last linear layer.

    A 1×1 convolution is taken where there is no `nn.Linear`.
    """
    modules = dict(model.named_modules())
    if name is not None:
        module = modules.get(name)
        if not is_linear(module):
            found = f"is a {type(module).__name__}" if name in modules else "does not exist"
            raise ValueError(f"the head must be an nn.Linear or a 1×1 convolution, but the module {name!r} {found}")
        return name, module
    inside: Iterable[tuple[str, nn.Module]] = modules.items()
    if hasattr(model, "get_classifier"):
        classifier = cast(Any, model).get_classifier()
        if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.ModuleList):
            raise ValueError(
                f"{type(model).__name__} has {len(classifier)} classifiers; the method needs a single linear head"
            )
        prefix = next(key for key, module in modules.items() if module is classifier)
        inside = [(key, module) for key, module in modules.items() if key == prefix or key.startswith(prefix + ".")]
    candidates = [(key, module) for key, module in inside if is_linear(module)]
    linear = [(key, module) for key, module in candidates if isinstance(module, nn.Linear)] or candidates
    if not linear:
        kinds = ", ".join(sorted({type(module).__name__ for _, module in inside} - {type(model).__name__}))
        raise ValueError(
            f"the head of {type(model).__name__} is not an nn.Linear or a 1×1 convolution (found: {kinds or 'nothing'})"
        )
    return linear[-1]


def find_blocks(model: nn.Module, head: str, blocks: list[str] | None = None) -> list[Block]:
    """The model's blocks from input to output, by name; a first one called "stem" holds what comes before them.

    `blocks` lists the names of modules to take as blocks, in order. Otherwise timm's `group_matcher` says, or the
    table above for torchvision's families. In any other model each module in (nested) sequence or in a list is a
    block, also below modules that wrap such ones; what such a wrapper has before them is the stem.
    """
    names = [name for name, _ in model.named_parameters() if not below(name, head)]
    if blocks is not None:
        known = dict(model.named_modules())
        for block in blocks:
            if block not in known:
                raise ValueError(f"there is no module {block!r} to take as a block")
        return [Block(block, tuple(n for n in names if below(n, block))) for block in blocks]
    if hasattr(model, "group_matcher"):
        matcher = cast(Any, model).group_matcher(coarse=False)
    elif type(model).__module__.startswith("torchvision."):
        matcher = TORCHVISION_MATCHERS.get(type(model).__name__)
    else:
        matcher = None
    if matcher is None:
        return _blocks_in_sequence(model, names, head)
    from timm.models import group_parameters  # here, so that the loss alone does not load timm

    groups: list[list[str]] = list(group_parameters(model, matcher).values())
    # The head's own group comes after the blocks: all that matches no pattern, such as a final norm.
    groups = [members for members in groups if not any(below(name, head) for name in members)]
    if isinstance(matcher, Mapping):
        return [Block(_block_name(matcher, members), tuple(members)) for members in groups]
    labels = ["stem", *(members[0].rpartition(".")[0] for members in groups[1:])]  # a function: its first group
    return [Block(label, tuple(members)) for label, members in zip(labels, groups, strict=True)]


def _blocks_in_sequence(model: nn.Module, names: list[str], head: str) -> list[Block]:
    units = [name for name, module in in_sequence(model, inside=True) if any(True for _ in module.parameters())]
    units = [unit for unit in units if not below(head, unit)]

    def of_wrapper(unit: str) -> bool:
        parent = unit.rpartition(".")[0]
        return bool(parent) and not isinstance(model.get_submodule(parent), LISTS)

    stem = list(takewhile(of_wrapper, units))
    blocks = [Block("stem", tuple(n for n in names if any(below(n, unit) for unit in stem)))] if stem else []
    return blocks + [Block(unit, tuple(n for n in names if below(n, unit))) for unit in units[len(stem) :]]


def _block_name(matcher: Mapping[str, Any], parameters: list[str]) -> str:
    """The part of a parameter's name that the matcher's pattern takes, the commonest one in the group; or "stem"."""
    found: Counter[str] = Counter()
    for kind, patterns in matcher.items():
        for pattern in [patterns] if isinstance(patterns, str) else [entry[0] for entry in patterns or ()]:
            for match in filter(None, (re.match(pattern, parameter) for parameter in parameters)):
                found["stem" if kind == "stem" else match[0].rstrip(".")] += 1
    return found.most_common(1)[0][0] if found else parameters[0].rpartition(".")[0]


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


LISTS = nn.Sequential | nn.ModuleList


def in_sequence(module: nn.Module, prefix: str = "", inside: bool = False) -> Iterable[tuple[str, nn.Module]]:
    """The children by name, with those of nested sequences in their place.

    With `inside`, also those of lists, and of modules that hold a list or sequence of blocks.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential) or (inside and isinstance(child, nn.ModuleList)):
            yield from in_sequence(child, f"{prefix}{name}.")
        elif inside and any(isinstance(part, LISTS) and _is_of_blocks(part) for part in child.modules()):
            yield from in_sequence(child, f"{prefix}{name}.", inside)
        else:
            yield prefix + name, child


def _is_of_blocks(modules: nn.Module) -> bool:
    """Whether a list has two modules of one kind, which are more than a layer each."""
    kinds = Counter(type(child) for child in modules.children() if any(True for _ in child.children()))
    return max(kinds.values(), default=0) > 1
