"""The table of recipes: named defaults of training settings, each with the accuracy to expect.

A setting that the user gives overrides the recipe's. A run stores the resolved settings, so a later change of a recipe
does not change it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

_TRANSFORMERS = re.compile(r"(timm/|torchvision/)?(vit|deit|beit|eva|swin|convnext)")


@dataclass(frozen=True)
class Recipe:
    """A row of the table.

    Args:
        name: What the user types.
        summary: What it is for, and what to expect.
        optimizer: Default optimiser, ``"sgd"`` or ``"adamw"``.
        lr: Learning rate of each optimiser for 64 images.
        weight_decay: Weight decay of each optimiser.
        settings: Defaults of other settings that differ from those in :data:`COMMON`.
    """

    name: str
    summary: str
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Mapping[str, float] = field(default_factory=lambda: {"sgd": 0.03, "adamw": 1e-4})
    weight_decay: Mapping[str, float] = field(default_factory=lambda: {"sgd": 0.0, "adamw": 0.05})
    settings: Mapping[str, Any] = field(default_factory=dict)

    def defaults(self, optimizer: str | None, batch_size: int | None) -> dict[str, Any]:
        """Defaults of all settings that recipes may set.

        Args:
            optimizer: The optimiser that the user gave; None for the recipe's.
            batch_size: Likewise, the images per update.

        Returns:
            Values by name. The learning rate fits the batch.
        """
        values = COMMON | dict(self.settings)
        name, images = optimizer or self.optimizer, batch_size or values["batch_size"]
        # A step of SGD is proportional to the gradient, so that a batch k times as large, with 1/k as many steps, needs
        # k times the rate. Adam divides the gradient by its size, which noise dominates and a batch lowers by √k.
        lr = self.lr[name] * (images / 64) ** (0.5 if name == "adamw" else 1.0)
        return values | {"optimizer": name, "lr": lr, "weight_decay": self.weight_decay[name]}


COMMON: dict[str, Any] = {
    "epochs": 100, "batch_size": 64, "resize": 600, "crop": 448, "crop_scale": None, "padding": 0,
    "normalize": "imagenet", "warmup_epochs": 5.0, "lr_decay": "step",
    "layer_decay": 1.0, "drop_path": 0.0, "ema": 0.0, "freeze": 0,
}  # fmt: skip
"""Defaults of the settings that a recipe may set."""
_AT_224 = {"resize": 256, "crop": 224}
_RELEASED_P2P = {"padding": 8, "normalize": "half", "warmup_epochs": 0.0, "lr_decay": "epoch"}
_ROWS = (
    Recipe(
        "fine-tune-cnn",
        "a pretrained CNN, all layers by SGD, as in the paper. Expect about 76 % on 224-px birds of CUB with ResNet-50 "
        "in 20 epochs",
    ),
    Recipe(
        "fine-tune-vit",
        "a pretrained ViT, Swin, ConvNeXt, DINOv2 or EVA: AdamW, smaller rates for earlier layers, drop path, averaged "
        "weights. Expect more accuracy than from a CNN of its size; measured here on small networks only",
        "adamw",
        settings={"epochs": 50, "layer_decay": 0.75, "drop_path": 0.1, "ema": 0.999, **_AT_224},
    ),
    Recipe(
        "from-scratch",
        "random weights: AdamW, crops of random size, averaged weights. Expect far less than from pretrained weights, "
        "unless there are hundreds of images per class",
        "adamw",
        lr={"sgd": 0.03, "adamw": 5e-4},
        settings={"epochs": 300, "crop_scale": 0.25, "ema": 0.999, **_AT_224},
    ),
    Recipe(
        "p2p",
        "P2P-Net on a pretrained CNN, as in its release: 300 epochs, a tenth of the rate for the backbone. Expect "
        "five times the cost of fine-tune-cnn per epoch; its paper has 90.2 % on CUB at 448 px",
        lr={"sgd": 0.008, "adamw": 1e-4},  # the release: 0.002 for 16 images
        weight_decay={"sgd": 5e-4, "adamw": 0.05},
        settings={"epochs": 300, "batch_size": 16, "resize": 550, **_RELEASED_P2P},
    ),
    Recipe(
        "probe",
        "the head alone, on cached features of a pretrained network. Expect minutes on a CPU: 65 % on CUB with "
        "MobileNetV2, where fine-tuning gives 75 %",
        "adamw",
        lr={"sgd": 0.03, "adamw": 1e-3},
        settings={"epochs": 30, "freeze": "all", **_AT_224},
    ),
    Recipe(
        "birds",
        "the embedded birds, from random weights: a few minutes on a CPU",
        "adamw",
        lr={"sgd": 0.03, "adamw": 0.01},
        settings={"epochs": 15, "batch_size": 16, "resize": 96, "crop": 88},
    ),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ROWS}
"""All recipes by name."""

if TYPE_CHECKING:
    RecipeName = str
else:
    RecipeName = Literal[tuple(RECIPES)]  # the command line offers exactly the names in the table


def describe_recipes() -> str:
    """The table as the help of the command line, with the rule of :func:`choose_recipe`."""
    rows = " ".join(f"{recipe.name}: {recipe.summary}." for recipe in _ROWS)
    return (
        f"Defaults of epochs, images, optimiser, rates and freezing; other options override them. {rows} Default: "
        "birds on the embedded birds, p2p for P2P-Net, probe if all is frozen, fine-tune-vit for pretrained networks "
        "called vit, deit, beit, eva, swin or convnext, else fine-tune-cnn."
    )


def choose_recipe(data: str, composite: str | None, freeze: object, model: str, from_weights: bool) -> Recipe:
    """Choose the recipe of a run whose user named none.

    Args:
        data: Name of the data set.
        composite: The composite model of the method, or None.
        freeze: What is frozen, as the user gave it.
        model: Name of the network.
        from_weights: Whether it starts from trained weights.

    Returns:
        The recipe.
    """
    if data == "birds":
        return RECIPES["birds"]
    if composite == "p2p":
        return RECIPES["p2p"]
    if freeze == "all":
        return RECIPES["probe"]
    return RECIPES["fine-tune-vit" if from_weights and _TRANSFORMERS.match(model) else "fine-tune-cnn"]
