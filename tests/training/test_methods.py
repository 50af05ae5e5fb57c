"""The table of methods: its rows are consistent, and a new row is all that a new method needs."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from photos import quick_config
from semaug import Covariance, Diagonal, JointAugmentation, LearnableAugmentation, Source
from semaug.data.augmentation import ImageTransforms
from semaug.inference.classifier import load_classifier
from semaug.inference.runs import read_metrics
from semaug.network.models import build_model, read_weights
from semaug.studies.grid import Candidate, CompareConfig
from semaug.training import methods
from semaug.training.methods import METHODS, Augmentation, Method, make_learner, method_on, parameter_groups
from semaug.training.trainer import train
from semaug.util.untrusted import read_json

OPTIONS = {setting.name for setting in fields(Augmentation)}


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda row: row.name)
def test_a_row_is_complete_and_consistent(method: Method) -> None:
    assert METHODS[method.name] is method
    assert method.name == method.name.lower().replace(" ", "-")
    assert method.title
    assert method.summary
    assert METHODS[method.base].composite is None
    assert method_on(method.composite, method.base) is method
    assert set(method.options) <= OPTIONS
    assert issubclass(method.learner, LearnableAugmentation)
    assert isinstance(method.images(3), ImageTransforms)
    assert method.augments == ("strength" in method.options)
    settings = method.resolve(Augmentation())
    assert settings.interval is not None
    assert method.relevant(Augmentation()) == Augmentation()


def test_titles_are_unique_and_the_command_line_offers_every_method() -> None:
    assert len({row.title for row in METHODS.values()}) == len(METHODS)
    assert methods.MethodName.__args__ == tuple(METHODS)


def test_an_unknown_combination_is_an_error() -> None:
    with pytest.raises(KeyError):
        method_on("p2p", "mixup")


@pytest.mark.parametrize("name", METHODS)
def test_only_relevant_settings_reach_the_learner(name: str) -> None:
    torch.manual_seed(0)
    row = METHODS[name]
    model: nn.Module = build_model("small", 3, 64)
    if row.composite is not None:
        from semaug.inference.classifier import as_composite

        model = as_composite(row.composite, model, 3)
    settings = Augmentation(strength=7.0, constant=0.25, frozen_blocks=1, meta_lr=0.5, meta_optimizer="adam")
    learner = make_learner(name, settings, model, torch.optim.SGD(parameter_groups(model, 0.1), lr=0.1))
    assert learner.strength == (7.0 if row.augments else 0.0)
    assert learner.network.frozen_blocks == (1 if "frozen_blocks" in row.options else 0)
    assert isinstance(learner, JointAugmentation) == (row.base == "joint")
    assert (learner.meta_optimizer is not None) == ("meta_lr" in row.options)
    if learner.meta_optimizer is not None:
        assert isinstance(learner.meta_optimizer, torch.optim.Adam)
        assert learner.meta_optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("method", ["isda", "isda+mixup", "p2p+isda"])
def test_the_covariance_of_isda_may_be_shared_between_classes(method: str) -> None:
    model: nn.Module = build_model("small", 3, 64)
    if method.startswith("p2p"):
        from semaug.inference.classifier import as_composite

        model = as_composite("p2p", model, 3)
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1), lr=0.1)
    assert make_learner(method, Augmentation(covariance="shrunk"), model, optimizer).source.sharing == "shrunk"


@pytest.mark.parametrize("covariance", ["pooled", "shrunk", "neighbours"])
def test_a_shared_covariance_trains_and_is_saved(photos: Path, tmp_path: Path, covariance: Any) -> None:
    settings = Augmentation(strength=10.0, covariance=covariance)
    run = train(quick_config(photos, tmp_path / "run", method="isda", epochs=2, augmentation=settings))
    assert read_json(run / "config.json")["augmentation"]["covariance"] == covariance
    assert read_metrics(run)[-1]["augmentation_share"] > 0
    assert read_weights(run / "source.safetensors")["count"].sum() > 0


# A new method is one row


class Tempered(Source):
    """A covariance source that nobody has heard of: one variance, learned by the meta loop, for all dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(-1.0))

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        return Diagonal(self.log_variance.exp().expand(features.shape))


