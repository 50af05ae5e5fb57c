"""Models by name, and weights from files that may be hostile."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from semaug.network.models import build_model, load_weights, read_weights
from semaug.network.network import Network
from semaug.util.errors import ModelError, SettingError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("resnet18", "timm."),
        ("timm/resnet18", "timm."),
        ("torchvision/resnet18", "torchvision."),
        ("regnet_x_400mf", "torchvision."),
        ("small", "semaug."),
    ],
)
def test_models_of_both_libraries_are_built_by_name(name: str, kind: str) -> None:
    model = build_model(name, 7, 64)
    assert type(model).__module__.startswith(kind)
    assert Network(model).num_classes == 7


def test_transformers_are_built_for_the_size_of_the_crop() -> None:
    for name in ("vit_tiny_patch16_224", "torchvision/vit_b_16"):
        with torch.device("meta"):
            model = build_model(name, 3, 64)
            assert model(torch.empty(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize("name", ["resnet50", "torchvision/resnet50", "resnet101d"])
def test_a_resnet_v1_has_its_strides_in_the_first_convolutions(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        plain, v1 = build_model(name, 3, 64), build_model(f"{name}-v1", 3, 64)
    assert [key for key, _ in plain.named_modules()] == [key for key, _ in v1.named_modules()]
    moved = {}
    for key, layer in plain.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.stride != v1.get_submodule(key).stride:
            moved[key] = (layer.kernel_size[0], layer.stride[0], v1.get_submodule(key).stride[0])
    stages = (2, 3, 4)
    assert moved == {f"layer{i}.0.conv{k}": v for i in stages for k, v in ((1, (1, 1, 2)), (2, (3, 2, 1)))}
    images = torch.empty(1, 3, 64, 64, device="meta")
    assert v1(images).shape == plain(images).shape


def test_weights_of_a_resnet_v1_are_loaded_and_used_by_its_own_strides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, v1 = build_model("torchvision/resnet50", 3, 64).eval(), build_model("torchvision/resnet50-v1", 3, 64).eval()
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    assert load_weights(v1, tmp_path / "weights.safetensors").startswith("320 tensors loaded")
    images = torch.randn(1, 3, 64, 64)
    first, second = plain.layer1(plain.maxpool(plain.conv1(images))), v1.layer1(v1.maxpool(v1.conv1(images)))
    assert torch.equal(first, second)
    assert not torch.allclose(plain.layer2(first), v1.layer2(second))
    every_other = v1.layer2[0].conv1(second)  # a strided 1×1 convolution drops three of four positions
    torch.testing.assert_close(every_other, plain.layer2[0].conv1(first)[:, :, ::2, ::2], rtol=1e-4, atol=1e-4)
    assert Network(v1).num_classes == 3


@pytest.mark.parametrize("name", ["resnet18-v1", "torchvision/mobilenet_v2-v1", "small-v1"])
def test_v1_is_for_resnets_with_bottlenecks(name: str) -> None:
    with pytest.raises(SettingError, match="-v1 is for ResNets with bottlenecks"):
        build_model(name, 3, 64)
    with pytest.raises(SettingError, match="the libraries have no weights for the model 'resnet50-v1'"):
        build_model("resnet50-v1", 3, 64, pretrained=True)


def test_unknown_names_are_refused_with_similar_ones() -> None:
    with pytest.raises(SettingError, match=r"did you mean resnet50, (?!resnet50\b)"):
        build_model("resnet5o", 3, 64)
    with pytest.raises(SettingError, match="write a timm name, or torchvision/NAME"):
        build_model("keras/resnet50", 3, 64)
    with pytest.raises(SettingError, match="no pretrained weights"):
        build_model("small", 3, 64, pretrained=True)


def test_fitting_tensors_are_loaded_and_the_others_named(tmp_path: Path) -> None:
    model, other = build_model("small", 3, 64), build_model("small", 5, 64)
    stem, head = model.stem[0].weight.clone(), model.head.weight.clone()
    weights = {**other.state_dict(), "extra": torch.zeros(1)}
    del weights["stem.0.weight"], weights["stem.1.num_batches_tracked"]
    save_file(weights, tmp_path / "weights.safetensors")
    assert load_weights(model, tmp_path / "weights.safetensors") == (
        "22 tensors loaded; 2 of another shape, left as initialised (head.weight, head.bias); "
        "1 not in the file, left as initialised (stem.0.weight); 1 of the file not used (extra)"
    )
    assert torch.equal(model.blocks[0][0].weight, other.blocks[0][0].weight)
    assert torch.equal(model.stem[0].weight, stem)
    assert torch.equal(model.head.weight, head)


def test_weights_of_a_vision_transformer_fit_other_sizes_of_images(tmp_path: Path) -> None:
    """As in timm, whose function resizes the position embeddings; names of DINOv2's release are translated too."""
    trained, larger = build_model("test_vit", 5, 64), build_model("test_vit", 5, 96)
    assert trained.pos_embed.shape != larger.pos_embed.shape
    weights = {name.replace("head.", "linear_head."): value for name, value in trained.state_dict().items()}
    save_file(weights, tmp_path / "vit.safetensors")
    report = load_weights(larger, tmp_path / "vit.safetensors")
    assert "of another shape" not in report
    position = larger.pos_embed.detach()[:, 1:].mean((0, 1))
    torch.testing.assert_close(position, trained.pos_embed.detach()[:, 1:].mean((0, 1)), rtol=0, atol=0.01)
    assert torch.equal(larger.blocks[0].attn.qkv.weight, trained.blocks[0].attn.qkv.weight)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_files_with_code_or_damage_are_refused_without_running_anything(tmp_path: Path) -> None:
    torch.save({"weight": Malicious(tmp_path / "owned")}, tmp_path / "evil.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Malicious(tmp_path / "owned")))
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "evil.safetensors").write_bytes((tmp_path / "evil.pth").read_bytes())
    torch.save({"weight": torch.zeros(2)}, tmp_path / "tensors.bin")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, sentence in {
        "evil.pth": "is not a .safetensors file; other formats can hold code",
        "raw.pth": "is not a .safetensors file",
        "tensors.bin": "is not a .safetensors file",
        "noise.safetensors": "cannot read weights from",
        "evil.safetensors": "cannot read weights from",
        "pipe.safetensors": "there is no weights file",
        "absent.safetensors": "there is no weights file",
    }.items():
        with pytest.raises(ModelError, match=sentence) as caught:
            read_weights(tmp_path / name)
        assert name in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_a_file_of_very_many_tensors_is_not_read(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"extra.{i}": empty for i in range(10_001)}).encode()
    (tmp_path / "many.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="it has 10001 tensors, and at most 10000 are read"):
        read_weights(tmp_path / "many.safetensors")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="nothing in .* fits the model"):
        load_weights(build_model("small", 3, 64), tmp_path / "other.safetensors")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = build_model("small", 3, 64)
    save_file({**model.state_dict(), "head.bias": torch.tensor([0.0, torch.nan, 0.0])}, tmp_path / "nan.safetensors")
    with pytest.raises(ModelError, match="has numbers that are not finite, in head.bias"):
        load_weights(model, tmp_path / "nan.safetensors")
