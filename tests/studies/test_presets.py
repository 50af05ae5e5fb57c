"""The presets hold the paper's numbers, and become the runs that they should."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from semaug.studies.cells import Cell
from semaug.studies.presets import all_experiments, experiments
from semaug.studies.presets.table_covnet import count_shapes
from semaug.studies.presets.table_sota_p2p import published
from semaug.studies.reproduce import Choice, make_plan
from semaug.studies.scales import NETWORKS, Setup, method_of, missing_data, stand_in, train_config
from semaug.util.errors import SemaugError

NAMES = [
    "table-datasets", "table-networks", "table-sota-p2p", "table-image-level", "figure-depth", "figure-joint",
    "figure-strength", "figure-schedule", "figure-frozen-blocks", "table-covnet", "table-imagenet",
    "figure-neighbours", "figure-tsne", "figure-augmentations", "figure-bound", "theorem",
]  # fmt: skip


def paper(name: str, **wanted: object) -> float | None:
    """The paper's result in the one cell with these properties."""
    cells = [c for c in all_experiments()[name].cells if all(getattr(c, key) == value for key, value in wanted.items())]
    assert len(cells) == 1, (name, wanted, cells)
    return cells[0].paper


def test_every_table_and_figure_is_there() -> None:
    assert list(all_experiments()) == NAMES
    for preset in experiments(("all",)):
        assert preset.title
        assert preset.shows
        assert preset.caption
        assert "\n" not in preset.line
        module = import_module(f"semaug.studies.presets.{preset.name.replace('-', '_')}")
        for part in ("Settings of the paper", "The paper's results", "Time at full scale"):
            assert f"**{part}" in str(module.__doc__), (preset.name, part)


@pytest.mark.parametrize(
    ("dataset", "figures"),
    [
        ("cub", (84.5, 85.3, 86.7)),
        ("aircraft", (91.5, 91.7, 92.7)),
        ("cars", (92.9, 93.2, 94.3)),
        ("nabirds", (83.5, 83.9, 85.5)),
    ],
)
def test_data_sets(dataset: str, figures: tuple[float, ...]) -> None:
    found = [paper("table-datasets", dataset=dataset, method=m) for m in ("basic", "isda", "learnable")]
    assert tuple(found) == figures


@pytest.mark.parametrize(
    ("network", "figures"),
    [
        ("ResNet-50", (84.5, 85.3, 86.7)),
        ("DenseNet-161", (86.7, 87.2, 88.4)),
        ("EfficientNet-B0", (85.3, 85.5, 86.3)),
        ("MobileNetV2", (82.6, 83.1, 84.3)),
        ("RegNetX-400MF", (82.9, 83.2, 84.1)),
        ("ViT-B/16", (90.3, 90.3, 90.7)),
    ],
)
def test_networks(network: str, figures: tuple[float, ...]) -> None:
    found = [paper("table-networks", network=network, method=m) for m in ("basic", "isda", "learnable")]
    assert tuple(found) == figures


def test_other_figures_by_hand() -> None:
    assert paper("table-image-level", method="cutmix") == 85.9
    assert paper("table-image-level", method="mixup") == 85.4
    assert paper("table-image-level", method="random-erasing") == 83.8
    assert paper("table-image-level", method="randaugment") == 82.8
    assert paper("table-sota-p2p", network="P2P-Net", method="basic") == 90.2
    assert paper("table-sota-p2p", network="P2P-Net", method="isda") == 90.4
    assert paper("table-sota-p2p", network="P2P-Net", method="learnable") == 91.0
    assert paper("table-imagenet", network="ResNet-50", method="learnable") == 77.4
    assert paper("table-imagenet", network="ResNet-50", method="basic") == 76.4
    assert paper("table-imagenet", network="ResNeXt-50", method="isda") == 78.1
    assert paper("table-covnet", setting="4 × 512") == 86.0
    assert paper("figure-strength", network="MobileNetV2", setting="λ0 = 10") == 84.3
    assert paper("figure-depth", network="ResNet-152", method="learnable") is None  # drawn, not given as a number


