"""Try families of timm in the meta loop, and write the table of docs/networks.md.

    python tests/families.py

Each network has random weights, is split in the middle, and takes one training step in each order, with one meta
update. All numbers must be finite, the replay of the late part must give the features of the forward pass, and the
model's output must be that of its head. A network that cannot be split must be refused with a reason.
"""

import warnings
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import nn

import semaug

DOCUMENT = Path(__file__).parents[1] / "docs" / "networks.md"
BEGIN, END = "<!-- table: python tests/families.py -->", "<!-- end of table -->"
PIXELS = 64
FAMILIES = {
    "ResNet": "resnet18",
    "ResNeXt (ByoNet)": "resnext26ts",
    "SE-ResNet": "seresnet18",
    "SK-ResNet": "skresnet18",
    "ResNeSt": "resnest14d",
    "ResNetV2 (BiT)": "resnetv2_18",
    "RegNet": "regnety_002",
    "RepVGG": "repvgg_a0",
    "MobileOne": "mobileone_s0",
    "DenseNet": "densenet121",
    "DLA": "dla34",
    "DPN": "dpn48b",
    "VoVNet": "ese_vovnet19b_slim_dw",
    "HRNet": "hrnet_w18_small",
    "NF-RegNet": "nf_regnet_b0",
    "EfficientNet": "efficientnet_lite0",
    "GhostNet": "ghostnet_050",
    "MobileNetV3": "mobilenetv3_small_050",
    "MobileNetV4": "mobilenetv4_conv_small_035",
    "ReXNet": "rexnet_100",
    "FasterNet": "fasternet_t0",
    "StarNet": "starnet_s050",
    "ConvNeXt": "convnext_atto",
    "ConvNeXt V2": "convnextv2_atto",
    "InceptionNeXt": "inception_next_atto",
    "EdgeNeXt": "edgenext_xx_small",
    "MambaOut": "mambaout_femto",
    "FastViT": "fastvit_t8",
    "MobileViT": "mobilevit_xxs",
    "EfficientViT": "efficientvit_b0",
    "ViT": "vit_tiny_patch16_224",
    "EVA-02": "eva02_tiny_patch14_224",
    "CaiT": "cait_xxs24_224",
    "ConViT": "convit_tiny",
    "CoaT": "coat_lite_tiny",
    "PiT": "pit_ti_224",
    "PVT v2": "pvt_v2_b0",
    "XCiT": "xcit_nano_12_p16_224",
    "TinyViT": "tiny_vit_5m_224",
    "Swin": "swin_tiny_patch4_window7_224",
    "gMLP": "gmlp_ti16_224",
    "Sequencer (LSTM)": "sequencer2d_s",
    "CrossViT": "crossvit_tiny_240",
    "LeViT, distilled": "levit_128s",
    "RepViT": "repvit_m0_9",
    "VOLO": "volo_d1_224",
}


class Row(NamedTuple):
    """A line of the table."""

    family: str
    model: str
    blocks: str
    works: str
    remark: str

    def __str__(self) -> str:
        return f"| {self.family} | `{self.model}` | {self.blocks} | {self.works} | {self.remark} |"


def row(family: str) -> Row:
    """The line of one family, from a new trial."""
    model = build(FAMILIES[family])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            blocks = try_out(model)
        except ValueError as error:
            return Row(family, FAMILIES[family], "", "no", str(error))
    messages = {str(warning.message) for warning in caught if str(warning.message).startswith("semaug: ")}
    remark = "; ".join(sorted(text.removeprefix("semaug: ") for text in messages))
    return Row(family, FAMILIES[family], str(blocks), "yes", remark)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    try:
        return timm.create_model(name, num_classes=5, img_size=PIXELS)
    except TypeError:  # a network for images of any size
        return timm.create_model(name, num_classes=5)


def try_out(model: nn.Module) -> int:
    """Take one training step in both orders, with half of the blocks frozen; returns the number of blocks."""
    whole = semaug.Network(model)
    count = sum(block.name != "stem" for block in whole.blocks)
    nn.init.normal_(whole.head.weight, std=0.05)  # with a head of zeros, Σ would have no effect in the first step
    images, labels = torch.randn(4, 3, PIXELS, PIXELS), torch.tensor([0, 1, 2, 3])
    for order, interval in (("paper", 2), ("pipelined", 1)):  # one meta update each
        network = semaug.Network(model, count // 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        learner = semaug.LearnableAugmentation(network, optimizer, order=order, interval=interval, strength=10.0)
        metrics = learner.step(images, labels)
        assert all(value.isfinite() for value in metrics.values()), metrics
        assert metrics["meta_gradient_norm"] > 0
        with torch.no_grad():
            features, tape = network.forward(images)
            torch.testing.assert_close(network.replay({}, tape), features, rtol=1e-3, atol=1e-4)
            model.eval()
            logits = torch.nn.functional.linear(network.features(images), *network.head_parameters({}))
            torch.testing.assert_close(logits, model(images).flatten(1), rtol=1e-3, atol=1e-4)
            model.train()
    return count


def table(rows: list[Row]) -> str:
    heading = "| family | network tried | blocks | works | remark |\n|---|---|---|---|---|\n"
    return heading + "\n".join(map(str, rows)) + "\n"


def committed() -> str:
    """The table in the document."""
    return DOCUMENT.read_text(encoding="utf-8").split(BEGIN + "\n")[1].split(END)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES:
        rows.append(row(family))
        print(rows[-1], flush=True)
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN + "\n")
    DOCUMENT.write_text(before + BEGIN + "\n" + table(rows) + END + rest.split(END)[1], encoding="utf-8")
