"""t-SNE of the features of look-alike classes, run beside run (the paper's comparison of feature quality)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.report.figures.drawing import Panel, Points, scatter
from semaug.report.figures.figure import Figure, words
from semaug.report.figures.groups import choose_group
from semaug.report.figures.looking import choose, run_samples, with_images
from semaug.report.figures.points import scatter_html
from semaug.report.figures.views import load_views, look_with
from semaug.util.errors import SemaugError

Features = npt.NDArray[np.float64]


def quality(features: Features, labels: npt.NDArray[np.int64]) -> dict[str, float | None]:
    """How tightly classes lie together and how far apart they are, in feature space (not in the t-SNE plane).

    With ``μ_c`` the mean feature of class c among K classes and Euclidean distances:

    - ``intra``: ``mean_i ‖a_i − μ_{y_i}‖``, the mean distance of a feature to the centre of its class;
    - ``inter``: ``mean_{c<k} ‖μ_c − μ_k‖``, the mean distance between centres;
    - ``separability``: ``inter / intra``, which does not depend on the scale of the features: larger is better;
    - ``compactness``: ``intra / rms_i ‖a_i − μ‖``, with μ the mean of all features: the distance to the own centre
      relative to the spread of the group as a whole; smaller is tighter;
    - ``silhouette``: the mean silhouette coefficient, in [−1, 1]: larger is better.

    Where all features of each class coincide, what is divided by zero is None.
    """
    from sklearn.metrics import silhouette_score

    present = np.unique(labels)
    centres = np.stack([features[labels == c].mean(0) for c in present])
    own = centres[np.searchsorted(present, labels)]
    intra = float(np.linalg.norm(features - own, axis=1).mean())
    upper = np.triu_indices(len(present), 1)
    inter = float(np.linalg.norm(centres[upper[0]] - centres[upper[1]], axis=1).mean()) if len(present) > 1 else 0.0
    spread = float(np.sqrt(np.square(features - features.mean(0)).sum(1).mean()))
    measurable = 2 <= len(present) < len(labels)
    return {
        "intra": intra,
        "inter": inter,
        "separability": inter / intra if intra > 0 else None,
        "compactness": intra / spread if spread > 0 else None,
        "silhouette": float(silhouette_score(features, labels)) if measurable else None,
    }


def plane(features: Features, seed: int, perplexity: float | None = None) -> Points:
    """Two coordinates of each feature by t-SNE, started from the first two principal components."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    count = len(features)
    if count < 4:
        raise SemaugError(f"t-SNE needs at least 4 images, not {count}")
    # features that all coincide have no principal components; t-SNE's own tiny noise is as good a start
    alike = float(np.ptp(features, axis=0).max()) == 0 or features.shape[1] < 2
    wanted = 30.0 if perplexity is None else perplexity
    if not wanted > 0:
        raise SemaugError(f"the perplexity must be positive, not {wanted:g}")
    model = TSNE(
        perplexity=min(wanted, (count - 1) / 3), init="random" if alike else "pca", random_state=seed, n_jobs=1
    )
    # threads that wait for each other on a busy machine take longer than one thread
    with threadpool_limits(1):
        found = np.asarray(model.fit_transform(features), dtype=np.float64)
    return _turned(found)


def _turned(places: Points) -> Points:
    """The plane turned such that it fits into the smallest square; which way is up means nothing in t-SNE."""
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
    """t-SNE of the features of a group of look-alike classes, one panel per run: same images, same colours.

    `samples` are by default what the first run was evaluated on; their labels are indices of the runs' classes. How the
    group is chosen is told by :func:`semaug.report.figures.groups.choose_group`. At most `limit` images are shown, drawn by
    `seed`. Numbers, by run: those of :func:`quality`, and `top1` on the images shown.
    """
    views = load_views(runs, device)
    classes = views[0].classes
    name, members, how = choose_group(
        [v.path for v in views], classes, group=group, groups=groups, max_classes=max_classes
    )
    samples = run_samples(views[0].classifier) if samples is None else samples
    members = with_images(members, samples)
    seen = look_with(samples, choose(samples, limit, seed, members), views, progress=progress)
    place = {label: i for i, label in enumerate(members)}
    labels = np.array([place[label] for label in seen.labels.tolist()])
    shown = [words(classes[i]) for i in members]
    panels, measured = [], {}
    for view in views:
        features = seen.features[view.label]
        numbers = quality(features.double().numpy(), labels)
        top1 = float((view.logits(features).argmax(1) == seen.labels).double().mean())
        measured[view.label] = {**numbers, "top1": top1}
        subtitle = f"separability {_text(numbers['separability'])} · silhouette {_text(numbers['silhouette'])}"
        subtitle += f" · top-1 {100 * top1:.0f} %"
        panels.append(
            Panel(view.label, subtitle, plane(features.double().numpy(), seed, perplexity), labels.tolist(),
                  range(len(labels)), [False] * len(labels))
        )  # fmt: skip
    png, svg = scatter(panels, shown)
    title = f"Features of look-alike classes: {words(name)}"
    caption = (
        f"t-SNE of the features of {len(labels)} images of {len(members)} classes {how}. Each point is an image, each "
        f"colour and shape a class, the same in every panel. "
        f"{_comparison(measured, len(labels))}"
        "Separability is the mean distance between class centres over the mean distance of a feature to its own "
        "centre; the silhouette lies between −1 and 1. Both are measured in feature space, and larger is better. "
        "Distances between clusters in a t-SNE plane mean little."
    )
    numbers_of = {
        "group": name, "classes": [classes[i] for i in members], "images": len(labels), "seed": seed, "runs": measured
    }  # fmt: skip
    html = scatter_html(panels, shown, seen.thumbnails, seen.names)
    return Figure("tsne", title, caption, numbers_of, png, svg, html)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _comparison(measured: dict[str, dict[str, Any]], images: int) -> str:
    known = {label: row["separability"] for label, row in measured.items() if row["separability"] is not None}
    if len(known) < 2:
        return ""
    best = max(known, key=lambda label: known[label])
    others = ", ".join(f"{label} {value:.2f}" for label, value in known.items() if label != best)
    chance = "; on so few images, and with one run each, a small difference may be chance" if images < 1000 else ""
    return f"Classes are separated best by {best} ({known[best]:.2f}; {others}){chance}. "