def test_published_results() -> None:
    rows = {row.method: row for row in published()}
    assert len(rows) == 17
    assert (rows["CAL"].accuracy, rows["CAL"].backbone) == (90.6, "ResNet-101")
    assert (rows["Bilinear CNN"].accuracy, rows["PRIS"].accuracy, rows["DTRG"].accuracy) == (84.1, 90.0, 88.8)
    assert "Counterfactual attention learning" in rows["CAL"].citation
    assert all(row.citation and "\\" not in row.citation for row in rows.values())


def test_the_size_of_covnet_is_that_of_the_paper(tmp_path: Path) -> None:
    counted = count_shapes(all_experiments()["table-covnet"], Setup("full", tmp_path))["columns"]
    assert {setting: tuple(values.values()) for setting, values in counted.items()} == {
        "1 × 256": ("2.10", "1.05"),
        "1 × 512": ("4.19", "2.10"),
        "1 × 1024": ("8.39", "4.20"),
        "1 × 2048": ("16.78", "8.39"),
        "2 × 512": ("4.72", "2.36"),
        "3 × 512": ("5.24", "2.63"),
        "4 × 512": ("5.77", "2.89"),
    }
    assert set(counted) == {cell.setting for cell in all_experiments()["table-covnet"].cells} - {""}


def test_full_scale_has_the_papers_settings(tmp_path: Path) -> None:
    setup = Setup("full", tmp_path)
    config = train_config(Cell("learnable"), setup)
    assert (config.resize, config.crop, config.epochs, config.batch_size, config.lr) == (600, 448, 100, 64, 0.03)
    assert (config.optimizer, config.momentum, config.weight_decay, config.pretrained) == ("sgd", 0.9, 0.0, True)
    settings = config.augmentation
    assert (settings.strength, settings.strength_power, settings.meta_lr) == (10.0, 1.0, 0.001)
    assert (settings.frozen_blocks, settings.width, settings.depth, settings.interval) == (10, None, 1, 1)
    assert train_config(Cell("learnable", network="ViT-B/16"), setup).augmentation.frozen_blocks == 0
    vit = train_config(Cell("basic", network="ViT-B/16"), setup).resolve()
    assert (vit.optimizer, vit.lr, vit.layer_decay, vit.drop_path, vit.ema) == ("sgd", 0.03, 1, 0, 0)
    imagenet = next(c for c in all_experiments()["table-imagenet"].cells if c.method == "learnable")
    config = train_config(imagenet, setup)
    assert (config.epochs, config.weight_decay, config.pretrained) == (120, 1e-4, False)
    assert (config.warmup_epochs, config.crop_scale, config.crop) == (0, 0.08, 224)
    assert (config.augmentation.strength, config.augmentation.meta_lr, config.augmentation.interval) == (7.5, 5e-4, 100)


def test_joint_training_has_momentum_and_the_rates_of_the_figure(tmp_path: Path) -> None:
    cells = [cell for cell in all_experiments()["figure-joint"].cells if cell.method == "joint"]
    for scale in ("full", "small"):
        found = [train_config(cell, Setup(scale, tmp_path)).augmentation for cell in cells]
        assert [(settings.meta_lr, settings.meta_momentum) for settings in found] == [
            (0.03, 0.9),
            (0.003, 0.9),
            (0.001, 0.9),
        ]


def test_frozen_blocks_have_the_papers_zero_which_is_the_stem(tmp_path: Path) -> None:
    cells = [cell for cell in all_experiments()["figure-frozen-blocks"].cells if cell.method == "learnable"]
    found = [train_config(cell, Setup("full", tmp_path)).augmentation.frozen_blocks for cell in cells]
    assert found == [0, "stem", 4, 8, 10, 12, 14, 16]


