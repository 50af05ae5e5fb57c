"""The forms of the covariances Σ_i of a batch: diagonal and full.

A form holds the Σ_i of N samples in D dimensions. The loss needs ``(w_j − w̄_i)ᵀ Σ_i (w_j − w̄_i)`` of all samples i and
classes j. ``w̄_i`` is the head's weight of the sample's own class, ``w_{y_i}``, or for soft labels p the mean weight
``Σ_k p_ik w_k`` (:func:`semaug.isda.loss.isda_loss` explains why). The square is expanded into matrix products, so no
form ever holds N×C×D numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from semaug.isda.precision import full_precision, widened
from semaug.isda.quadratic import quadratic_form


class Covariance(Protocol):
    """The interface of the covariances of a batch, for the loss and the figures. A class with these methods is a form.

    Examples:
        >>> import semaug, torch
        >>> covariance: semaug.Covariance = semaug.Diagonal(torch.tensor([[1.0, 2.0]]))
        >>> covariance.quadratic(torch.eye(2), torch.tensor([0]))  # v = w_1 − w_0 = (−1, 1)
        tensor([[0., 3.]])
    """

    def quadratic(self, weight: Tensor, labels: Tensor) -> Tensor:
        """Compute ``(w_j − w̄_i)ᵀ Σ_i (w_j − w̄_i)`` for every sample i and class j.

        Args:
            weight: Weight W of the head, shape (C, D).
            labels: Class indices (N,) or probabilities (N, C).

        Returns:
            The quadratic form, shape (N, C), at least in fp32; exactly 0 for j = y_i.

        Raises:
            ValueError: If the covariance has another number of samples or dimensions.
        """

    def sample(self, features: Tensor, count: int, strength: float = 1.0, generator: Generator | None = None) -> Tensor:
        """Draw augmented features ``a' ~ N(a, λΣ)``.

        Args:
            features: Features a, shape (N, D).
            count: Number of draws for each feature.
            strength: λ, at least 0.
            generator: Source of randomness; by default torch's.

        Returns:
            The draws, shape (count, N, D).
        """

    def diagonal(self) -> Tensor:
        """Return the variances, shape (N, D)."""


@dataclass(frozen=True)
class Diagonal:
    """Diagonal covariances ``Σ_i = diag(s_i)``.

    Args:
        variance: Variances s, shape (N, D), at least 0.

    Examples:
        >>> import semaug, torch
        >>> covariance = semaug.Diagonal(torch.tensor([[1.0, 0.0]]))
        >>> draws = covariance.sample(torch.zeros(1, 2), count=5, strength=2.0)
        >>> draws.shape, bool((draws[..., 1] == 0).all())  # no variance, no change
        (torch.Size([5, 1, 2]), True)
    """

    variance: Tensor

    def __post_init__(self) -> None:
        if self.variance.ndim != 2:
            raise ValueError(f"variance must have shape N×D, not {tuple(self.variance.shape)}")

    def quadratic(self, weight: Tensor, labels: Tensor) -> Tensor:
        """``s·w_j² − 2 (s ⊙ w̄)·w_j + s·w̄²``: two matrix products of size N×D×C. See :meth:`Covariance.quadratic`."""
        _check_fit(weight, labels, *self.variance.shape)
        with full_precision(weight):
            weight = widened(weight)
            return quadratic_form(None, None, self.variance.to(weight.dtype), weight, labels)

    def sample(self, features: Tensor, count: int, strength: float = 1.0, generator: Generator | None = None) -> Tensor:
        """Draw ``a' ~ N(a, λΣ)``, shape (count, N, D).

        Args:
            features: Features a, shape (N, D).
            count: Number of draws for each feature.
            strength: λ, at least 0.
            generator: Source of randomness; by default torch's.
        """
        noise = torch.randn(count, *features.shape, dtype=features.dtype, device=features.device, generator=generator)
        return features + (strength * self.variance).sqrt() * noise

    def diagonal(self) -> Tensor:
        """Return the variances, shape (N, D)."""
        return self.variance


@dataclass(frozen=True)
class Full:
    """Full covariance matrices ``Σ_i = matrices[index_i]``, for small D. Samples may share a matrix.

    Args:
        matrices: Symmetric positive semi-definite matrices, shape (K, D, D).
        index: Which matrix each sample has, shape (N,), int64; None means that sample i has matrix i (K = N).

    Examples:
        >>> import semaug, torch
        >>> covariance = semaug.Full(torch.tensor([[[1.0, -1.0], [-1.0, 2.0]]]), index=torch.tensor([0, 0]))
        >>> covariance.quadratic(torch.eye(2), torch.tensor([0, 1]))
        tensor([[0., 5.],
                [5., 0.]])
    """

    matrices: Tensor
    index: Tensor | None = None

    def __post_init__(self) -> None:
        if self.matrices.ndim != 3 or self.matrices.shape[1] != self.matrices.shape[2]:
            raise ValueError(f"matrices must have shape K×D×D, not {tuple(self.matrices.shape)}")

    def _groups(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each matrix in use with the positions of its samples."""
        if self.index is None:
            for position, matrix in enumerate(self.matrices):
                yield matrix, torch.tensor([position], device=self.matrices.device)
        else:
            for which in sorted(set(self.index.tolist())):
                yield self.matrices[which], (self.index == which).nonzero()[:, 0]

    def quadratic(self, weight: Tensor, labels: Tensor) -> Tensor:
        """``w_jᵀΣw_j − 2 w̄ᵀΣw_j + w̄ᵀΣw̄``, one matrix at a time. See :meth:`Covariance.quadratic`."""
        samples = self.matrices.shape[0] if self.index is None else self.index.shape[0]
        _check_fit(weight, labels, samples, self.matrices.shape[2])
        with full_precision(weight):
            # Only differences of weights count. Without their mean they are smaller, and less is lost to rounding.
            weight = widened(weight)
            weight = weight - weight.mean(0)
            own = labels.to(weight.dtype) @ weight if labels.is_floating_point() else weight[labels]
            quadratic = weight.new_zeros(own.shape[0], weight.shape[0])
            for matrix, members in self._groups():
                mapped = weight @ matrix.to(weight.dtype)
                own_mapped = own[members] @ matrix.to(weight.dtype)
                rows = (mapped * weight).sum(1) - 2 * own_mapped @ weight.T
                rows = rows + (own_mapped * own[members]).sum(1, keepdim=True)
                quadratic = quadratic.index_copy(0, members, rows)
            return quadratic if labels.is_floating_point() else quadratic.scatter(1, labels[:, None], 0.0)

    def sample(self, features: Tensor, count: int, strength: float = 1.0, generator: Generator | None = None) -> Tensor:
        """Draw ``a' ~ N(a, λΣ)``, shape (count, N, D).

        Args:
            features: Features a, shape (N, D).
            count: Number of draws for each feature.
            strength: λ, at least 0.
            generator: Source of randomness; by default torch's.
        """
        noise = torch.randn(count, *features.shape, dtype=features.dtype, device=features.device, generator=generator)
        moved = features.expand_as(noise).clone()
        for matrix, members in self._groups():
            # Eigenvectors also give a root of a singular matrix, for which the Cholesky factorisation fails.
            values, vectors = torch.linalg.eigh(matrix)
            root = vectors * (strength * values.clamp_min(0)).sqrt()
            moved[:, members] += noise[:, members] @ root.T.to(noise.dtype)
        return moved

    def diagonal(self) -> Tensor:
        """Return the variances, shape (N, D)."""
        variances = self.matrices.diagonal(dim1=1, dim2=2)
        return variances if self.index is None else variances[self.index]


def _check_fit(weight: Tensor, labels: Tensor, samples: int, dimensions: int) -> None:
    if (samples, dimensions) != (labels.shape[0], weight.shape[1]):
        raise ValueError(
            f"a covariance of {samples} samples in {dimensions} dimensions does not fit {labels.shape[0]} labels and "
            f"a head of {weight.shape[1]} dimensions"
        )
