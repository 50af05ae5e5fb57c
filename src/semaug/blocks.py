"""What a classifier is made of: its linear head, and its blocks from input to output."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

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
        units = [name for name, module in in_sequence(model) if any(True for _ in module.parameters())]
        return [Block(unit, tuple(n for n in names if below(n, unit))) for unit in units if not below(head, unit)]
    from timm.models import group_parameters  # here, so that the loss alone does not load timm

    groups: list[list[str]] = list(group_parameters(model, matcher).values())
    # The head's own group comes after the blocks: all that matches no pattern, such as a final norm.
    groups = [members for members in groups if not any(below(name, head) for name in members)]
    return [Block(_block_name(matcher, members), tuple(members)) for members in groups]


def _block_name(matcher: Any, parameters: list[str]) -> str:
    """The part of a parameter's name that the matcher's pattern takes, the commonest one in the group; or "stem"."""
    found: Counter[str] = Counter()
    for kind, patterns in matcher.items() if isinstance(matcher, Mapping) else ():
        for pattern in [patterns] if isinstance(patterns, str) else [entry[0] for entry in patterns or ()]:
            for match in filter(None, (re.match(pattern, parameter) for parameter in parameters)):
                found["stem" if kind == "stem" else match[0].rstrip(".")] += 1
    return found.most_common(1)[0][0] if found else parameters[0].rpartition(".")[0]


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def in_sequence(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, nn.Module]]:
    """The children by name, with those of nested sequences in their place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential):
            yield from in_sequence(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child
