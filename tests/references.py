"""References for tests: naive formulas in NumPy, and small random problems."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from semaug import Covariance, Diagonal, Full

FORMS = ("diagonal", "full", "full by index")


@dataclass
class Problem:
    """Inputs of the loss; ``matrices`` (N, D, D) are its covariances as dense matrices."""

    features: Tensor
    labels: Tensor
    probabilities: Tensor
    weight: Tensor
    bias: Tensor
    covariance: Covariance
    matrices: np.ndarray

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Covariance]:
        return self.features, self.labels, self.weight, self.bias, self.covariance

    @property
    def soft_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Covariance]:
        return self.features, self.probabilities, self.weight, self.bias, self.covariance


def problem(
    form: str, seed: int = 0, n: int = 4, c: int = 5, d: int = 3, dtype: torch.dtype = torch.float64
) -> Problem:
    """A random problem of N samples, C classes and D dimensions."""
    rng = np.random.default_rng(seed)
    covariance, matrices = random_covariance(form, rng, n, d, dtype)
    return Problem(
        features=torch.tensor(rng.normal(size=(n, d)), dtype=dtype),
        labels=torch.tensor(rng.integers(c, size=n)),
        probabilities=torch.tensor(rng.dirichlet(np.ones(c), size=n), dtype=dtype),
        weight=torch.tensor(rng.normal(size=(c, d)), dtype=dtype),
        bias=torch.tensor(rng.normal(size=c), dtype=dtype),
        covariance=covariance,
        matrices=matrices,
    )


def random_covariance(
    form: str, rng: np.random.Generator, n: int, d: int, dtype: torch.dtype = torch.float64
) -> tuple[Covariance, np.ndarray]:
    """A random covariance of this form, and its N dense matrices of size D×D."""
    if form == "diagonal":
        variance = rng.uniform(size=(n, d))
        return Diagonal(torch.tensor(variance, dtype=dtype)), np.stack([np.diag(row) for row in variance])
    roots = rng.normal(size=(n if form == "full" else 3, d, d)) / d**0.5
    matrices = np.stack([root @ root.T for root in roots])
    if form == "full":
        return Full(torch.tensor(matrices, dtype=dtype)), matrices
    index = rng.integers(3, size=n)
    return Full(torch.tensor(matrices, dtype=dtype), torch.tensor(index)), matrices[index]


def as_probabilities(labels: np.ndarray, classes: int, smoothing: float = 0.0) -> np.ndarray:
    probabilities = np.eye(classes)[labels] if labels.ndim == 1 else labels
    return (1 - smoothing) * probabilities + smoothing / classes


def quadratic(weight: Tensor, labels: Tensor, matrices: np.ndarray) -> np.ndarray:
    """``(w_j − w̄_i)ᵀ Σ_i (w_j − w̄_i)``, one sample and class at a time."""
    weights = weight.double().numpy()
    targets = as_probabilities(labels.numpy(), len(weights))
    out = np.zeros((len(matrices), len(weights)))
    for i, matrix in enumerate(matrices):
        own = sum(p * w for p, w in zip(targets[i], weights, strict=True))
        for j, w in enumerate(weights):
            out[i, j] = (w - own) @ matrix @ (w - own)
    return out


def losses(p: Problem, labels: Tensor, strength: float, smoothing: float = 0.0) -> np.ndarray:
    """The loss of each sample as in the docstring of ``isda_loss``, one sample and class at a time."""
    weights, bias, features = p.weight.double().numpy(), p.bias.double().numpy(), p.features.double().numpy()
    targets = as_probabilities(labels.numpy(), len(weights), smoothing)
    out = []
    for a, target, matrix in zip(features, targets, p.matrices, strict=True):
        own = sum(q * w for q, w in zip(target, weights, strict=True))
        logits = np.array([w @ a + b for w, b in zip(weights, bias, strict=True)])
        added = np.array([strength / 2 * (w - own) @ matrix @ (w - own) for w in weights])
        out.append(logsumexp(logits + added) - sum(q * z for q, z in zip(target, logits, strict=True)))
    return np.array(out)


def naive_loss(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, matrices: Tensor, strength: float
) -> Tensor:
    """The mean loss in torch with all differences ``w_j − w_{y_i}``, N×C×D numbers."""
    difference = weight[None] - weight[labels][:, None]
    added = torch.einsum("ncd,nde,nce->nc", difference, matrices, difference)
    augmented = features @ weight.T + bias + strength / 2 * added
    return (augmented.logsumexp(1) - augmented[torch.arange(len(labels)), labels]).mean()


def perceptron(layers: torch.nn.Module, features: Tensor) -> np.ndarray:
    """The output of linear layers with ReLU between them, computed from the module's state."""
    state = [tensor.double().numpy() for tensor in layers.state_dict().values()]
    hidden = features.double().numpy()
    for weight, bias in zip(state[:-2:2], state[1:-2:2], strict=True):
        hidden = np.maximum(hidden @ weight.T + bias, 0)
    return np.asarray(hidden @ state[-2].T + state[-1])
