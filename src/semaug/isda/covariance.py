"""The forms of a covariance Σ: diagonal, low rank plus diagonal, full.

Each form answers two questions about a batch of N samples whose features have D dimensions:

- ``quadratic(weight, labels)``: how much augmentation along Σ adds to each of the C logits, i.e.
  ``(w_j − w̄_i)ᵀ Σ_i (w_j − w̄_i)`` for every sample i and class j, shape (N, C);
- ``sample(features, count)``: draws ``a' ~ N(a, λΣ)`` for those who want explicit augmented features.

``w̄_i`` is the head's weight of the sample's own class, ``w_{y_i}``; for soft labels p it is the mean ``Σ_k p_ik w_k``
(see :func:`semaug.isda.loss.isda_loss` for why). The quadratic form is expanded so that only matrix products appear:
neither N×C×D nor, for the first two forms, N×D×D numbers are ever held. The diagonal form is worked off in chunks of
classes besides, so that its only C×D numbers are the weight and, in a backward pass, the gradient of the weight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.precision import LARGEST_TERM, full_precision, widened
from semaug.isda.quadratic import augmented, augmented_along, without_own_class


class Covariance(Protocol):
    """What the loss asks of a covariance of N samples in D dimensions."""

    def quadratic(self, weight: Tensor, labels: Tensor) -> Tensor:
        """``(w_j − w̄_i)ᵀ Σ_i (w_j − w̄_i)``, shape (N, C); ``weight`` is (C, D), ``labels`` (N,) or soft (N, C)."""

    def sample(
        self, features: Tensor, count: int, strength: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """``count`` draws of ``a' ~ N(a, λΣ)`` for each feature, shape (count, N, D)."""

    def diagonal(self) -> Tensor:
        """The variances, shape (N, D)."""


def own_weight(weight: Tensor, labels: Tensor) -> Tensor:
    """``w̄_i``: the weight row of each sample's class, or the mean row under soft labels, shape (N, D)."""
    return labels.to(weight.dtype) @ weight if labels.is_floating_point() else weight[labels]


def _centred(weight: Tensor) -> Tensor:
    """The weight less its mean row, in fp32 at least: only differences count, and small ones cancel less."""
    weight = widened(weight)
    return weight - weight.mean(0)


def _bound(weight: Tensor) -> Tensor:
    """The largest ``(λ/2)·s`` with which no ``Σ_d (λ/2) s_d (w_jd − w̄_d)²`` passes ``LARGEST_TERM``, a single number.

    No ``|w_jd − w̄_d|`` is larger than twice the largest weight. As a bound it is constant: no gradient flows to it.
    """
    reach: Tensor = torch.linalg.vector_norm(weight.detach(), ord=math.inf)
    return LARGEST_TERM / (4 * weight.shape[1]) / reach.square()


def _check_fit(weight: Tensor, labels: Tensor, samples: int, dimensions: int) -> None:
    if (samples, dimensions) != (labels.shape[0], weight.shape[1]):
        raise ValueError(
            f"a covariance of {samples} samples in {dimensions} dimensions does not fit {labels.shape[0]} labels and "
            f"a head of {weight.shape[1]} dimensions"
        )


def _noise(features: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, dtype=features.dtype, device=features.device, generator=generator)


def _check_shape(name: str, tensor: Tensor, dimensions: str) -> None:
    if tensor.ndim != len(dimensions.split("×")):
        raise ValueError(f"{name} must have shape {dimensions}, not {tuple(tensor.shape)}")


