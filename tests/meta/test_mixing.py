"""SnapMix and Manifold Mixup against plain formulations in fp64, and exact resume of a user's own loop."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import semaug
from semaug.meta import mixing
from semaug.meta.mixing import DominantClassCovariance, draw_box, find_stages
from semaug.network.activation_maps import activation_maps, find_map_layer
from semaug.util.errors import ModelError

Array = np.ndarray[Any, Any]
CLASSES = 3


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(images)))


class Net(nn.Module):
    """Two stages of one and two blocks, with BatchNorm, average pooling, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Convolution(3, 4, 2), Convolution(4, 6, 2), Convolution(6, 6, 1))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(images).mean((2, 3)))


def network() -> Net:
    torch.manual_seed(1)
    return Net().double()


def batches(count: int, size: int = 9) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 3, 12, 10, generator=generator, dtype=torch.float64),
         torch.randint(CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]  # fmt: skip


def resized(image: Array, height: int, width: int, corners: bool) -> Array:
    """Bilinear interpolation of an array (h, w), pixel by pixel."""
    result = np.empty((height, width))
    for i in range(height):
        for j in range(width):
            places = []
            for index, new, old in ((i, height, image.shape[0]), (j, width, image.shape[1])):
                if corners:
                    place = index * (old - 1) / (new - 1) if new > 1 else 0.0
                else:
                    place = max(0.0, (index + 0.5) * old / new - 0.5)
                low = min(int(place), old - 1)
                places.append((low, min(low + 1, old - 1), place - low))
            (top, bottom, y), (left, right, x) = places
            upper = (1 - x) * image[top, left] + x * image[top, right]
            lower = (1 - x) * image[bottom, left] + x * image[bottom, right]
            result[i, j] = (1 - y) * upper + y * lower
    return result


def naive_maps(features: Array, weight: Array, bias: Array, labels: Array, height: int, width: int) -> Array:
    maps = []
    for feature, label in zip(features, labels, strict=True):
        small = sum(weight[label, d] * feature[d] for d in range(len(feature))) + bias[label]
        large = resized(small, height, width, corners=False)
        large -= large.min()
        maps.append(large / large.sum())
    return np.stack(maps)


def naive_snapmix(
    images: Array, labels: Array, maps: Array, target: mixing.Box, source: mixing.Box
) -> tuple[Array, list[tuple[int, float, int, float]]]:
    """Mixed images and, for each of them, both labels with their weights."""
    mixed, weights = images.copy(), []
    for i, label in enumerate(labels):
        other = i - 1  # -1 is the last
        for channel in range(images.shape[1]):
            patch = images[other, channel][source]
            height, width = (side.stop - side.start for side in target)
            mixed[i, channel][target] = resized(patch, height, width, corners=True)
        weights.append((int(label), 1 - maps[i][target].sum(), int(labels[other]), maps[other][source].sum()))
    return mixed, weights


def weighted_cross_entropy(logits: Tensor, weights: list[tuple[int, float, int, float]]) -> Tensor:
    logs = logits.log_softmax(1)
    return torch.stack([-a * row[i] - b * row[j] for row, (i, a, j, b) in zip(logs, weights, strict=True)]).mean()


def test_activation_maps_are_those_of_numpy() -> None:
    random = np.random.default_rng(0)
    features, weight = random.standard_normal((4, 5, 3, 4)), random.standard_normal((CLASSES, 5))
    labels = np.array([0, 2, 1, 2])
    expected = naive_maps(features, weight, np.array([0.3, -2.0, 1.0]), labels, 13, 11)
    rows = torch.from_numpy(weight)[torch.from_numpy(labels)]
    maps = activation_maps(torch.from_numpy(features), rows, (13, 11))
    assert np.abs(maps.numpy() - expected).max() < 1e-14
    assert torch.allclose(maps.sum((1, 2)), torch.ones(4, dtype=torch.float64))


def test_a_map_that_is_the_same_everywhere_is_uniform() -> None:
    assert torch.equal(activation_maps(torch.ones(1, 2, 3, 3), torch.ones(1, 2), (4, 5)), torch.full((1, 4, 5), 1 / 20))


class Fixed:
    """Draws that are known in advance."""

    def __init__(self, area: float, *centre: int) -> None:
        self.area, self.centre = area, list(centre)

    def beta(self, a: float, b: float) -> float:
        assert a == b == 5.0
        return self.area

    def integers(self, side: int) -> int:
        return self.centre.pop(0)


@pytest.mark.parametrize(
    ("area", "centre", "box"),
    [
        (0.25, (10, 20), (5, 15, 10, 30)),
        (0.25, (2, 39), (0, 7, 29, 40)),  # cut off at the border
        (1.0, (10, 20), (0, 20, 0, 40)),
        (1e-9, (19, 0), (19, 20, 0, 1)),  # at least a pixel
    ],
)
def test_a_box_has_the_drawn_area_around_the_drawn_pixel(
    area: float, centre: tuple[int, int], box: tuple[int, ...]
) -> None:
    rows, columns = draw_box(Fixed(area, *centre), 20, 40)  # type: ignore[arg-type]
    assert (rows.start, rows.stop, columns.start, columns.stop) == box


