"""Wrong use of the learner: each mistake is one sentence that names what is wrong."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import semaug

Case = Callable[[Tensor, Tensor], Any]
IMAGES, LABELS = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


class Classifier(nn.Module):
    """A body with one head, or with an auxiliary head besides, which was added later."""

    def __init__(self, head: nn.Module | None = None, auxiliary: bool = False, returns_both: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8))
        self.fc = head or nn.Linear(8, 3)
        self.aux = nn.Linear(8, 2) if auxiliary else None
        self.returns_both = returns_both

    def forward(self, images: Tensor) -> Any:
        features = self.body(images)
        if self.returns_both and self.aux is not None:
            return self.fc(features), self.aux(features)
        return self.fc(features)


class Cosine(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return F.linear(F.normalize(features), F.normalize(self.weight))


class Negative(semaug.Source):
    def forward(self, features: Tensor, labels: Tensor) -> semaug.Covariance:
        return semaug.Diagonal(-features.square())


class LowRank(nn.Linear):
    """As of LoRA: the update of the weight starts at zero, and only it is trained."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) + features @ self.down.T @ self.up.T


class Capped(Classifier):
    """Logits with a limit, which a head that starts at zero does not reach."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        return 5 * torch.tanh(super().forward(images) / 5)


class Scaled(Classifier):
    """Logits times a learned scale that starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * super().forward(images)


class Skipping(Classifier):
    """Layers are left out at random, as Python draws."""

    def forward(self, images: Tensor) -> Tensor:
        features = self.body[:3](images)
        return self.fc(features if self.training and random.random() < 0.5 else self.body[3](features))


def changed(change: Callable[[Classifier], Any]) -> Classifier:
    model = Classifier()
    change(model)
    return model


def tie(model: Classifier) -> None:
    model.body[3] = nn.Linear(8, 8)
    model.fc = nn.Linear(8, 8)
    model.fc.weight = model.body[3].weight


def compile_inside(model: Classifier) -> None:
    model.body[3] = torch.compile(model.body[3], backend="eager")


def replace_forward(model: Classifier) -> None:
    forward = model.body[3].forward
    model.body[3].forward = lambda features: 2 * forward(features)


def learner(model: Any = None, optimizer: Any = None, **options: Any) -> semaug.LearnableAugmentation:
    model = Classifier() if model is None else model
    parameters = (model.model if isinstance(model, semaug.Network) else model).parameters
    made = semaug.LearnableAugmentation(model, optimizer or torch.optim.SGD(parameters(), lr=0.1), **options)
    made.set_progress(0.5)
    return made