@dataclass(frozen=True)
class Diagonal:
    """``Σ_i = diag(s_i)``; ``variance`` holds the s_i, shape (N, D)."""

    variance: Tensor

    def __post_init__(self) -> None:
        _check_shape("variance", self.variance, "N×D")

    def quadratic(self, weight: Tensor, labels: Tensor) -> Tensor:
        """``s·w_j² − 2 (s ⊙ w̄)·w_j + s·w̄²``: two products of size N×D×C."""
        _check_fit(weight, labels, *self.variance.shape)
        with full_precision(weight):
            weight = widened(weight)
            return augmented(None, None, self.variance.to(weight.dtype), weight, labels)

    def augmented_logits(
        self, features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, strength: float | Tensor
    ) -> Tensor:
        """``w_j·a_i + b_j + (λ/2)·quadratic``, shape (N, C): one gradient of the weight for both terms.

        ``(λ/2)·s`` is held so low that the added term cannot pass ``LARGEST_TERM``, nor any part of its expansion.
        """
        _check_fit(weight, labels, *self.variance.shape)
        with full_precision(weight):
            features, weight, bias = widened(features), widened(weight), None if bias is None else widened(bias)
            scaled = strength / 2 * self.variance.to(weight.dtype)
            return augmented(features, bias, scaled.clamp_max(_bound(weight)), weight, labels)

    def augmented_logits_along(
        self,
        features: Tensor,
        labels: Tensor,
        weight: Tensor,
        strength: float | Tensor,
        d_features: Tensor | None,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
        d_variance: Tensor | None,
    ) -> Tensor:
        """The derivative of :meth:`augmented_logits` along a direction; ``None`` in it is 0."""
        with full_precision(weight):
            features, weight = widened(features), widened(weight)
            scaled, bound = strength / 2 * self.variance.to(weight.dtype), _bound(weight)
            result = weight.new_zeros(features.shape[0], weight.shape[0])
            if d_features is not None:
                result = F.linear(widened(d_features), weight)
            if d_bias is not None:
                result = result + widened(d_bias)
            if d_weight is not None:
                result = result + augmented_along(features, scaled.clamp_max(bound), weight, widened(d_weight), labels)
            if d_variance is not None:
                d_scaled = (strength / 2 * d_variance.to(weight.dtype)).where(scaled <= bound, 0.0)
                result = result + augmented(None, None, d_scaled, weight, labels)
            return result

    def sample(
        self, features: Tensor, count: int, strength: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        noise = _noise(features, (count, *features.shape), generator)
        return features + (strength * self.variance).sqrt() * noise

    def diagonal(self) -> Tensor:
        return self.variance


@dataclass(frozen=True)
class Full:
    """``Σ_i = matrices[index_i]``: any symmetric positive semi-definite matrices, for small D.

    ``matrices`` is (K, D, D) and ``index`` (N,) says which one each sample has, so that the samples of a class share
    one matrix; without ``index`` there is one matrix per sample.
    """

    matrices: Tensor
    index: Tensor | None = None

    def __post_init__(self) -> None:
        _check_shape("matrices", self.matrices, "K×D×D")
        if self.matrices.shape[1] != self.matrices.shape[2]:
            raise ValueError(f"matrices must be square, not {tuple(self.matrices.shape)}")

    def _groups(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each matrix in use with the positions of its samples."""
        if self.index is None:
            for position, matrix in enumerate(self.matrices):
                yield matrix, torch.tensor([position], device=self.matrices.device)
        else:
            for which in sorted(set(self.index.tolist())):
                yield self.matrices[which], (self.index == which).nonzero()[:, 0]

    def quadratic(self, weight: Tensor, labels: Tensor) -> Tensor:
        """``w_jᵀΣw_j − 2 w̄ᵀΣw_j + w̄ᵀΣw̄``, one matrix in use at a time: C×D numbers held for each."""
        samples = self.matrices.shape[0] if self.index is None else self.index.shape[0]
        _check_fit(weight, labels, samples, self.matrices.shape[2])
        with full_precision(weight):
            weight = _centred(weight)
            own = own_weight(weight, labels)
            quadratic = weight.new_zeros(own.shape[0], weight.shape[0])
            for matrix, members in self._groups():
                mapped = weight @ matrix.to(weight.dtype)
                own_mapped = own[members] @ matrix.to(weight.dtype)
                rows = (mapped * weight).sum(1) - 2 * own_mapped @ weight.T
                rows = rows + (own_mapped * own[members]).sum(1, keepdim=True)
                quadratic = quadratic.index_copy(0, members, rows)
            return without_own_class(quadratic, labels)

    def sample(
        self, features: Tensor, count: int, strength: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        noise = _noise(features, (count, *features.shape), generator)
        moved = features.expand_as(noise).clone()
        for matrix, members in self._groups():
            # The eigenvectors give a root of singular matrices too, where Cholesky's factorisation fails.
            values, vectors = torch.linalg.eigh(matrix)
            root = vectors * (strength * values.clamp_min(0)).sqrt()
            moved[:, members] += noise[:, members] @ root.T.to(noise.dtype)
        return moved

    def diagonal(self) -> Tensor:
        variances = self.matrices.diagonal(dim1=1, dim2=2)
        return variances if self.index is None else variances[self.index]


def soft_labels(labels: Tensor, classes: int, smoothing: float, dtype: torch.dtype) -> Tensor:
    """Labels as probabilities (N, C), each mixed with the uniform distribution by ``smoothing``."""
    probabilities = labels if labels.is_floating_point() else F.one_hot(labels, classes)
    return probabilities.to(dtype) * (1 - smoothing) + smoothing / classes
