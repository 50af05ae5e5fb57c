"""Original and augmented features of image-level augmentation and of ours, through one network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.report.figures.drawing import Panel, scatter
from semaug.report.figures.embedding import plane
from semaug.report.figures.figure import Figure, words
from semaug.report.figures.groups import choose_group
from semaug.report.figures.looking import choose, look, run_samples, with_images
from semaug.report.figures.points import scatter_html
from semaug.report.figures.views import View, load_augmenting
from semaug.training.methods import METHODS
from semaug.util.errors import SemaugError

IMAGE_LEVEL: dict[str, str] = {"Random Erasing": "random-erasing", "RandAugment": "randaugment"}
OURS = "Semantic augmentation"


def kept_share(features: Tensor, labels: Tensor, centres: Tensor) -> float:
    """The share of features (N, D) whose nearest class centre (K, D) is that of their own class (N,)."""
    nearest = torch.cdist(features.double(), centres.double()).argmin(1)
    return float((nearest == labels).double().mean())


def augmentations(
    run: Path,
    samples: Samples | None = None,
    *,
    group: str | None = None,
    groups: Path | None = None,
    max_classes: int = 5,
    limit: int = 120,
    copies: int = 2,
    covariance: Literal["run", "classwise"] = "run",
    strength: float | None = None,
    perplexity: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """t-SNE of original and augmented features for Random Erasing, RandAugment and ours, through one run's network.

    Of each image of a group of look-alike classes there are `copies` augmented versions: images augmented just as the
    training methods ``random-erasing`` and ``randaugment`` do, or draws ``a' ~ N(a, λΣ)``, with Σ and λ of the end of
    training. ``covariance="classwise"`` takes the class-wise Σ of the final features instead, which any run can give.

    Numbers: `original`, the share of original features whose nearest class centre (mean of the originals of a shown
    class) is that of their own class; for each augmentation `kept`, that share of augmented features, `altered`, the
    share of versions that differ from the original (Random Erasing leaves half of the images alone), and
    `kept_of_altered`, the share among these.
    """
    if copies < 1:
        raise SemaugError(f"need at least 1 augmented version of each image, not {copies}")
    view = load_augmenting("run", run, covariance=covariance, strength=strength, device=device)
    name, members, how = choose_group([run], view.classes, group=group, groups=groups, max_classes=max_classes)
    samples = run_samples(view.classifier) if samples is None else samples
    members = with_images(members, samples)
    looks: dict[str, Callable[[Tensor], Tensor]] = {"original": view.features}
    altered: dict[str, list[Tensor]] = {}
    for title, method in IMAGE_LEVEL.items():
        for copy in range(copies):
            altered[f"{title} {copy}"] = []
            looks[f"{title} {copy}"] = _augmented(view, method, altered[f"{title} {copy}"])
    with torch.random.fork_rng(devices=[]):  # torchvision's transforms draw from the global generator
        torch.manual_seed(seed)
        seen = look(samples, choose(samples, limit, seed, members), view.classifier, looks, progress=progress)
    place = {label: i for i, label in enumerate(members)}
    labels = torch.tensor([place[label] for label in seen.labels.tolist()])
    original = seen.features["original"]
    centres = torch.stack([original[labels == label].mean(0) for label in range(len(members))])
    versions = {
        title: torch.stack([seen.features[f"{title} {copy}"] for copy in range(copies)]) for title in IMAGE_LEVEL
    }
    versions[OURS] = view.draws(original, seen.labels, copies, torch.Generator().manual_seed(seed))
    masks = {
        title: torch.stack([torch.cat(altered[f"{title} {copy}"]) for copy in range(copies)]) for title in IMAGE_LEVEL
    }
    masks[OURS] = torch.ones(copies, len(labels), dtype=torch.bool)
    numbers: dict[str, Any] = {
        "group": name,
        "classes": [view.classes[i] for i in members],
        "images": len(labels),
        "copies": copies,
        "seed": seed,
        "strength": view.strength,
        "original": kept_share(original, labels, centres),
        "augmentations": {title: _shares(moved, masks[title], labels, centres) for title, moved in versions.items()},
    }
    panels = [
        _panel(title, original, moved, labels.numpy(), numbers, seed, perplexity) for title, moved in versions.items()
    ]
    shown = [words(view.classes[i]) for i in members]
    png, svg = scatter(panels, shown)
    html = scatter_html(panels, shown, seen.thumbnails, seen.names)
    caption = _caption(view, numbers, len(members), how)
    return Figure("augmentations", "Original and augmented features", caption, numbers, png, svg, html)


def _shares(moved: Tensor, mask: Tensor, labels: Tensor, centres: Tensor) -> dict[str, float | None]:
    own = labels.expand(mask.shape)
    return {
        "kept": kept_share(moved.flatten(0, 1), own.flatten(), centres),
        "altered": float(mask.double().mean()),
        "kept_of_altered": kept_share(moved[mask], own[mask], centres) if mask.any() else None,
    }


def _augmented(view: View, method: str, altered: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Features of augmented centre crops; which of the images it changed at all is noted in `altered`."""
    transforms = METHODS[method].images(len(view.classes))
    on_crops, on_images = transforms.on_crops, transforms.on_images
    preprocessing = view.classifier.preprocessing
    start = (preprocessing.resize - preprocessing.crop) // 2
    window = slice(start, start + preprocessing.crop)

    def see(pixels: Tensor) -> Tensor:
        crops = pixels[:, window, window].permute(0, 3, 1, 2)
        every = torch.arange(len(crops)), len(crops)
        inputs = preprocessing.normalised(crops if on_crops is None else on_crops(crops, *every))
        inputs = inputs if on_images is None else on_images(inputs, *every)
        altered.append((inputs != preprocessing.normalised(crops)).flatten(1).any(1))
        return view.inputs_features(inputs)

    return see


def _panel(
    title: str,
    original: Tensor,
    moved: Tensor,
    labels: npt.NDArray[np.int64],
    numbers: dict[str, Any],
    seed: int,
    perplexity: float | None,
) -> Panel:
    copies, count = moved.shape[:2]
    everything = torch.cat([original, moved.flatten(0, 1)]).double().numpy()
    share = numbers["augmentations"][title]["kept"]
    return Panel(
        title,
        f"{100 * share:.0f} % of augmented features stay nearest to their class",
        plane(everything, seed, perplexity),
        np.tile(labels, copies + 1).tolist(),
        list(range(count)) * (copies + 1),
        [False] * count + [True] * (count * copies),
    )


def _caption(view: View, numbers: dict[str, Any], classes: int, how: str) -> str:
    parts = numbers["augmentations"]
    told = ", ".join(f"{title} {100 * row['kept']:.0f} %" for title, row in parts.items())
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in view.notes)
    erased = parts["Random Erasing"]
    rest = (
        "" if erased["kept_of_altered"] is None else f", and of the rest {100 * erased['kept_of_altered']:.0f} % stay"
    )
    return (
        f"t-SNE of the features of {numbers['images']} images of {classes} classes {how}, and of {numbers['copies']} "
        "augmented versions of each, all through the same network; each panel is a t-SNE of its own. Share of "
        f"augmented features whose nearest class centre is still that of their own class: {told}; of the originals "
        f"{100 * numbers['original']:.0f} %. Images are augmented as in training: Random Erasing left "
        f"{100 * (1 - erased['altered']):.0f} % of them alone{rest}. Semantic augmentation draws from N(a, λΣ) with "
        f"λ = {numbers['strength']:.3g}.{notes}"
    )