def replace_head(made: semaug.LearnableAugmentation) -> semaug.LearnableAugmentation:
    made.network.model.fc = nn.Linear(8, 3)
    return made


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MISTAKES: dict[str, tuple[Case, str]] = {
    "float labels": (lambda x, y: learner().step(x, y.float()), "indices must be int64, not torch.float32; probabilit"),
    "the same, unchecked": (lambda x, y: learner(check_values=False).step(x, y.float()), "must be int64"),
    "int32 labels": (lambda x, y: learner().step(x, y.int()), "labels as class indices must be int64, not torch.int32"),
    "labels in a column": (lambda x, y: learner().step(x, y[:, None]), "must have shape (6,), not (6, 1)"),
    "probabilities of 4": (lambda x, y: learner().step(x, torch.full((6, 4), 0.25)), "shape (6, 3), not (6, 4)"),
    "labels as a list": (lambda x, y: learner().step(x, y.tolist()), "labels must be a tensor, not a list"),
    "labels too large": (
        lambda x, y: learner().step(x, y + 3),
        "labels must lie in 0 … 2, found 3 … 5; the head of Classifier is its layer 'fc', with 3 outputs",
    ),
    "uint8 images": (
        lambda x, y: learner().step(x.to(torch.uint8), y),
        "images must be normalised floating-point numbers, not torch.uint8",
    ),
    "fp64 images": (lambda x, y: learner().step(x.double(), y), "images of torch.float64 do not match a head of torch"),
    "images as an array": (lambda x, y: learner().step(x.numpy(), y), "images must be a tensor, not a ndarray"),
    "cosine head": (
        lambda x, y: learner(Classifier(Cosine(8, 3))).step(x, y),
        "not that of its linear layer 'fc' alone",
    ),
    "LoRA head": (lambda x, y: learner(Classifier(LowRank())).step(x, y), "not that of its linear layer 'fc' alone"),
    "capped logits": (lambda x, y: learner(Capped()).step(x, y), "not that of its linear layer 'fc' alone"),
    "scaled logits": (lambda x, y: learner(Scaled()).step(x, y), "at other values of its parameter 'scale'"),
    "normed head": (
        lambda x, y: learner(changed(lambda model: weight_norm(model.fc))).step(x, y),
        "cannot run Classifier at other values of its parameter 'fc.parametrizations.weight.original0'",
    ),
    "shared head": (lambda x, y: learner(changed(tie)).step(x, y), "other values of its parameter 'body.3.weight'"),
    "compiled layer": (lambda x, y: learner(changed(compile_inside)).step(x, y), "'body.3._orig_mod.weight'"),
    "replaced forward": (lambda x, y: learner(changed(replace_forward)).step(x, y), "its parameter 'body.3.weight'"),
    "random numbers of Python": (
        lambda x, y: learner(Skipping()).step(x, y),
        "the meta loop repeats passes, and Skipping draws random numbers with Python or NumPy",
    ),
    "spectral norm": (
        lambda x, y: learner(changed(lambda model: spectral_norm(model.body[3]))).step(x, y),
        "every pass changes the buffer 'body.3.parametrizations.weight.0._u'",
    ),
    "another's optimiser": (
        lambda x, y: learner(optimizer=sgd(Classifier())),
        "optimizer has none of the parameters of this Classifier",
    ),
    "another's meta optimiser": (
        lambda x, y: learner(meta_optimizer=sgd(semaug.CovNet(8))),
        "meta_optimizer has none of the parameters of this CovNet",
    ),
    "a source of negative variances": (
        lambda x, y: learner(source=Negative()).step(x, y),
        "the variances of Σ must not be negative",
    ),
    "negative class weights": (
        lambda x, y: learner(class_weights=torch.tensor([1.0, -1.0, 1.0])),
        "class_weights must be finite numbers ≥ 0",
    ),
    "NaN as a class weight": (lambda x, y: learner(class_weights=torch.full((3,), torch.nan)), "must be finite"),
    "half an interval": (lambda x, y: learner(interval=1.5), "interval must be a whole number of at least 1, not 1.5"),
    "a hook on a gradient": (
        lambda x, y: learner(changed(lambda model: model.body[3].weight.register_hook(lambda g: g / 2))).step(x, y),
        "other values of its parameter 'body.3.weight': the weight of its head",
    ),
    "another head": (lambda x, y: replace_head(learner()).step(x, y), "the layer 'fc' was replaced; make the learner"),
    "the name of a source": (lambda x, y: learner(source="covnet"), "source must be a semaug.Source, not a str"),
    "another's state": (lambda x, y: learner().load_state_dict({"source": {}}), "not a state of LearnableAugmentation"),
    "a rate as optimiser": (lambda x, y: learner(optimizer=0.1), "optimizer must be a torch optimiser, not a float"),
    "a function as model": (
        lambda x, y: semaug.LearnableAugmentation(torch.relu, sgd(Classifier())),  # type: ignore[arg-type]
        "model must be an nn.Module or a semaug.Network, not a builtin_function_or_method",
    ),
    "CovNet of another width": (
        lambda x, y: learner(source=semaug.CovNet(16)),
        "CovNet has feature_dim=16, and the head 'fc' needs feature_dim=8",
    ),
    "statistics of other classes": (
        lambda x, y: learner(source=semaug.ClassCovariance(4, 8)),
        "ClassCovariance has num_classes=4, and the head 'fc' needs num_classes=3",
    ),
    "auxiliary head": (
        lambda x, y: learner(Classifier(auxiliary=True)).step(x, y),
        "not that of the linear layer 'aux', taken as the head, whose input should have shape (2, 8), not (2, 3); if "
        "another layer makes the logits, pass semaug.Network(model, head=NAME)",
    ),
    "both outputs": (
        lambda x, y: learner(Classifier(auxiliary=True, returns_both=True)).step(x, y),
        "Classifier returns a tuple, not the logits of the linear layer 'aux', taken as the head; describe its outputs "
        "with semaug.Composite",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    wrong, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong(IMAGES, LABELS)


def test_a_head_with_a_computed_weight_is_trained_where_there_is_no_meta_loop() -> None:
    model = changed(lambda model: weight_norm(model.fc))
    before = [parameter.detach().clone() for parameter in model.fc.parameters()]
    learner(model, source=semaug.Constant(0.5)).step(IMAGES, LABELS)
    assert all(not torch.equal(a, b) for a, b in zip(model.fc.parameters(), before, strict=True))


def test_the_advice_for_an_auxiliary_head_works() -> None:
    network = semaug.Network(Classifier(auxiliary=True), head="fc")
    assert learner(network).step(IMAGES, LABELS)["train_loss"].isfinite()
    both = Classifier(auxiliary=True, returns_both=True)
    composite = semaug.Composite(
        run=lambda model, images: model(images),
        logits=lambda outputs: outputs[0],
        rest=lambda model, outputs, labels: 0.3 * F.cross_entropy(outputs[1], labels % 2),
    )
    metrics = learner(semaug.Network(both, head="fc", composite=composite)).step(IMAGES, LABELS)
    assert metrics["train_loss"].isfinite()


def test_the_snippet_of_the_readme_works_for_any_model() -> None:
    """Of a model with few blocks fewer are frozen, and without a meta loop none."""
    resnet = torchvision.models.resnet18(num_classes=3)
    frozen = {}
    for name, model in {
        "resnet18": resnet,
        "own": Classifier(),
        "sequence": nn.Sequential(*Classifier().children()),
    }.items():
        made = learner(model)
        images = torch.randn(6, 3, 64, 64) if model is resnet else IMAGES
        assert made.step(images, LABELS)["meta_loss"].isfinite()
        frozen[name] = made.network.frozen_blocks
    assert frozen["resnet18"] == 5
    assert frozen["own"] == frozen["sequence"] == 1
    assert learner(source=semaug.ClassCovariance(3, 8)).network.frozen_blocks == 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_and_changes_nothing(context: Callable[[], Any]) -> None:
    model = Classifier()
    learner = semaug.LearnableAugmentation(model, torch.optim.SGD(model.parameters(), lr=0.1), strength=1.0)
    before = [value.clone() for value in (*model.state_dict().values(), *learner.source.state_dict().values())]
    with context(), pytest.raises(ValueError, match="gradients are switched off"):
        learner.step(IMAGES, LABELS)
    after = (*model.state_dict().values(), *learner.source.state_dict().values())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert "train_loss" in learner.step(IMAGES, LABELS)


def test_a_number_instead_of_images_is_refused() -> None:
    model = Classifier()
    learner = semaug.LearnableAugmentation(model, torch.optim.SGD(model.parameters(), lr=0.1), strength=1.0)
    with pytest.raises(ValueError, match="at least 2 images, not 0"):
        learner.step(torch.tensor(1.0), LABELS)
