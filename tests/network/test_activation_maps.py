"""Class-activation maps against the head's weights, the logits, and differences of the logit."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from semaug.network.activation_maps import activation_maps, class_maps, find_map_layer
from semaug.network.hooks import hooked
from semaug.network.models import SmallNet
from semaug.network.network import Network
from semaug.util.errors import ModelError

LABELS = torch.tensor([0, 2])


def photos(side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side, dtype=torch.float64)


def ready(model: nn.Module) -> nn.Module:
    return model.double().eval()


def vit(**options: object) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.models.VisionTransformer(**sizes, **options)


def scaled(token: int, by: float) -> Callable[[Tensor], Tensor]:
    """A change of one of the tokens (N, T, D)."""

    def change(output: Tensor) -> Tensor:
        output = output.clone()
        output[:, token] *= by
        return output

    return change


@pytest.mark.parametrize("build", [torchvision.models.resnet18, torchvision.models.mobilenet_v2])
def test_a_pooled_map_is_the_heads_weights_times_the_features_and_adds_up_to_the_logit(build) -> None:
    model, images = ready(build(num_classes=3)), photos()
    maps = class_maps(model, images, LABELS)
    network = Network(model)
    weight, bias = network.head_parameters({})
    layer = find_map_layer(network, images)
    outputs: list[Tensor] = []
    with hooked(model.get_submodule(layer), outputs.append), torch.no_grad():
        logits = model(images)[[0, 1], LABELS]
    exact = torch.einsum("ndhw,nd->nhw", outputs[0], weight[LABELS]) / 4
    assert maps.shape == (2, 2, 2)
    torch.testing.assert_close(maps, exact, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(maps.sum((1, 2)), logits - bias[LABELS], atol=1e-6, rtol=0)
    # SnapMix has the same maps, shifted and scaled to distributions
    same = maps - maps.amin((1, 2), keepdim=True)
    of_snapmix = activation_maps(outputs[0], weight[LABELS], (2, 2))
    torch.testing.assert_close(of_snapmix, same / same.sum((1, 2), keepdim=True))


def test_the_map_below_a_global_maximum_adds_up_to_the_logit_too() -> None:
    model, images = ready(SmallNet(3)), photos(32)
    maps = class_maps(model, images, LABELS)
    logits = model(images)[[0, 1], LABELS] - model.head.bias[LABELS]
    torch.testing.assert_close(maps.sum((1, 2)), logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("build", "layer", "prefix"),
    [
        (vit, "blocks.1.norm1", 1),
        (lambda: vit(reg_tokens=4), "blocks.1.norm1", 5),
        (lambda: vit(class_token=False, global_pool="avg"), "norm", 0),
        (
            lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=3),
            "encoder.layers.encoder_layer_1.ln_1",
            1,
        ),
    ],
    ids=["class token", "registers", "pooled tokens", "torchvision"],
)
def test_tokens_count_by_what_scaling_them_changes(build, layer: str, prefix: int) -> None:
    model, images = ready(build()), photos(32)
    for parameter in model.parameters():  # timm's and torchvision's heads start near zero
        nn.init.normal_(parameter, std=0.3)
    maps = class_maps(model, images, LABELS)
    assert maps.shape == (2, 4, 4)
    with torch.no_grad():
        for row, column in ((0, 0), (1, 3), (3, 2)):
            ends = []
            for by in (1 + 1e-5, 1 - 1e-5):
                with hooked(model.get_submodule(layer), scaled(prefix + 4 * row + column, by)):
                    ends.append(model(images)[[0, 1], LABELS])
            slope = (ends[0] - ends[1]) / 2e-5
            torch.testing.assert_close(maps[:, row, column], slope, atol=1e-8, rtol=1e-5)


def test_channels_last_and_networks_with_two_linear_layers() -> None:
    swin = timm.models.SwinTransformer(
        img_size=32, patch_size=4, window_size=4, embed_dim=12, depths=(1, 1), num_heads=(2, 2), num_classes=3
    )
    model, images = ready(swin), photos(32)
    logits = model(images)[[0, 1], LABELS] - model.head.fc.bias[LABELS]
    torch.testing.assert_close(class_maps(model, images, LABELS).sum((1, 2)), logits, atol=1e-6, rtol=0)
    mobilenet = ready(torchvision.models.mobilenet_v3_small(num_classes=3))  # a hidden layer between map and head
    assert class_maps(mobilenet, photos(), LABELS).shape == (2, 2, 2)


def test_nothing_of_the_model_changes() -> None:
    model, images = SmallNet(3).requires_grad_(False).train(), torch.randn(2, 3, 32, 32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode(False), torch.no_grad():
        assert not class_maps(model, images, LABELS).requires_grad
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_network_without_a_map_is_one_sentence() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(ModelError, match="Sequential has no feature map"):
        class_maps(model, torch.randn(2, 3, 2, 2), LABELS)
