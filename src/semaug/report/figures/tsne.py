"""t-SNE of the features of look-alike classes, one panel for each run (the paper's comparison of features)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.report.canvas import to_png, to_svg
from semaug.report.figures.features import choose_images, run_images
from semaug.report.figures.figure import Figure, class_title
from semaug.report.figures.groups import choose_group
from semaug.report.figures.runs import features_of_runs, open_runs
from semaug.report.figures.scatter import Panel, scatter, scatter_fragment
from semaug.util.errors import DataError, SettingError

Array = npt.NDArray[np.float64]


def separation(features: Array, labels: npt.NDArray[np.int64]) -> dict[str, float | None]:
    """Measure how well classes are separated in feature space (not in the t-SNE plane).

    With the mean ``μ_c`` of class c and Euclidean distances; None where it would divide by zero:

    - ``intra``: ``mean_i ‖a_i − μ_{y_i}‖``, the mean distance of a feature from the centre of its class;
    - ``inter``: ``mean_{c<k} ‖μ_c − μ_k‖``, the mean distance between centres;
    - ``separability``: ``inter / intra``; larger is better;
    - ``compactness``: ``intra / rms_i ‖a_i − μ‖`` with the mean μ of all features; smaller is tighter;
    - ``silhouette``: the mean silhouette coefficient, in [−1, 1]; larger is better.
    """
    from sklearn.metrics import silhouette_score

    present, own = np.unique(labels, return_inverse=True)
    centres = np.stack([features[own == c].mean(0) for c in range(len(present))])
    intra = float(np.linalg.norm(features - centres[own], axis=1).mean())
    first, second = np.triu_indices(len(present), 1)
    inter = float(np.linalg.norm(centres[first] - centres[second], axis=1).mean()) if len(present) > 1 else 0.0
    spread = float(np.sqrt(np.square(features - features.mean(0)).sum(1).mean()))
    return {
        "intra": intra,
        "inter": inter,
        "separability": inter / intra if intra > 0 else None,
        "compactness": intra / spread if spread > 0 else None,
        "silhouette": float(silhouette_score(features, labels)) if 2 <= len(present) < len(labels) else None,
    }


def tsne_plane(features: Array, seed: int, perplexity: float | None = None) -> Array:
    """Compute t-SNE coordinates (N, 2), started from the first two principal components.

    Args:
        features: Features (N, D), N at least 4.
        seed: Seed of the random numbers.
        perplexity: Perplexity; 30 by default, and at most (N − 1) / 3.

    Raises:
        DataError: If there are too few features.
        SettingError: If the perplexity is not positive.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    count = len(features)
    if count < 4:
        raise DataError(f"t-SNE needs at least 4 images, not {count}")
    perplexity = 30.0 if perplexity is None else perplexity
    if not perplexity > 0:
        raise SettingError(f"`perplexity` must be positive, not {perplexity:g}")
    # features that all coincide have no principal components
    alike = float(np.ptp(features, axis=0).max()) == 0 or features.shape[1] < 2
    start = "random" if alike else "pca"
    model = TSNE(perplexity=min(perplexity, (count - 1) / 3), init=start, random_state=seed, n_jobs=1)
    with threadpool_limits(1):  # on a busy machine, threads that wait for each other take longer than one
        places = np.asarray(model.fit_transform(features), dtype=np.float64)
    return _turned(places)


def _turned(places: Array) -> Array:
    turns = np.deg2rad(np.arange(0, 90, 3))
    candidates = [places @ np.array([[np.cos(t), np.sin(t)], [-np.sin(t), np.cos(t)]]) for t in turns]
    return min(candidates, key=lambda turned: float(np.ptp(turned, axis=0).max()))


def tsne(
    runs: Mapping[str, Path],
    samples: Samples | None = None,
    *,
    group: str | None = None,
    groups: Path | None = None,
    max_classes: int = 8,
    limit: int = 320,
    perplexity: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Draw the features of a group of look-alike classes, one panel for each run.

    Numbers, by run: the measures of :func:`separation`, and the accuracy `top1` on the images shown.

    Args:
        runs: Run directories by label.
        samples: Images, labelled by the runs' classes; by default those that the first run was evaluated on.
        group: Name of the group; see :func:`semaug.report.figures.groups.choose_group`.
        groups: Table of groups.
        max_classes: Most classes.
        limit: Most images.
        perplexity: Perplexity of t-SNE.
        seed: Seed of the choice of images and of t-SNE.
        device: Where to run the networks.
        progress: Called with the numbers of finished and of all images.

    Returns:
        The figure.

    Raises:
        SemaugError: If runs cannot be compared, or there is no such group.
    """
    opened = open_runs(runs, device=device)
    classes, paths = opened[0].classes, list(runs.values())
    samples = run_images(opened[0].classifier) if samples is None else samples
    chosen = choose_group(paths, classes, group=group, groups=groups, max_classes=max_classes, samples=samples)
    computed = features_of_runs(samples, choose_images(samples, limit, seed, chosen.classes), opened, progress=progress)
    labels = np.searchsorted(chosen.classes, computed.labels.numpy())
    titles = [class_title(classes[i]) for i in chosen.classes]
    panels, measured = [], {}
    for run in opened:
        features = computed.features[run.label].double().numpy()
        top1 = float((run.logits(computed.features[run.label]).argmax(1) == computed.labels).double().mean())
        measured[run.label] = own = {**separation(features, labels), "top1": top1}
        subtitle = f"separability {_text(own['separability'])} · silhouette {_text(own['silhouette'])}"
        places = tsne_plane(features, seed, perplexity)
        originals = [False] * len(labels)
        subtitle = f"{subtitle} · top-1 {100 * top1:.0f} %"
        panels.append(Panel(run.label, subtitle, places, labels.tolist(), range(len(labels)), originals))
    caption = (
        f"t-SNE of the features of {len(labels)} images of {len(titles)} classes {chosen.how}. Each point is an image, "
        f"each colour and shape a class, the same in every panel. {_comparison(measured, len(labels))}"
        "Separability is the mean distance between class centres over the mean distance of a feature from its own "
        "centre; the silhouette is between −1 and 1. Both are measured in feature space, and larger is better. "
        "Distances between clusters in a t-SNE plane mean little."
    )
    numbers = {"group": chosen.name, "classes": [classes[i] for i in chosen.classes], "images": len(labels)}
    numbers |= {"seed": seed, "runs": measured}
    title = f"Features of look-alike classes: {class_title(chosen.name)}"
    drawn = scatter(panels, titles)
    html = scatter_fragment(panels, titles, computed.thumbnails, computed.names)
    return Figure("tsne", title, caption, numbers, to_png(drawn), to_svg(drawn, title), html)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _comparison(measured: Mapping[str, Mapping[str, Any]], images: int) -> str:
    known = {label: row["separability"] for label, row in measured.items() if row["separability"] is not None}
    if len(known) < 2:
        return ""
    best = max(known, key=lambda label: known[label])
    others = ", ".join(f"{label} {value:.2f}" for label, value in known.items() if label != best)
    chance = "; on so few images, and with one run each, a small difference may be chance" if images < 1000 else ""
    return f"Classes are separated best by {best} ({known[best]:.2f}; {others}){chance}. "