def flipped(images: Tensor, rows: Tensor | slice, total: int) -> Tensor:
    return images.flip(-2)


def added(monkeypatch: pytest.MonkeyPatch, row: Method) -> Method:
    monkeypatch.setitem(METHODS, row.name, row)
    return row


def test_a_new_covariance_source_needs_one_row(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Method(
        "tempered",
        "Tempered",
        "one variance for all dimensions, learned by the meta loop",
        source=lambda settings, num_classes, feature_dim: Tempered(),
        options=("strength", "strength_power", "meta_lr", "frozen_blocks"),
        interval=3,
    )
    added(monkeypatch, row)
    options: dict[str, Any] = {"method": row.name, "epochs": 2, "augmentation": Augmentation(4.0, meta_lr=1.0)}
    run = train(quick_config(photos, tmp_path / "run", **options))
    rows = read_metrics(run)
    assert rows[1]["strength"] == 2.0
    assert "meta_loss" in rows[1]
    assert rows[1]["drift"] > 0, "the variance is learned"
    assert read_json(run / "config.json")["method"] == "tempered"
    assert read_json(run / "config.json")["augmentation"]["interval"] == 3, "the default of the row"
    assert len(load_classifier(run).classes) == 3
    assert method_on(None, "tempered") is row


def test_a_new_image_level_method_needs_one_row(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added(
        monkeypatch,
        Method("upside-down", "Upside down", "turned images", lambda classes: ImageTransforms(on_images=flipped)),
    )
    seen: list[Tensor] = []
    step = LearnableAugmentation.step

    def noted(self: LearnableAugmentation, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen.append(images.clone())
        return step(self, images, labels)

    monkeypatch.setattr(LearnableAugmentation, "step", noted)
    for method in ("upside-down", "basic"):
        rows = read_metrics(train(quick_config(photos, tmp_path / method, method=method, epochs=1)))
        assert rows[0]["strength"] == 0
    first, plain = seen[0], seen[3]
    assert first.shape == plain.shape
    assert not torch.equal(first, plain)


def test_compare_knows_a_new_row_and_ignores_what_it_does_not_use(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Method(
        "narrow",
        "Narrow Σ",
        "a small constant Σ",
        source=lambda settings, num_classes, feature_dim: methods.Constant(settings.constant / 10),
        options=("strength", "constant"),
    )
    added(monkeypatch, row)
    shared = quick_config(photos, tmp_path, augmentation=Augmentation(meta_lr=0.5))
    candidates = (Candidate("basic"), Candidate("narrow", {"constant": 0.3}))
    config = CompareConfig(candidates, ("small",), seeds=(0,), output=tmp_path, training=shared)
    config.check()
    basic, narrow = config.runs()
    assert (basic.method, narrow.method) == ("basic", "narrow")
    assert narrow.augmentation == Augmentation(constant=0.3, interval=1)
    run = train(replace(narrow, epochs=1))
    assert read_metrics(run)[0]["variance_mean"] == pytest.approx(0.03)


@pytest.mark.parametrize("method", ["joint", "learnable"])
def test_covnet_may_be_trained_with_momentum(method: str) -> None:
    model = build_model("small", 3, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = make_learner(method, Augmentation(5.0, meta_lr=0.5, meta_momentum=0.9), model, optimizer)
    assert learner.meta_optimizer is not None
    assert learner.meta_optimizer.param_groups[0]["momentum"] == 0.9
    with pytest.raises(ValueError, match="meta_momentum is for meta_optimizer sgd"):
        make_learner(method, Augmentation(meta_optimizer="adam", meta_momentum=0.9), model, optimizer)