@pytest.mark.parametrize("scale", ["full", "small"])
def test_every_cell_makes_a_valid_configuration(tmp_path: Path, scale: str) -> None:
    setup = Setup(scale, tmp_path)  # type: ignore[arg-type]
    for preset in experiments(("all",)):
        for cell in preset.at(setup.scale):
            assert train_config(cell, setup).resolve().method == method_of(cell)


def test_shared_cells_are_one_run(tmp_path: Path) -> None:
    setup = Setup("small", tmp_path)
    shared = [
        next(c for c in all_experiments()[name].at("small") if c.method == "learnable" and c.paper == 86.7)
        for name in ("table-datasets", "table-networks", "table-image-level", "figure-joint", "figure-frozen-blocks")
    ]
    assert len({train_config(cell, setup).output for cell in shared}) == 1
    covnet = next(c for c in all_experiments()["table-covnet"].cells if c.setting == "1 × 512")
    assert train_config(covnet, setup).output == train_config(shared[0], setup).output
    # only settings that a method uses identify its runs
    basic = Cell("basic")
    assert train_config(replace(basic, strength=5.0), setup).output == train_config(basic, setup).output
    isda = Cell("isda")
    assert train_config(replace(isda, frozen=1), setup).output == train_config(isda, setup).output
    assert train_config(replace(isda, strength=5.0), setup).output != train_config(isda, setup).output
    assert train_config(isda, setup, 1).output != train_config(isda, setup, 0).output
    plan = make_plan(experiments(("all",)), setup, Choice())
    assert len(plan.configs) == len(set(plan.configs))
    assert len(plan.configs) < sum(len(p.at("small")) * len(p.seeds("small")) for p in experiments(("all",)))


def test_what_cannot_be_run_says_why(tmp_path: Path) -> None:
    setup = Setup("full", tmp_path / "out", data=tmp_path)
    plan = make_plan(experiments(("table-sota-p2p", "table-imagenet")), setup, Choice())
    assert not plan.configs
    assert any("needs CUB-200-2011, which is not in" in reason for reason in plan.reasons.values())
    assert any("needs ImageNet, which is not in" in reason for reason in plan.reasons.values())
    assert "stands in for CUB-200-2011 only" in missing_data("cars", Setup("small", tmp_path, data=tmp_path))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SemaugError, match="unknown experiment 'table-1'"):
        experiments(("table-1",))
    with pytest.raises(SemaugError, match="unknown network 'resnet'"):
        Choice(networks=("resnet",)).check()


def test_stand_ins_are_models_that_exist() -> None:
    import timm

    for network in NETWORKS:
        name = stand_in(Cell("basic", network=network))
        assert name == "small" or timm.is_model(name)


@pytest.mark.parametrize("scale", ["full", "small"])
def test_p2p_cells_train_p2p_net_with_its_own_settings(tmp_path: Path, scale: Any) -> None:
    cells = [cell for cell in all_experiments()["table-sota-p2p"].cells if cell.network == "P2P-Net"]
    found = [train_config(cell, Setup(scale, tmp_path)).resolve() for cell in cells]
    assert [config.method for config in found] == ["p2p", "p2p+isda", "p2p+learnable"]
    assert [config.augmentation.interval for config in found] == [10, 10, 10]
    assert found[2].augmentation.frozen_blocks == 0
    if scale == "full":
        assert {(c.epochs, c.lr, c.weight_decay, c.batch_size) for c in found} == {(300, 0.002, 5e-4, 16)}
        assert {(c.resize, c.crop, c.padding, c.warmup_epochs, c.lr_decay) for c in found} == {
            (550, 448, 8, 0, "epoch")
        }
        assert {(c.preprocessing.mean, c.preprocessing.std) for c in found} == {((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}
        assert [config.augmentation.strength for config in found[1:]] == [5.0, 5.0]  # the first does not use it