def halves(images: Tensor, labels: Tensor, pieces: int) -> list[list[tuple[Tensor, Tensor]]]:
    both = zip(images.tensor_split(2), labels.tensor_split(2), strict=True)
    return [list(zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)) for x, y in both]


def naive_snapmix_steps(model: Net, optimizer: torch.optim.Optimizer, pieces: int, steps: int) -> None:
    """SnapMix in a plain loop. The pass for the maps moves no running statistics."""
    number = 0
    for images, labels in batches(steps):
        for half in halves(images, labels, pieces):
            random = np.random.default_rng((torch.initial_seed(), number))
            target, source = draw_box(random, 12, 10), draw_box(random, 12, 10)
            optimizer.zero_grad()
            for x, y in half:
                features = copy.deepcopy(model).stages(x).detach().numpy()
                weight, bias = (parameter.detach().numpy() for parameter in model.head.parameters())
                maps = naive_maps(features, weight, bias, y.numpy(), 12, 10)
                mixed, weights = naive_snapmix(x.numpy(), y.numpy(), maps, target, source)
                share = len(x) / sum(len(part) for part, _ in half)
                (share * weighted_cross_entropy(model(torch.from_numpy(mixed)), weights)).backward()
            optimizer.step()
            number += 1


def naive_manifold_steps(model: Net, optimizer: torch.optim.Optimizer, pieces: int, steps: int) -> set[int]:
    """Manifold Mixup in a plain loop; returns the layers that were mixed."""
    number, used = 0, set()
    for images, labels in batches(steps):
        for half in halves(images, labels, pieces):
            random = np.random.default_rng((torch.initial_seed(), number))
            own, layer = random.beta(2.0, 2.0), int(random.integers(3))
            used.add(layer)
            optimizer.zero_grad()
            for x, y in half:
                others = [(i - 1) % len(x) for i in range(len(x))]
                hidden = x
                for place, block in enumerate([nn.Identity(), model.stages[0], model.stages[1:]]):
                    hidden = block(hidden)
                    if place == layer:
                        hidden = own * hidden + (1 - own) * hidden[others]
                weights = [(int(y[i]), own, int(y[j]), 1 - own) for i, j in enumerate(others)]
                share = len(x) / sum(len(part) for part, _ in half)
                (share * weighted_cross_entropy(model.head(hidden.mean((2, 3))), weights)).backward()
            optimizer.step()
            number += 1
    return used


def equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=0, atol=1e-11) for a, b in pairs)


@pytest.mark.parametrize("micro_batch", [None, 3])  # halves of five and four images
@pytest.mark.parametrize("kind", [semaug.SnapMix, semaug.ManifoldMixup])
def test_training_is_that_of_a_plain_loop(kind: type[semaug.LearnableAugmentation], micro_batch: int | None) -> None:
    steps, first, second = 6, network(), network()
    torch.manual_seed(5)
    learner = kind(first, torch.optim.SGD(first.parameters(), lr=0.2, momentum=0.9), micro_batch=micro_batch)
    for images, labels in batches(steps):
        learner.step(images, labels)
    torch.manual_seed(5)
    optimizer, pieces = torch.optim.SGD(second.parameters(), lr=0.2, momentum=0.9), 1 if micro_batch is None else 2
    if kind is semaug.SnapMix:
        naive_snapmix_steps(second, optimizer, pieces, steps)
    else:
        assert naive_manifold_steps(second, optimizer, pieces, steps) == {0, 1, 2}
    assert not equal(first, network())
    assert equal(first, second)  # weights and running statistics


