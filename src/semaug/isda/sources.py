"""Sources of Σ: where the covariance of a sample comes from.

| source            | Σ_i                                                                     | learned by    |
|-------------------|-------------------------------------------------------------------------|---------------|
| `Constant`        | ``c·I``: the control experiment                                         | nothing       |
| `ClassCovariance` | covariance of the features of class y_i (ISDA), or shared with others   | statistics    |
| `CovNet`          | ``diag(sigmoid(MLP(a_i)))`` (the paper)                                 | the meta loop |

All are used alike: ``source(features, labels)`` returns the covariances of a batch; ``source.update(features, labels)``
adds the batch to the statistics. A new source is a subclass of :class:`Source`.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.isda.covariance import Covariance, Diagonal, Full
from semaug.isda.precision import WideBuffers, full_precision, widened
from semaug.util import distributed

Sharing = Literal["classwise", "pooled", "shrunk", "neighbours"]
"""How much of the statistics of other classes is in the covariance of a class; see :class:`ClassCovariance`."""
NEIGHBOURS = 8  # classes, with the class itself, that have one covariance under the sharing "neighbours"


class Source(nn.Module, ABC):
    """Base class of all sources of Σ: a module whose parameters, if it has any, the meta loop trains.

    A subclass implements :meth:`forward`, and :meth:`update` if it collects statistics. Statistics are buffers, so that
    they are saved with the module.

    Examples:
        >>> import semaug, torch
        >>> class Proportional(semaug.Source):  # a variance proportional to the squared feature
        ...     def forward(self, features, labels):
        ...         return semaug.Diagonal(0.5 * features.square())
        >>> Proportional()(torch.tensor([[1.0, 2.0]]), torch.tensor([0])).diagonal()
        tensor([[0.5000, 2.0000]])
    """

    @abstractmethod
    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        """Compute the covariances of a batch.

        Args:
            features: Features a, shape (N, D).
            labels: Class indices (N,), or probabilities (N, C) if the source accepts them.

        Returns:
            The covariances Σ_i of the N samples.
        """

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch to the statistics; by default there are none.

        Args:
            features: Features a, shape (N, D), without a graph.
            labels: Class indices (N,).
        """


class Constant(Source):
    """The same variance for every sample and dimension, ``Σ_i = c·I``: the control experiment.

    Args:
        value: c, at least 0.

    Examples:
        >>> import semaug, torch
        >>> semaug.Constant(0.5)(torch.randn(1, 3), torch.tensor([0])).diagonal()
        tensor([[0.5000, 0.5000, 0.5000]])
    """

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a constant variance must be a finite number ≥ 0, not {value}")
        self.value = value

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        """Return ``c·I`` for each sample; see :meth:`Source.forward`."""
        return Diagonal(widened(features).new_full((), self.value).expand(features.shape))

    def extra_repr(self) -> str:
        return f"value={self.value}"


