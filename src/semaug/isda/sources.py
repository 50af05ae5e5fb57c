"""Where Σ comes from: one class per covariance source, called as ``source(features, labels) → Covariance``.

| source                       | Σ of sample i                                          | learned by      |
|------------------------------|--------------------------------------------------------|-----------------|
| ``Constant``                 | ``c·I``: the control experiment                        | nothing         |
| ``ClassCovariance``          | covariance of all features of class y_i (ISDA)         | statistics      |
| ``CovNet``                   | ``diag(sigmoid(MLP(a_i)))`` (the paper)                | the meta loop   |

``update(features, labels)`` shows a batch to the statistics; it does nothing for sources that keep none.
"""

import itertools
import math
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.isda.covariance import Covariance, Diagonal, Full
from semaug.isda.precision import full_precision, widened
from semaug.util import distributed


class Source(nn.Module):
    """A covariance source: ``forward`` gives Σ for a batch, ``update`` shows it the features of a batch."""

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        """The covariance of features (N, D) with class indices (N,)."""
        raise NotImplementedError

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Take a batch of features (N, D) of classes (N,) into the statistics, if there are any."""


class Constant(Source):
    """``Σ = value·I`` for every sample: what is left of the method when nothing is learned."""

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a constant variance must be a finite number ≥ 0, not {value}")
        self.value = value

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        return Diagonal(widened(features).new_full((), self.value).expand(features.shape))

    def extra_repr(self) -> str:
        return f"value={self.value}"


Statistics = tuple[Tensor, Tensor, Tensor]
"""Counts (C,), means (C, D) and summed squared deviations from the mean, (C, D) or (C, D, D)."""


def class_statistics(features: Tensor, labels: Tensor, classes: int, full: bool = False) -> Statistics:
    """Counts, means and summed squared deviations (or outer products of them) of each class in a batch."""
    count = _added(features.new_ones(labels.shape), labels, classes)
    mean = _added(features, labels, classes) / count.clamp_min(1)[:, None]
    deviation = features - mean[labels]
    if not full:
        return count, mean, _added(deviation.square(), labels, classes)
    scatter = features.new_zeros(classes, features.shape[1], features.shape[1])
    for label in sorted(set(labels.tolist())):
        members = deviation[labels == label]
        scatter[label] = members.T @ members
    return count, mean, scatter


def _added(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The sum of the values (N, …) of each class, (C, …); the same to the bit wherever it is computed."""
    total = values.new_zeros(classes, *values.shape[1:])
    if values.is_cuda:  # where index_add adds in any order, and this in that of samples
        return total.index_put_((labels,), values, accumulate=True)
    return total.index_add_(0, labels, values)


def merge_statistics(first: Statistics, second: Statistics) -> Statistics:
    """The statistics of two disjoint sets of samples together, exactly (Chan, Golub and LeVeque 1979)."""
    count = first[0] + second[0]
    share = second[0] / count.clamp_min(1)
    difference = second[1] - first[1]
    mean = first[1] + difference * share[:, None]
    cross = (first[0] * share)[:, None] * difference
    if first[2].ndim == 3:
        return count, mean, first[2] + second[2] + cross[:, :, None] * difference[:, None, :]
    return count, mean, first[2] + second[2] + cross * difference