@pytest.mark.parametrize("kind", [semaug.SnapMix, semaug.ManifoldMixup])
def test_resuming_is_exact_whatever_the_seed_of_the_new_process(kind: type[semaug.LearnableAugmentation]) -> None:
    def start(seed: int) -> semaug.LearnableAugmentation:
        model = network()
        torch.manual_seed(seed)
        return kind(model, torch.optim.SGD(model.parameters(), lr=0.2), semaug.Constant(0.1), strength=2.0)

    whole, begun, resumed = start(5), start(5), start(6)
    data = batches(4)
    for learner, some in ((whole, data), (begun, data[:2])):
        for images, labels in some:
            learner.step(images, labels)
    resumed.network.model.load_state_dict(begun.network.model.state_dict())
    resumed.load_state_dict(begun.state_dict())
    for images, labels in data[2:]:
        resumed.step(images, labels)
    states = [learner.network.model.state_dict() for learner in (whole, resumed)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_metrics_leave_out_the_weights_of_images_from_the_share_of_augmentation() -> None:
    model = network()
    learner = semaug.SnapMix(model, torch.optim.SGD(model.parameters(), lr=0.1))
    metrics = learner.step(*batches(1)[0])
    assert metrics["augmentation_share"].abs() < 1e-12
    assert math.isfinite(metrics["train_loss"])


def test_a_mixed_image_counts_for_the_class_with_most_weight() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(8, 5, generator=random)
    soft = torch.rand(8, CLASSES, generator=random)
    first, second = DominantClassCovariance(CLASSES, 5), semaug.ClassCovariance(CLASSES, 5)
    first.update(features, soft)
    second.update(features, soft.argmax(1))
    assert torch.equal(first(features, soft).diagonal(), second(features, soft.argmax(1)).diagonal())
    assert torch.equal(first(features, soft).diagonal(), first(features, soft.argmax(1)).diagonal())


def test_isda_on_top_of_snapmix_has_the_weighted_isda_loss() -> None:
    model = network()
    torch.manual_seed(5)
    source = DominantClassCovariance(CLASSES, 6).double()
    learner = semaug.SnapMix(model, torch.optim.SGD(model.parameters(), lr=0.0), source, strength=3.0)
    images, labels = batches(1)[0]
    copied = copy.deepcopy(model)
    first = semaug.SnapMix(copied, torch.optim.SGD(copied.parameters(), lr=0.0))
    batch, other = first.executor.cut(images, labels)
    first.algorithm.half_step(batch, other)  # for its mixed images
    part = batch[0]
    assert part.image_weights is not None
    stages = copy.deepcopy(model).stages
    features = stages(part.images).mean((2, 3))
    known = DominantClassCovariance(CLASSES, 6).double()
    known.update(features.detach(), part.labels)
    covariance = known(features, part.labels)
    losses = [
        semaug.isda_loss(features[[i]], part.labels[[i]], model.head.weight, model.head.bias,
                         semaug.Diagonal(covariance.diagonal()[[i]]), 3.0)
        for i in range(len(features))
    ]  # fmt: skip
    expected = sum(
        float(weight * loss.detach()) for weight, loss in zip(part.image_weights, losses, strict=True)
    ) / len(losses)
    batch, other = learner.executor.cut(images, labels)
    torch.testing.assert_close(float(learner.algorithm.half_step(batch, other)["train_loss"]), expected)


# -- which networks, and which options


def test_maps_and_stages_of_common_networks() -> None:
    images = torch.randn(2, 3, 64, 64)
    resnet = semaug.Network(torchvision.models.resnet18(num_classes=3))
    assert find_map_layer(resnet, images) == "layer4"
    assert find_stages(resnet, images, 2) == ["layer1.1", "layer2.1"]
    mobilenet = semaug.Network(torchvision.models.mobilenet_v2(num_classes=3))
    assert find_map_layer(mobilenet, images) == "features"
    assert find_stages(mobilenet, images, 3) == ["features.1", "features.3", "features.6"]


def test_the_search_leaves_no_trace() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    wrapped = semaug.Network(model)
    wrapped.prepare(batches(1)[0][0])
    assert find_map_layer(wrapped, batches(1)[0][0]) == "stages"
    assert find_stages(wrapped, batches(1)[0][0], 2) == ["stages.0", "stages.2"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_networks_without_a_pooled_map_or_without_stages_are_refused() -> None:
    flat = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 80, 6), nn.Linear(6, CLASSES)).double()
    learner = semaug.SnapMix(flat, torch.optim.SGD(flat.parameters(), lr=0.1))
    with pytest.raises(ModelError, match="SnapMix needs a map of 6 channels .* and Sequential has none"):
        learner.step(*batches(1)[0])
    dense = torchvision.models.DenseNet(4, (2, 2), 8, num_classes=CLASSES).double()
    other = semaug.ManifoldMixup(dense, torch.optim.SGD(dense.parameters(), lr=0.1))
    with pytest.raises(ModelError, match="Manifold Mixup finds no stage of DenseNet"):
        other.step(torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize("kind", [semaug.SnapMix, semaug.ManifoldMixup])
def test_options_that_do_not_fit_are_refused(kind: type[semaug.LearnableAugmentation]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not kind(model, optimizer)._capturable
    with pytest.raises(ValueError, match="has no meta loop"):
        kind(model, optimizer, semaug.CovNet(6).double())
    with pytest.raises(ValueError, match="`micro_batch` must be at least 2"):
        kind(model, optimizer, micro_batch=1)
    with pytest.raises(ValueError, match="needs class indices"):
        kind(model, optimizer).step(batches(1)[0][0], F.one_hot(batches(1)[0][1], CLASSES).double())
    with pytest.raises(ValueError, match="labels must be a tensor, not a list"):
        kind(model, optimizer).step(batches(1)[0][0], batches(1)[0][1].tolist())  # type: ignore[arg-type]
    composite = semaug.Composite(lambda m, x: m(x), lambda y: y, lambda m, y, t: y.sum())
    with pytest.raises(ValueError, match="does not work with a composite model"):
        kind(semaug.Network(model, composite=composite), optimizer)
    with pytest.raises(ValueError, match="leave out `compile`"):
        semaug.ManifoldMixup(semaug.Network(model, compile="eager"), optimizer)
