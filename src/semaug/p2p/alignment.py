"""The canonical order of the parts, found without labels: parts of every image are put in the order of templates."""

import itertools

import torch
from torch import Tensor, nn

from semaug.isda.precision import full_precision
from semaug.util import distributed


def normalised_gram(features: Tensor) -> Tensor:
    """The Gram matrices (…, P, P) of part features (…, P, D), each divided by its maximum; 0 where all is 0."""
    gram = features @ features.mT
    return gram / gram.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)


class PartAlignment(nn.Module):
    """Puts the parts of each image in the order that agrees best with templates of the parts.

    With G the normalised Gram matrix of an image's part features and T that of the templates, the order is the
    permutation π of all P! with the greatest ``Σ_ij T_ij G_π(i)π(j)``. Permuting a matrix leaves its norm as it is, so
    this inner product is greatest exactly where ``‖T − G_π‖²`` is least: both criteria choose the same. (The released
    code permutes a matrix that it has already permuted; here each permutation is tried on the matrix itself.)

    The templates (P, D) are running means of the ordered features as in the released code: with n images seen before
    and b new ones, ``t ← (0.9 n t + b f̄) / (0.9 n + b)``. They are kept in the state dict and change in
    :meth:`update` alone; before the first update the parts stay in the order of their scores.
    """

    templates: Tensor
    seen: Tensor
    permutations: Tensor

    def __init__(self, parts: int, dimensions: int, decay: float = 0.9) -> None:
        super().__init__()
        if not 2 <= parts <= 6:  # 7 parts have 5040 orders
            raise ValueError(f"parts must lie in 2 … 6, not {parts}: all their orders are tried")
        self.decay = decay
        self.register_buffer("templates", torch.zeros(parts, dimensions))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("permutations", torch.tensor([*itertools.permutations(range(parts))]), persistent=False)

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """The order (N, P) of part features (N, P, D): the i-th part in canonical order is number ``order[:, i]``."""
        parts = len(self.templates)
        pairs = self.permutations[:, :, None] * parts + self.permutations[:, None, :]  # (P!, P, P) places in a Gram
        with full_precision(features):
            gram = normalised_gram(features.to(self.templates.dtype))
            of_templates = normalised_gram(self.templates)
            agreement = gram.flatten(1)[:, pairs.flatten(1)] @ of_templates.flatten()  # (N, P!)
        best = torch.where(self.seen > 0, agreement.argmax(1), 0)  # number 0 changes nothing
        return self.permutations[best]

    @torch.no_grad()
    def update(self, features: Tensor, order: Tensor) -> None:
        """Move the templates towards the part features (N, P, D) of a batch, of all ranks, in their `order` (N, P)."""
        new = reordered(features.detach().to(self.templates.dtype), order).sum(0)
        total, count = distributed.sum_over_ranks([new, new.new_tensor(len(features))])
        old = self.decay * self.seen.to(new.dtype)
        self.templates.copy_((old * self.templates + total) / (old + count))
        self.seen += count.long()


def reordered(features: Tensor, order: Tensor) -> Tensor:
    """Part features (…, N, P, D) with the parts of each image in the given order (N, P)."""
    return features.gather(-2, order[..., None].expand(features.shape))
