"""Original and augmented features of image-level and semantic augmentation, in one network."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semaug.data.samples import Samples
from semaug.report.canvas import to_png, to_svg
from semaug.report.figures.figure import Figure
from semaug.report.figures.groups import choose_group
from semaug.report.figures.runs import CovarianceKind, FigureRun, choose_images, compute_features, open_runs, run_images
from semaug.report.figures.scatter import Block, Panel, scatter, scatter_fragment
from semaug.report.figures.tsne import tsne_plane
from semaug.training.methods import METHODS
from semaug.util.errors import RunError, SettingError
from semaug.util.progress import ProgressCallback

_IMAGE_METHODS = ("random-erasing", "randaugment")
_SEMANTIC = "Semantic augmentation"


def _kept_share(features: Tensor, labels: Tensor, centres: Tensor) -> float:
    """The share of features (N, D) whose nearest class centre (K, D) is that of their own class (N,)."""
    nearest = torch.cdist(features.double(), centres.double()).argmin(1)
    return float((nearest == labels).double().mean())


def augmentations(
    runs: Mapping[str, Path],
    samples: Samples | None = None,
    *,
    group: str | None = None,
    groups: Path | None = None,
    limit: int = 120,
    copies: int = 2,
    covariance: CovarianceKind = "run",
    strength: float | None = None,
    perplexity: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Draw original and augmented features of Random Erasing, RandAugment and semantic augmentation by t-SNE.

    Images are augmented as in training; semantic augmentation draws ``a' ~ N(a, λΣ)``. Of two runs the first computes
    all features and the second has the Σ: in the paper, basic and learnable. Numbers: `original`, the share
    of original features whose nearest class centre is that of their own class; for each augmentation `kept`, that share
    of augmented features, `altered`, the share of versions that differ from the original, and `kept_of_altered`.

    Args:
        runs: One or two run directories by label.
        samples: Images, labelled by the runs' classes; by default those that the first run was evaluated on.
        group: Name of the group; see :func:`semaug.report.figures.groups.choose_group`.
        groups: Table of groups.
        limit: Most images.
        copies: Augmented versions of each image, at least 1.
        covariance: The Σ.
        strength: λ; that of the end of training by default.
        perplexity: Perplexity of t-SNE.
        seed: Seed of all random numbers.
        device: Where to run the network.
        progress: Called with the numbers of finished and of all images.

    Raises:
        SemaugError: If the second run has no such Σ or it does not fit the features, or there is no such group.
    """
    if copies < 1:
        raise SettingError(f"`copies` must be at least 1, not {copies}")
    opened = _with_covariance(runs, covariance, strength, device)
    samples = run_images(opened.classifier) if samples is None else samples
    chosen = choose_group([opened.path], opened.classes, group=group, groups=groups, samples=samples)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"original": opened.features}
    for method in _IMAGE_METHODS:
        functions |= {f"{method} {copy}": _augmented(opened, method) for copy in range(copies)}
    indices = choose_images(samples, limit, seed, chosen.classes)
    with torch.random.fork_rng(devices=[]):  # torchvision's transforms draw from the global generator
        torch.manual_seed(seed)
        computed = compute_features(samples, indices, opened.classifier, functions, progress=progress)
    labels = torch.searchsorted(torch.tensor(chosen.classes), computed.labels)
    original = computed.features["original"]
    centres = torch.stack([original[labels == label].mean(0) for label in range(len(chosen.classes))])
    versions = {}
    for method in _IMAGE_METHODS:
        both = torch.stack([computed.features[f"{method} {copy}"] for copy in range(copies)])
        versions[METHODS[method].title] = both[..., 1:], both[..., 0] > 0
    draws = opened.draws(original, computed.labels, copies, torch.Generator().manual_seed(seed))
    versions[_SEMANTIC] = draws, torch.ones(copies, len(labels), dtype=torch.bool)
    shares = {title: _shares(moved, altered, labels, centres) for title, (moved, altered) in versions.items()}
    numbers: dict[str, Any] = {
        "runs": list(runs),
        "group": chosen.name,
        "classes": [opened.classes[i] for i in chosen.classes],
        "images": len(labels),
        "copies": copies,
        "seed": seed,
        "strength": opened.strength,
        "original": _kept_share(original, labels, centres),
        "augmentations": shares,
    }
    panels = [
        Panel(
            title,
            f"{100 * (shares[title]['kept'] or 0.0):.0f} % of augmented features stay nearest to their class",
            tsne_plane(torch.cat([original, moved.flatten(0, 1)]).double().numpy(), seed, perplexity),
            labels.tolist() * (copies + 1),
            [*range(len(labels))] * (copies + 1),
            [False] * len(labels) + [True] * (len(labels) * copies),
        )
        for title, (moved, _) in versions.items()
    ]
    titles = [opened.classes[i] for i in chosen.classes]
    block = Block("", panels, titles)
    html = scatter_fragment(block, computed.thumbnails, computed.names)
    drawn, heading = scatter([block]), "Original and augmented features"
    caption = _caption(opened, numbers, f"{len(titles)} classes {chosen.how}")
    return Figure("augmentations", heading, caption, numbers, to_png(drawn), to_svg(drawn, heading), html)


