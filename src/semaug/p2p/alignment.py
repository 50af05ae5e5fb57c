"""The canonical order of an image's parts, learned without labels from templates of the parts."""

import itertools

import torch
from torch import Tensor, nn

from semaug.isda.precision import full_precision
from semaug.util import distributed

_DECAY = 0.9  # of the weight of the images seen before


class PartAlignment(nn.Module):
    """Orders the parts of each image so that they agree best with templates.

    With G the Gram matrix of an image's part features and T that of the templates, each divided by its maximum, the
    order is the permutation π of all P! with the largest ``Σ_ij T_ij G_π(i)π(j)``. A permutation does not change a
    matrix's norm, so it is also the one with the smallest ``‖T − G_π‖²``. (The released code permutes a matrix that is
    permuted already; here each permutation is applied to the matrix itself.)

    The templates (P, D) are running means of the ordered features as in the released code: after n images, b new ones
    give ``t ← (0.9 n t + b f̄) / (0.9 n + b)``. They are in the state dict, and only :meth:`update` changes them. Before
    the first update, parts stay in the order of their scores.

    Args:
        parts: Number of parts P, in 2 … 6.
        dimensions: Dimension D of the features.

    Raises:
        ValueError: `parts` is out of range.
    """

    templates: Tensor
    seen: Tensor
    permutations: Tensor

    def __init__(self, parts: int, dimensions: int) -> None:
        super().__init__()
        if not 2 <= parts <= 6:  # 7 parts have 5040 orders
            raise ValueError(f"parts must be in 2 … 6, not {parts}: all their orders are tried")
        self.register_buffer("templates", torch.zeros(parts, dimensions))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("permutations", torch.tensor([*itertools.permutations(range(parts))]), persistent=False)

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """The order (N, P) of part `features` (N, P, D): part i in canonical order is number ``order[:, i]``."""
        parts = len(self.templates)
        pairs = self.permutations[:, :, None] * parts + self.permutations[:, None, :]  # (P!, P, P) indices into a Gram
        with full_precision(features):
            gram = _normalised_gram(features.to(self.templates.dtype))
            of_templates = _normalised_gram(self.templates)
            agreement = gram.flatten(1)[:, pairs.flatten(1)] @ of_templates.flatten()  # (N, P!)
        best = agreement.argmax(1) * (self.seen > 0)  # permutation 0 is the identity
        return self.permutations[best]

    @torch.no_grad()
    def update(self, features: Tensor, order: Tensor) -> None:
        """Move the templates towards the part `features` (N, P, D) of all ranks, in their canonical `order` (N, P)."""
        new = reordered(features.detach().to(self.templates.dtype), order).sum(0)
        total, count = distributed.sum_over_ranks([new, new.new_full((), len(features))])
        old = _DECAY * self.seen.to(new.dtype)
        self.templates.copy_((old * self.templates + total) / (old + count))
        self.seen += count.long()


def _normalised_gram(features: Tensor) -> Tensor:
    """Gram matrices (…, P, P) of part features (…, P, D), each divided by its maximum; 0 where all features are 0."""
    gram = features @ features.mT
    return gram / gram.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)


def reordered(features: Tensor, order: Tensor) -> Tensor:
    """Part `features` (…, N, P, D) with the parts of each image in `order` (N, P)."""
    return features.gather(-2, order[..., None].expand(features.shape))