class ClassCovariance(Source, WideBuffers):
    """ISDA's source: Σ_i is the covariance of all features seen so far of class y_i, or shared with other classes.

    Statistics are updated online, and are those of all samples together, whatever the batches were. When
    `torch.distributed` runs, an update takes the batches of all ranks as one batch. Counts, means and summed deviations
    are buffers, and thus part of the state dict.

    A class of 30 images says little about 2,048 variances, so a class may borrow from the others. With the count n_c
    and the summed squared deviations d_c from the mean of class c, the covariance of class y is

    | sharing        | Σ                                                                                     |
    |----------------|---------------------------------------------------------------------------------------|
    | `"classwise"`  | ``d_y / n_y``: ISDA's; the pooled one for a class seen less than twice                |
    | `"pooled"`     | ``Σ_c d_c / Σ_c n_c``: that within classes, the same for all                          |
    | `"shrunk"`     | ``(d_y + mean_c d_c) / (n_y + mean_c n_c)``: classwise and pooled in equal parts if   |
    |                | classes have equally many images. The smaller a class is, the more it is pooled; n_y  |
    |                | counts as 0 for a class seen once                                                     |
    | `"neighbours"` | ``Σ_c d_c / Σ_c n_c`` over y and the seven classes whose means are nearest to y's     |

    Args:
        num_classes: Number of classes C, at least 2.
        feature_dim: Dimension D of the features, at least 1.
        form: `"diagonal"` (variances) or `"full"` (covariance matrices, C×D×D numbers: for small D).
        sharing: What a class shares with others, from the table.

    Examples:
        >>> import semaug, torch
        >>> source = semaug.ClassCovariance(num_classes=2, feature_dim=1)
        >>> source.update(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]))
        >>> source.covariance()
        tensor([[1.0000],
                [0.6667]])
    """

    count: Tensor
    mean: Tensor
    deviation: Tensor
    _single: Tensor | None  # which classes have a single training image; None if no class has

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        form: Literal["diagonal", "full"] = "diagonal",
        sharing: Sharing = "classwise",
    ) -> None:
        super().__init__()
        if num_classes < 2 or feature_dim < 1:
            raise ValueError(f"need at least 2 classes and 1 feature dimension, not {num_classes} and {feature_dim}")
        if form not in ("diagonal", "full"):
            raise ValueError(f"form must be 'diagonal' or 'full', not {form!r}")
        if sharing not in get_args(Sharing):
            raise ValueError(f"sharing must be one of {', '.join(get_args(Sharing))}, not {sharing!r}")
        self.num_classes, self.feature_dim, self.form, self.sharing = num_classes, feature_dim, form, sharing
        shape = (num_classes, feature_dim) + ((feature_dim,) if form == "full" else ())
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("count", torch.zeros(num_classes, dtype=dtype))
        self.register_buffer("mean", torch.zeros(num_classes, feature_dim, dtype=dtype))
        self.register_buffer("deviation", torch.zeros(shape, dtype=dtype))
        self.register_buffer("_single", None, persistent=False)

    def set_class_images(self, images: Sequence[int]) -> None:
        """Set the number of training images of each class, so that a class of one image counts as seen once.

        The features of that image differ from epoch to epoch by its crop and the state of the network, which does not
        tell how the class varies.

        Args:
            images: Number of training images of each class.
        """
        single = torch.tensor([count == 1 for count in images], device=self.count.device)
        self._single = single if bool(single.any()) else None

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch to the statistics of its classes; no other class is read or written.

        A batch in which a number is not finite is left out.

        Args:
            features: Features a, shape (N, D).
            labels: Class indices (N,).

        Raises:
            ValueError: If labels are probabilities, or a shape does not fit.
        """
        if labels.is_floating_point():
            raise ValueError("class-wise statistics need class indices as labels, not probabilities")
        if labels.dtype in (torch.bool, torch.uint8):  # with which torch would select rows by a mask
            raise ValueError(f"labels as class indices must be int64, not {labels.dtype}")
        if features.ndim != 2 or features.shape[1] != self.feature_dim or labels.shape != features.shape[:1]:
            raise ValueError(
                f"need features (N, {self.feature_dim}) and labels (N,), not {tuple(features.shape)} and "
                f"{tuple(labels.shape)}"
            )
        features, labels = distributed.gather_rows(features, labels)
        full = self.form == "full"
        with full_precision(features):
            if full:
                rows, places = labels.unique(return_inverse=True)
                counts, means, deviations = _statistics_of_classes(features.to(self.mean.dtype), places, len(rows))
            else:  # a row for each sample, because to count the classes the host would wait for an accelerator
                rows = labels
                counts, means, deviations = _statistics_of_own_class(features.to(self.mean.dtype), labels)
        # The exact statistics of all samples, from those before and those of the batch (Chan, Golub, LeVeque 1979).
        try:  # unlike brackets, index_select does not count a negative label from the end
            before, mean = self.count.index_select(0, rows), self.mean[rows]
        except IndexError:
            raise ValueError(
                f"labels must lie in 0 … {self.num_classes - 1}, found {int(rows.min())} … {int(rows.max())}"
            ) from None
        total = before + counts
        share = counts / total
        difference = means - mean
        cross = (before * share)[:, None] * difference
        between = cross[:, :, None] * difference[:, None, :] if full else cross * difference
        old = self.deviation[rows]
        deviation = old + deviations + between
        finite = deviation.isfinite().all()
        if self._single is not None:
            single = self._single[rows]
            total = total.where(~single, 1.0)
            deviation = deviation.where(~single.view(-1, *[1] * (deviation.ndim - 1)), 0.0)
        # In fp16 a forward pass can overflow. The optimiser skips that step, and the statistics must skip the batch:
        # they would never be finite again.
        self.deviation[rows] = deviation.where(finite, old)
        self.mean[rows] = (mean + difference * share[:, None]).where(finite, mean)
        self.count[rows] = total.where(finite, before)

    def covariance(self) -> Tensor:
        """Return the covariance of each class (divided by its count): (C, D) variances or (C, D, D) matrices."""
        return self._of_classes(torch.arange(self.num_classes, device=self.count.device))

    def _of_classes(self, classes: Tensor) -> Tensor:
        """The covariances of some classes (K,): (K, D) or (K, D, D); the host does not wait for an accelerator."""
        count, deviation = self.count[classes], self.deviation[classes]
        columns = (-1, *[1] * (deviation.ndim - 1))
        if self.sharing in ("classwise", "pooled"):  # a class seen less than twice has no variance of its own
            own = (count > 1) if self.sharing == "classwise" else torch.zeros_like(count, dtype=torch.bool)
            count = count.where(own, self.count.sum())
            deviation = deviation.where(own.view(columns), self.deviation.sum(0))
        elif self.sharing == "shrunk":  # means rather than sums: the count of a class grows with every epoch
            count, deviation = count * (count > 1) + self.count.mean(), deviation + self.deviation.mean(0)
        elif self.sharing == "neighbours":
            nearest = self._nearest(classes)
            count, deviation = nearest @ self.count, (nearest @ self.deviation.flatten(1)).view_as(deviation)
        return deviation / count.clamp_min(1e-6).view(columns)

    def _nearest(self, classes: Tensor) -> Tensor:
        """For each of some classes (K,), 1 for itself and the classes with the nearest means, 0 for others: (K, C).

        Without matrix products, so that a distance has the same bits on all ranks, whatever other classes are asked.
        """
        distance = torch.cdist(self.mean[classes], self.mean, compute_mode="donot_use_mm_for_euclid_dist")
        distance = distance.masked_fill(self.count == 0, math.inf).scatter(1, classes[:, None], -1.0)
        nearest = distance.topk(min(NEIGHBOURS, self.num_classes), largest=False).indices
        return torch.zeros_like(distance).scatter(1, nearest, 1.0)

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        """Return the covariance of each sample's class; see :meth:`Source.forward`. Labels are class indices."""
        if labels.is_floating_point():
            raise ValueError("a class-wise covariance needs class indices as labels, not probabilities")
        with full_precision(self.mean):
            return Full(self.covariance(), labels) if self.form == "full" else Diagonal(self._of_classes(labels))

    def extra_repr(self) -> str:
        size = f"num_classes={self.num_classes}, feature_dim={self.feature_dim}"
        return f"{size}, form={self.form!r}, sharing={self.sharing!r}"