class ClassCovariance(Source):
    """ISDA: the covariance of all features seen of the sample's class, updated online and exact under any batching.

    ``form`` is ``"diagonal"`` or, for small D, ``"full"``. Counts, means and covariances are buffers and thus part of
    the state dict. An ``update`` reads and writes the rows of the classes in the batch alone. When
    ``torch.distributed`` runs, it takes in the batches of all processes, as one batch in the order of ranks.
    """

    count: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, num_classes: int, feature_dim: int, form: Literal["diagonal", "full"] = "diagonal") -> None:
        super().__init__()
        if num_classes < 2 or feature_dim < 1:
            raise ValueError(f"need at least 2 classes and 1 feature dimension, not {num_classes} and {feature_dim}")
        if form not in ("diagonal", "full"):
            raise ValueError(f"form must be 'diagonal' or 'full', not {form!r}")
        self.num_classes, self.feature_dim, self.form = num_classes, feature_dim, form
        shape = (num_classes, feature_dim) + ((feature_dim,) if form == "full" else ())
        self.register_buffer("count", torch.zeros(num_classes))
        self.register_buffer("mean", torch.zeros(num_classes, feature_dim))
        self.register_buffer("deviation", torch.zeros(shape))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        if labels.is_floating_point():
            raise ValueError("class-wise statistics need class indices as labels, not probabilities")
        if features.ndim != 2 or features.shape[1] != self.feature_dim or labels.shape != features.shape[:1]:
            raise ValueError(
                f"need features (N, {self.feature_dim}) and labels (N,), not {tuple(features.shape)} and "
                f"{tuple(labels.shape)}"
            )
        features, labels = distributed.gather_rows(features, labels)
        if self.form == "full":
            present, places = labels.unique(return_inverse=True)
            rows = len(present)
        else:  # a row for each sample, so that the host need not know how many classes there are
            present, places, rows = labels, _first_of_its_class(labels, self.num_classes), len(labels)
        with full_precision(features):
            batch = class_statistics(features.to(self.mean.dtype), places, rows, self.form == "full")
        if self.form != "full":
            batch = batch[0][places], batch[1][places], batch[2][places]
        seen = self.count[present], self.mean[present], self.deviation[present]
        for buffer, value in zip((self.count, self.mean, self.deviation), merge_statistics(seen, batch), strict=True):
            buffer[present] = value  # the same for all samples of a class

    def covariance(self) -> Tensor:
        """The covariance of each class (divided by its count), (C, D) variances or (C, D, D) matrices."""
        return self.deviation / self.count.clamp_min(1).view(-1, *[1] * (self.deviation.ndim - 1))

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        if labels.is_floating_point():
            raise ValueError("a class-wise covariance needs class indices as labels, not probabilities")
        if self.form == "full":
            return Full(self.covariance(), labels)
        return Diagonal(self.deviation[labels] / self.count[labels].clamp_min(1)[:, None])

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, feature_dim={self.feature_dim}, form={self.form!r}"


def _first_of_its_class(labels: Tensor, classes: int) -> Tensor:
    """For each sample of a batch (N,) the place of the first one of its class."""
    places = torch.arange(len(labels), device=labels.device)
    first = places.new_full((classes,), len(labels)).scatter_reduce(0, labels, places, "amin")
    return first[labels]


class Perceptron(nn.Module):
    """``depth`` hidden layers of ``width`` (by default a quarter of the inputs) with ReLU, then a linear layer."""

    def __init__(self, inputs: int, outputs: int, width: int | None, depth: int) -> None:
        super().__init__()
        width = max(1, inputs // 4) if width is None else width
        if min(inputs, width, depth) < 1:
            raise ValueError(f"inputs, width and depth must be positive, not {inputs}, {width} and {depth}")
        sizes = [inputs, *[width] * depth]
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.hidden = nn.Sequential(*layers)
        self.output = nn.Linear(width, outputs)

    def forward(self, features: Tensor) -> Tensor:
        with full_precision(features):
            hidden: Tensor = self.hidden(features.to(self.output.weight.dtype))
            return cast(Tensor, self.output(hidden))


class CovNet(Source):
    """The paper's covariance network: ``Σ_i = diag(sigmoid(MLP(a_i)))``, by default one hidden layer of width D/4.

    With ``fixed_trace`` every Σ_i has that mean variance and only its *shape* is learned: positive outputs are divided
    by their mean, and their layer starts at zero, so that training starts from ``fixed_trace·I``.
    """

    def __init__(
        self, feature_dim: int, width: int | None = None, depth: int = 1, fixed_trace: float | None = None
    ) -> None:
        super().__init__()
        if not (fixed_trace is None or (math.isfinite(fixed_trace) and fixed_trace > 0)):
            raise ValueError(f"fixed_trace must be positive, not {fixed_trace}")
        self.feature_dim, self.fixed_trace = feature_dim, fixed_trace
        self.layers = Perceptron(feature_dim, feature_dim, width, depth)
        if fixed_trace is not None:
            nn.init.zeros_(self.layers.output.weight)
            nn.init.zeros_(self.layers.output.bias)

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        output = self.layers(features)
        if self.fixed_trace is None:
            return Diagonal(output.sigmoid())
        variance = F.softplus(output) + 1e-6
        return Diagonal(variance * (self.fixed_trace / variance.mean(1).view(-1, 1)))

    @property
    def flops(self) -> int:
        """Floating-point operations per sample, two for each multiply-add of a linear layer, as the paper counts."""
        return sum(2 * layer.weight.numel() for layer in self.modules() if isinstance(layer, nn.Linear))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def extra_repr(self) -> str:
        return f"feature_dim={self.feature_dim}, fixed_trace={self.fixed_trace}"
