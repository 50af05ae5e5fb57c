"""Recipes are defaults only; layer-wise learning rates, drop path and averaged weights do what they say."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import DropPath
from timm.optim import param_groups_layer_decay
from torch import nn

from photos import quick_config
from semaug.data.images import normalization_named
from semaug.network.models import build_model
from semaug.network.network import Network
from semaug.training import checkpoints
from semaug.training.optimization import Optimization, layer_groups
from semaug.training.recipes import COMMON, RECIPES
from semaug.training.settings import TrainConfig, identifying
from semaug.training.trainer import train
from semaug.util.errors import SettingError
from semaug.util.untrusted import read_json


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, "birds"),
        ({"method": "p2p"}, "birds"),
        ({"data": "photos"}, "fine-tune-cnn"),
        ({"data": "photos", "model": "torchvision/mobilenet_v2"}, "fine-tune-cnn"),
        ({"data": "photos", "method": "p2p+isda"}, "p2p"),
        ({"data": "photos", "freeze": "all"}, "probe"),
        ({"data": "photos", "freeze": 3}, "fine-tune-cnn"),
        ({"data": "photos", "model": "vit_base_patch14_dinov2"}, "fine-tune-vit"),
        ({"data": "photos", "model": "torchvision/swin_t"}, "fine-tune-vit"),
        ({"data": "photos", "model": "eva02_tiny_patch14_224", "weights": Path("file")}, "fine-tune-vit"),
        ({"data": "photos", "model": "convnext_tiny", "pretrained": False}, "fine-tune-cnn"),
        ({"data": "photos", "recipe": "from-scratch", "freeze": 2}, "from-scratch"),
    ],
)
def test_a_recipe_is_chosen_unless_one_is_named(options: dict[str, Any], recipe: str) -> None:
    config = TrainConfig(**options).resolve()
    assert config.recipe == recipe
    assert config.resolve() == config


def test_options_override_the_recipe_whose_name_does_not_identify_a_run() -> None:
    config = TrainConfig(data="photos", recipe="fine-tune-vit", layer_decay=0.9, ema=0.0, batch_size=256).resolve()
    assert (config.optimizer, config.epochs, config.drop_path, config.crop) == ("adamw", 50, 0.1, 224)
    assert (config.layer_decay, config.ema, config.lr) == (0.9, 0.0, pytest.approx(2e-4))
    assert TrainConfig(data="photos", recipe="probe").resolve().freeze == "all"
    assert TrainConfig(data="photos", method="p2p", crop_scale=0.5).resolve().padding == 0  # the recipe's is 8
    assert "recipe" not in identifying()
    assert {"layer_decay", "drop_path", "ema", "freeze"} <= identifying()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "vit_base_patch16_224"}, "half"),
        ({"model": "timm/vit_base_patch16_224.dino"}, "imagenet"),
        ({"model": "vit_base_patch16_clip_224", "weights": Path("file.safetensors")}, "clip"),
        ({"model": "vit_base_patch16_224", "pretrained": False}, "imagenet"),
        ({"model": "vit_base_patch16_224", "normalize": "imagenet"}, "imagenet"),
        ({"model": "torchvision/vit_b_16"}, "imagenet"),
        ({"model": "resnet50", "method": "p2p"}, "half"),  # as released
        ({"model": "no_such_network"}, "imagenet"),
    ],
)
def test_images_are_normalised_as_the_trained_weights_expect(options: dict[str, Any], expected: str) -> None:
    config = TrainConfig(data="photos", **options).resolve()
    assert config.normalize == expected
    assert normalization_named(config.preprocessing.mean, config.preprocessing.std) == expected


def test_every_normalisation_of_timm_has_a_name() -> None:
    configs = (timm.get_pretrained_cfg(name) for name in timm.list_models())
    means = {(config.mean, config.std) for config in configs if config is not None and config.hf_hub_id}
    assert len(means) >= 4
    assert None not in {normalization_named(*own) for own in means}


def test_weights_of_a_run_are_trained_further_with_its_normalisation(photos: Path, tmp_path: Path) -> None:
    run = train(quick_config(photos, tmp_path / "run", normalize="half", epochs=1))
    for weights in (run, run / "model.safetensors"):
        assert TrainConfig(data="photos", model="small", weights=weights).resolve().normalize == "half"
    (run / "config.json").unlink()
    assert TrainConfig(data="photos", model="small", weights=run).resolve().normalize == "imagenet"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_sets_nothing_but_settings_without_a_default(recipe: Any) -> None:
    assert set(recipe.settings) <= set(COMMON)
    defaults = {setting.name: setting.default for setting in fields(TrainConfig)}
    assert all(defaults[name] is None for name in recipe.defaults(None, None))


def test_layers_do_not_decay_on_p2p_net() -> None:
    with pytest.raises(SettingError, match="two learning rates of its own"):
        TrainConfig(data="photos", method="p2p", layer_decay=0.8).resolve()


# --------------------------------------------------------------------------------------- small transformers of timm

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", {"depth": 3, "embed_dim": 24, "num_heads": 2}),
    "ViT, mean of the tokens": ("vit_small_patch16_rope_224", {"depth": 2, "embed_dim": 24, "num_heads": 2}),
    "DINOv2": ("vit_small_patch14_reg4_dinov2", {"depth": 2, "embed_dim": 24, "num_heads": 2}),
    "EVA-02": ("eva02_tiny_patch14_224", {"depth": 2, "embed_dim": 24, "num_heads": 2}),
    "Swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 2), "embed_dim": 12, "num_heads": (2, 2)}),
    "ConvNeXt": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 24)}),
}
PIXELS = 56


def small(family: str) -> nn.Module:
    name, options = SMALL[family]
    size = {} if family == "ConvNeXt" else {"img_size": PIXELS}
    return timm.create_model(name, num_classes=5, drop_path_rate=0.1, **options, **size)


@pytest.mark.parametrize("family", SMALL)
def test_features_are_what_timm_gives_to_its_classifier(family: str) -> None:
    model, images = small(family).eval(), torch.randn(2, 3, PIXELS, PIXELS)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
        torch.testing.assert_close(Network(model).features(images), expected)


@pytest.mark.parametrize("family", SMALL)
def test_layers_decay_as_in_timm(family: str) -> None:
    model = small(family)
    ours = layer_groups(model, 0.1, 0.05, 0.75)
    undecayed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(model, 0.05, undecayed, layer_decay=0.75)
    expected = {p: (0.1 * group["lr_scale"], group["weight_decay"]) for group in theirs for p in group["params"]}
    found = {p: (group["lr"], group["weight_decay"]) for group in ours for p in group["params"]}
    assert found.keys() == expected.keys()
    assert all(found[p] == pytest.approx(expected[p]) for p in found)
    assert len({group["lr"] for group in ours}) >= 4


def test_layers_decay_in_a_network_of_torchvision() -> None:
    model = build_model("torchvision/mobilenet_v2", 5, 64)
    rate = {p: group["lr"] for group in layer_groups(model, 1.0, 0.0, 0.5) for p in group["params"]}
    assert rate[model.classifier[1].weight] == 1.0
    assert rate[model.features[17].conv[0][0].weight] == 0.5
    assert rate[model.features[16].conv[0][0].weight] == 0.25


def test_drop_path_reaches_the_network_or_is_refused() -> None:
    model = build_model("test_vit", 5, 32, drop_path=0.2)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert max(rates) == pytest.approx(0.2)
    for name in ("small", "torchvision/resnet18", "resnet50-v1"):
        with pytest.raises(SettingError, match=f"{name} has no drop path; set `drop_path` to 0"):
            build_model(name, 5, 32, drop_path=0.2)


# ----------------------------------------------------------------------------------------------------- averaged weights


def test_averaged_weights_forget_the_first_steps_of_a_short_run() -> None:
    config = TrainConfig(model="small", ema=0.99, lr=0.01, method="basic", device="cpu").resolve()
    optimization = Optimization(build_model("small", 3, 32), config, torch.device("cpu"), [2, 2, 2])
    images, labels = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = torch.zeros(0)
    optimization.learner.set_progress(0.0)
    for step in range(5):
        optimization.set_learning_rates(1.0)
        optimization.step(images, labels)
        weight = optimization.model.head.weight.detach().clone()
        decay = (1 + step) / (10 + step)
        expected = weight if step == 0 else decay * expected + (1 - decay) * weight
    torch.testing.assert_close(optimization.evaluated.head.weight.detach(), expected)
    assert not torch.equal(optimization.evaluated.head.weight, optimization.model.head.weight)


def test_a_vision_transformer_is_trained_by_its_recipe(photos: Path, tmp_path: Path) -> None:
    """The saved model is the average, which was evaluated."""
    run = train(
        quick_config(
            photos, tmp_path / "run", model="test_vit", recipe="fine-tune-vit", lr=None, epochs=2, method="isda"
        )
    )
    config = read_json(run / "config.json")
    assert (config["recipe"], config["layer_decay"], config["ema"]) == ("fine-tune-vit", 0.75, 0.999)
    assert config["lr"] == pytest.approx(1e-4 / 4)
    last = checkpoints.load(run / "checkpoints" / "last")
    assert last is not None
    averaged = last["average"]["module.head.weight"]
    best = read_json(run / "evaluation.json")["best_epoch"]
    assert torch.equal(load_file(run / "model.safetensors")["head.weight"], averaged) == (best == 2)
    assert not torch.equal(last["model"]["head.weight"], averaged)