class CovNet(Source):
    """The paper's covariance network g: ``Σ_i = diag(sigmoid(MLP(a_i)))``, for eq. 3.

    With `fixed_trace`, every Σ_i has that mean variance and only its *shape* is learned: outputs are divided by their
    mean. The last layer then starts at zero, so that training starts from ``fixed_trace·I``.

    Args:
        feature_dim: Dimension D of the features, at least 1.
        width: Width of the hidden layers, at least 1; by default D/4, as in the paper.
        depth: Number of hidden layers, at least 1.
        fixed_trace: Mean variance of every Σ_i, positive; None leaves it to the network.
        activation: Makes the outputs positive: `"sigmoid"`, at most 1, or `"softplus"`, without a limit. By default
            the paper's sigmoid, or softplus with `fixed_trace`.

    Examples:
        >>> import semaug, torch
        >>> semaug.CovNet(feature_dim=8)(torch.randn(3, 8), torch.tensor([0, 1, 1])).diagonal().shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        feature_dim: int,
        width: int | None = None,
        depth: int = 1,
        fixed_trace: float | None = None,
        activation: Literal["sigmoid", "softplus"] | None = None,
    ) -> None:
        super().__init__()
        width = max(1, feature_dim // 4) if width is None else width
        if min(feature_dim, width, depth) < 1:
            raise ValueError(f"feature_dim, width and depth must be positive, not {feature_dim}, {width} and {depth}")
        if not (fixed_trace is None or (math.isfinite(fixed_trace) and fixed_trace > 0)):
            raise ValueError(f"fixed_trace must be positive, not {fixed_trace}")
        if activation not in (None, "sigmoid", "softplus"):
            raise ValueError(f"activation must be 'sigmoid' or 'softplus', not {activation!r}")
        self.feature_dim, self.fixed_trace = feature_dim, fixed_trace
        self.activation = activation or ("sigmoid" if fixed_trace is None else "softplus")
        hidden = nn.Sequential()
        for inputs in [feature_dim, *[width] * (depth - 1)]:
            hidden.extend([nn.Linear(inputs, width), nn.ReLU()])
        output = nn.Linear(width, feature_dim)
        if fixed_trace is not None:
            nn.init.zeros_(output.weight)
            nn.init.zeros_(output.bias)
        self.layers = nn.Sequential(OrderedDict(hidden=hidden, output=output))

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        """Predict the variances from the features; see :meth:`Source.forward`. Labels are not used."""
        with full_precision(features):
            output: Tensor = self.layers(features.to(next(self.layers.parameters()).dtype))
        variance = output.sigmoid() if self.activation == "sigmoid" else F.softplus(output)
        if self.fixed_trace is None:
            return Diagonal(variance)
        variance = variance + 1e-6
        return Diagonal(variance * (self.fixed_trace / variance.mean(1).view(-1, 1)))

    @property
    def flops(self) -> int:
        """Floating-point operations per sample, counted as in the paper: two per multiply-add of a linear layer."""
        return sum(2 * layer.weight.numel() for layer in self.modules() if isinstance(layer, nn.Linear))

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def extra_repr(self) -> str:
        return f"feature_dim={self.feature_dim}, fixed_trace={self.fixed_trace}, activation={self.activation!r}"


def _statistics_of_classes(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (C,), means (C, D) and summed outer products of deviations (C, D, D) of classes that all have samples."""
    counts = labels.bincount(minlength=classes).to(features.dtype)
    sums = features.new_zeros(classes, features.shape[1])
    if features.is_cuda:  # where index_add_ adds in any order, and index_put_ in the order of the samples
        sums.index_put_((labels,), features, accumulate=True)
    else:
        sums.index_add_(0, labels, features)
    means = sums / counts[:, None]
    deviations = features - means[labels]
    scatters = features.new_zeros(classes, features.shape[1], features.shape[1])
    for label in range(classes):
        members = deviations[labels == label]
        scatters[label] = members.T @ members
    return counts, means, scatters


def _statistics_of_own_class(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each sample the count (N,), mean (N, D) and summed squared deviations (N, D) of its class in the batch.

    Matrix products instead of sums by class: few kernels, and deterministic on every device.
    """
    same = (labels[:, None] == labels).to(features.dtype)
    counts = same.sum(1)
    means = same @ features / counts[:, None]
    return counts, means, same @ (features - means).square()