def _with_covariance(
    runs: Mapping[str, Path], covariance: CovarianceKind, strength: float | None, device: str
) -> FigureRun:
    """The first run, with Σ and λ of the last one."""
    if not 1 <= len(runs) <= 2:
        raise SettingError(f"the figure takes one run, or one for the features and one for Σ, not {len(runs)}")
    *others, last = runs.items()
    [source] = open_runs(dict([last]), covariance, strength, device)
    if not others:
        return source
    [run] = open_runs(dict(others), device=device)
    if run.classes != source.classes:
        raise RunError(f"{source.path} and {run.path} do not have the same classes and cannot be compared")
    if run.network.feature_dim != source.network.feature_dim:
        raise RunError(
            f"the Σ of {source.path} is for {source.network.feature_dim} features and does not fit the "
            f"{run.network.feature_dim} of {run.path}"
        )
    return replace(run, source=source.source, strength=source.strength, notes=source.notes)


def _shares(moved: Tensor, altered: Tensor, labels: Tensor, centres: Tensor) -> dict[str, float | None]:
    own = labels.expand(altered.shape)
    return {
        "kept": _kept_share(moved.flatten(0, 1), own.flatten(), centres),
        "altered": float(altered.double().mean()),
        "kept_of_altered": _kept_share(moved[altered], own[altered], centres) if altered.any() else None,
    }


def _augmented(run: FigureRun, method: str) -> Callable[[Tensor], Tensor]:
    """Whether each augmented centre crop differs from the original, and its features: (N, 1 + D)."""
    transforms = METHODS[method].images(len(run.classes))
    preprocessing = run.classifier.preprocessing
    start = (preprocessing.resize - preprocessing.crop) // 2
    window = slice(start, start + preprocessing.crop)

    def compute(pixels: Tensor) -> Tensor:
        crops = pixels[:, window, window].permute(0, 3, 1, 2)
        batch = torch.arange(len(crops)), len(crops)
        inputs = preprocessing.normalised(crops if transforms.on_crops is None else transforms.on_crops(crops, *batch))
        inputs = inputs if transforms.on_images is None else transforms.on_images(inputs, *batch)
        altered = (inputs != preprocessing.normalised(crops)).flatten(1).any(1)
        return torch.cat([altered[:, None].float(), run.input_features(inputs)], 1)

    return compute


def _caption(run: FigureRun, numbers: Mapping[str, Any], classes: str) -> str:
    shares = ", ".join(f"{title} {100 * row['kept']:.0f} %" for title, row in numbers["augmentations"].items())
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in run.notes)
    erased = numbers["augmentations"][METHODS["random-erasing"].title]
    rest = (
        ""
        if erased["kept_of_altered"] is None
        else f"; of the changed ones {100 * erased['kept_of_altered']:.0f} % stay nearest to their class"
    )
    return (
        f"t-SNE of the features of {numbers['images']} images of {classes}, and of {numbers['copies']} augmented "
        f"versions of each, all in the network of {numbers['runs'][0]}; each panel has its own t-SNE. "
        f"Share of augmented features whose nearest class centre is still that of their own class: {shares}; of the "
        f"originals {100 * numbers['original']:.0f} %. Images are augmented as in training: Random Erasing left "
        f"{100 * (1 - erased['altered']):.0f} % of them unchanged{rest}. Semantic augmentation draws from N(a, λΣ) "
        f"with λ = {numbers['strength']:.3g} and the Σ of {numbers['runs'][-1]}.{notes}"
    )
