"""t-SNE of the features of groups of look-alike classes, one panel for each run (the paper's comparison)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semaug.data.samples import Samples
from semaug.report.canvas import to_png, to_svg
from semaug.report.figures.figure import Figure
from semaug.report.figures.groups import choose_group, choose_groups
from semaug.report.figures.runs import choose_images, features_of_runs, open_runs, run_images
from semaug.report.figures.scatter import Block, Panel, scatter, scatter_fragment
from semaug.util.errors import DataError, SettingError
from semaug.util.names import class_title
from semaug.util.progress import ProgressCallback

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
    """Compute t-SNE coordinates (N, 2) of at least 4 features (N, D), started from the first two principal components.

    The perplexity is 30 by default, and at most (N − 1) / 3.
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
    more_than: int = 5,
    limit: int = 320,
    perplexity: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Draw the features of groups of look-alike classes, one panel for each group and run.

    Numbers: of each group the measures of :func:`separation` and the accuracy `top1` on the images shown, by run; and
    their means over the groups.

    Args:
        runs: Run directories by label.
        samples: Images, labelled by the runs' classes; by default those that the first run was evaluated on.
        group: Name of the only group to show; see :func:`semaug.report.figures.groups.choose_group`.
        groups: Table of groups.
        more_than: Without `group`, all groups of more classes than this are shown; if there is none, the largest one.
        limit: Most images of a group.
        perplexity: Perplexity of t-SNE.
        seed: Seed of the choice of images and of t-SNE.
        device: Where to run the networks.
        progress: Called with the numbers of finished and of all images.

    Raises:
        SemaugError: If runs cannot be compared, or there is no such group.
    """
    opened = open_runs(runs, device=device)
    classes, paths = opened[0].classes, list(runs.values())
    samples = run_images(opened[0].classifier) if samples is None else samples
    if group is None:
        chosen = choose_groups(paths, classes, groups=groups, more_than=more_than, samples=samples)
    else:
        chosen = [choose_group(paths, classes, group=group, groups=groups, samples=samples)]
    indices = [choose_images(samples, limit, seed, own.classes) for own in chosen]
    every = sorted({i for own in indices for i in own})
    computed = features_of_runs(samples, every, opened, progress=progress)
    blocks, html = [], ""
    measured: list[dict[str, Any]] = []
    for look_alikes, own in zip(chosen, indices, strict=True):
        rows = np.searchsorted(every, own)
        labels = np.searchsorted(look_alikes.classes, computed.labels.numpy()[rows])
        panels, by_run = [], {}
        for run in opened:
            features = computed.features[run.label][rows]
            top1 = float((run.logits(features).argmax(1) == computed.labels[rows]).double().mean())
            by_run[run.label] = {**separation(features.double().numpy(), labels), "top1": top1}
            subtitle = (
                f"separability {_text(by_run[run.label]['separability'])} · silhouette "
                f"{_text(by_run[run.label]['silhouette'])} · top-1 {100 * top1:.0f} %"
            )
            places = tsne_plane(features.double().numpy(), seed, perplexity)
            originals = [False] * len(labels)
            panels.append(Panel(run.label, subtitle, places, labels.tolist(), range(len(labels)), originals))
        titles = [classes[i] for i in look_alikes.classes]
        heading = class_title(look_alikes.name).capitalize() if len(chosen) > 1 else ""
        blocks.append(Block(heading, panels, titles))
        html += scatter_fragment(blocks[-1], computed.thumbnails[rows], [computed.names[i] for i in rows])
        members = [classes[i] for i in look_alikes.classes]
        measured.append({"group": look_alikes.name, "classes": members, "images": len(labels), "runs": by_run})
    numbers: dict[str, Any] = {"seed": seed, "groups": measured, "runs": _means(measured)}
    if len(chosen) == 1:
        title = f"Features of look-alike classes: {class_title(chosen[0].name)}"
        shown = f"{len(blocks[0].classes)} classes {chosen[0].how}"
    else:
        title = f"Features of look-alike classes: {len(chosen)} groups"
        shown = f"{len(chosen)} groups of more than {more_than} classes {chosen[-1].how}"
    caption = (
        f"t-SNE of the features of {sum(own['images'] for own in measured)} images of {shown}. Each point is an image, "
        f"each colour and shape a class, the same in every panel of a group. {_comparison(numbers)}"
        "Separability is the mean distance between class centres over the mean distance of a feature from its own "
        "centre; the silhouette is between −1 and 1. Both are measured in feature space, and larger is better. "
        "Distances between clusters in a t-SNE plane mean little."
    )
    drawn = scatter(blocks)
    return Figure("tsne", title, caption, numbers, to_png(drawn), to_svg(drawn, title), html)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _means(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The mean of each measure over groups, by run; None where a group has none."""
    means: dict[str, dict[str, float | None]] = {}
    for label, first in groups[0]["runs"].items():
        rows = [own["runs"][label] for own in groups]
        means[label] = {
            key: None if any(row[key] is None for row in rows) else float(np.mean([row[key] for row in rows]))
            for key in first
        }
    return means


def _comparison(numbers: Mapping[str, Any]) -> str:
    means, groups = numbers["runs"], numbers["groups"]
    known = {label: row["separability"] for label, row in means.items() if row["separability"] is not None}
    if len(known) < 2:
        return ""
    best = max(known, key=lambda label: known[label])
    for measure in ("silhouette", "top1"):
        values = [means[label][measure] for label in known]
        if None not in values and means[best][measure] < max(values):
            return "Separability, silhouette and top-1 do not agree on which run separates the classes best. "
    others = ", ".join(f"{label} {value:.2f}" for label, value in known.items() if label != best)
    images = sum(own["images"] for own in groups)
    chance = "; on so few images, and with one run each, a small difference may be chance" if images < 1000 else ""
    if len(groups) == 1:
        return f"Classes are separated best by {best} ({known[best]:.2f}; {others}){chance}. "
    won = sum(
        own["runs"][best]["separability"] == max(own["runs"][run]["separability"] for run in known) for own in groups
    )
    return (
        f"On average classes are separated best by {best} (mean separability {known[best]:.2f}; {others}), and in "
        f"{won} of {len(groups)} groups{chance}. "
    )
