"""Real images nearest to augmented features."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semaug.data.samples import Samples
from semaug.report.canvas import to_png
from semaug.report.figures.figure import Figure, fragment
from semaug.report.figures.photos import Photo, PhotoBlock, photo_grid
from semaug.report.figures.runs import (
    CovarianceKind,
    FigureRun,
    ImageFeatures,
    choose_images,
    features_of_runs,
    open_runs,
    run_images,
)
from semaug.util.errors import DataError, SettingError
from semaug.util.progress import ProgressCallback

_MEASURED = 200  # queries over which shares are measured


def neighbours(
    runs: Mapping[str, Path],
    samples: Samples | None = None,
    *,
    queries: int = 4,
    count: int = 5,
    limit: int = 2000,
    covariance: CovarianceKind = "run",
    strength: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Draw the real images nearest to one augmented feature ``a' ~ N(a, λΣ)`` of each query, whose feature is a.

    Numbers, by run: `same_class`, the share of neighbours that have the query's class, over up to 200 queries;
    `unmoved_same_class`, the same for the nearest neighbours of ``a`` itself; `kept`, the share of neighbours of
    ``a'`` that are among the latter; `shift`, the mean of ``‖a' − a‖`` relative to the distance from ``a`` to its
    nearest other image. `chance` is the share for random images.

    Args:
        runs: Run directories by label.
        samples: Images, labelled by the runs' classes; by default those that the first run was evaluated on.
        queries: Number of queries to show, drawn at random from different classes.
        count: Neighbours of each query, 1 to 10.
        limit: Most images.
        covariance: The Σ.
        strength: λ; that of the end of training by default.
        seed: Seed of all random numbers.
        device: Where to run the networks.
        progress: Called with the numbers of finished and of all images.

    Raises:
        SemaugError: If a run has no such Σ, or there are too few images.
    """
    if not 1 <= count <= 10 or queries < 1:
        raise SettingError(f"need 1 to 10 neighbours of at least 1 query, not {count} of {queries}")
    opened = open_runs(runs, covariance, strength, device)
    samples = run_images(opened[0].classifier) if samples is None else samples
    computed = features_of_runs(samples, choose_images(samples, limit, seed), opened, side=128, progress=progress)
    if len(set(computed.digests)) <= count:
        raise DataError(f"{count} neighbours need more than {len(set(computed.digests))} different images")
    labels = computed.labels.tolist()
    asked = _queries(labels, queries, seed)
    nearest, measured = {}, {}
    for run in opened:
        nearest[run.label], measured[run.label] = _search(run, computed, asked, count, seed)
    numbers: dict[str, Any] = {
        "queries": len(asked), "neighbours": count, "images": len(labels), "seed": seed,
        "shown": [computed.names[q] for q in asked[:queries]],
        "chance": float(np.mean([(labels.count(labels[q]) - 1) / (len(labels) - 1) for q in asked])),
        "runs": measured,
    }  # fmt: skip

    def photo(i: int, query: int | None = None) -> Photo:
        same = None if query is None else labels[i] == labels[query]
        text = opened[0].classes[labels[i]]
        return Photo(computed.thumbnails[i], "same class" if same else text, computed.names[i], same)

    blocks = []
    for k, q in enumerate(asked[:queries]):
        notes = {
            label: f"{100 * row['same_class']:.0f} % same class, over all queries" for label, row in measured.items()
        }
        rows = [(label, note, [photo(i, q) for i in nearest[label][k]]) for label, note in notes.items()]
        blocks.append(PhotoBlock("", photo(q), rows))
    html = fragment("photos.html", blocks=blocks, good="image of the query's class", bad="image of another class")
    title = "Nearest images of augmented features"
    return Figure("neighbours", title, _caption(opened, numbers), numbers, to_png(photo_grid(blocks)), None, html)


def _queries(labels: Sequence[int], shown: int, seed: int) -> list[int]:
    """Random queries; those that are shown come first and have different classes if possible."""
    order: list[int] = np.random.default_rng([seed, 1]).permutation(len(labels)).tolist()
    first = {labels[i]: i for i in reversed(order)}  # the first of each class
    chosen = [i for i in order if first[labels[i]] == i][:shown]
    return [*chosen, *(i for i in order if i not in chosen)][: max(_MEASURED, shown)]


def _nearest_images(feature: Tensor, gallery: Tensor, digests: Sequence[bytes], query: int, count: int) -> list[int]:
    """The images of the gallery (N, D) nearest to a feature (D,); neither the query nor any image twice."""
    taken = {digests[query]}
    nearest: list[int] = []
    for i in torch.cdist(feature.double()[None], gallery.double())[0].argsort(stable=True).tolist():
        if len(nearest) == count:
            break
        if digests[i] not in taken:
            taken.add(digests[i])
            nearest.append(i)
    return nearest


def _search(
    run: FigureRun, computed: ImageFeatures, asked: Sequence[int], count: int, seed: int
) -> tuple[list[list[int]], dict[str, float]]:
    """The neighbours of one augmented feature of each query, and what they show."""
    gallery, labels = computed.features[run.label], computed.labels.tolist()
    own = gallery[list(asked)]
    [augmented] = run.draws(own, computed.labels[list(asked)], 1, torch.Generator().manual_seed(seed))
    of_augmented, of_query = (
        [_nearest_images(features[i], gallery, computed.digests, q, count) for i, q in enumerate(asked)]
        for features in (augmented, own)
    )
    closest = torch.stack([(gallery[q] - gallery[near[0]]).norm() for q, near in zip(asked, of_query, strict=True)])
    shift = (augmented - own).norm(dim=1) / closest.clamp_min(1e-12)

    def same_class(nearest: Sequence[Sequence[int]]) -> float:
        return float(np.mean([labels[i] == labels[q] for q, near in zip(asked, nearest, strict=True) for i in near]))

    return of_augmented, {
        "same_class": same_class(of_augmented),
        "unmoved_same_class": same_class(of_query),
        "kept": float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(of_augmented, of_query, strict=True)])),
        "shift": float(shift.mean()),
        "strength": run.strength,
    }


def _caption(runs: Sequence[FigureRun], numbers: Mapping[str, Any]) -> str:
    rows = numbers["runs"].items()
    shares = ", ".join(f"{k} {100 * v['same_class']:.0f} % ({100 * v['unmoved_same_class']:.0f} %)" for k, v in rows)
    shifts = ", ".join(f"{label} {row['shift']:.2g} (λ = {row['strength']:.3g})" for label, row in rows)
    notes: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            notes.setdefault(note, []).append(run.label)
    return (
        "Each query is an image with the feature a, drawn at random. Beside it are the "
        f"{numbers['neighbours']} real images whose features are nearest to an augmented feature (a draw from N(a, "
        "λΣ)), the nearest first. Solid blue frame: image of the query's class; dashed orange frame: of another class. "
        "Share of neighbours of the query's class (in brackets: "
        f"of the images nearest to a itself) over {numbers['queries']} queries among {numbers['images']} images: "
        f"{shares}; by chance {100 * numbers['chance']:.0f} %. Distance of the draw from a, relative to that of the "
        f"nearest image: {shifts}."
    ) + "".join(f" For {', '.join(labels)}, {note}." for note, labels in notes.items())
