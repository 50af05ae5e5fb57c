"""Nearest neighbours of augmented features in pixel space: what semantic augmentation turns an image into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.inference.pictures import data_uri
from semaug.report.figures.drawing import COLOURS, SOFT, Note, Photo, sheet, wrapped
from semaug.report.figures.figure import Figure, fragment, words
from semaug.report.figures.looking import Seen, choose, run_samples
from semaug.report.figures.views import View, load_augmenting, look_with, same_classes
from semaug.util.errors import SemaugError

MEASURED = 200  # queries over which the shares are taken


@dataclass(frozen=True, eq=False)
class Found:
    """The neighbours of all measured queries under one run."""

    moved: list[list[int]]  # places in the gallery, of the draws
    unmoved: list[list[int]]  # of the features themselves
    shift: float  # mean of ‖a' − a‖ relative to the distance of a to its nearest other image


def nearest_each(draws: Tensor, gallery: Tensor, same: Sequence[bytes], query: int) -> list[int]:
    """For each draw (K, D), in order, the place of the nearest feature of the gallery (N, D).

    Neither the query nor an image with the same pixels is taken, nor any image twice.
    """
    taken = {same[query]}
    found = []
    for distances in torch.cdist(draws.double(), gallery.double()):
        for place in distances.argsort(stable=True).tolist():
            if same[place] not in taken:
                taken.add(same[place])
                found.append(place)
                break
    return found


def neighbours(
    runs: Mapping[str, Path],
    samples: Samples | None = None,
    *,
    queries: int = 4,
    count: int = 5,
    limit: int = 2000,
    covariance: Literal["run", "classwise"] = "run",
    strength: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Real images whose features are nearest to augmented ones, for each run (one per source of Σ, say).

    The `queries` images are drawn by `seed`, each of another class where there are as many. For each of them and each
    run, `count` features ``a' ~ N(a, λΣ)`` are drawn, with Σ and λ of the end of training, and each draw is shown as
    the image (not the query, none twice) whose feature is nearest to it, among at most `limit` of `samples`: what the
    first run was evaluated on, by default. Labels are indices of the runs' classes.

    Numbers, by run: `same_class`, the share of neighbours that have the query's class, over up to 200 random queries;
    `unmoved_same_class`, the same for the `count` nearest neighbours of ``a`` itself; `kept`, the share of neighbours
    of the draws that are among the latter; `shift`, the mean of ``‖a' − a‖`` relative to the distance of ``a`` to its
    nearest other image. `chance` is the share of a random image.
    """
    if not 1 <= count <= 10 or queries < 1:
        raise SemaugError(f"need 1 to 10 neighbours of at least 1 query, not {count} of {queries}")
    views = [load_augmenting(k, v, covariance=covariance, strength=strength, device=device) for k, v in runs.items()]
    same_classes(views)
    samples = run_samples(views[0].classifier) if samples is None else samples
    seen = look_with(samples, choose(samples, limit, seed), views, side=128, progress=progress)
    if len(set(seen.same)) <= count:
        raise SemaugError(f"{count} neighbours need more than {len(set(seen.same))} different images")
    asked = _queries(seen, queries, seed)
    found = {view.label: _find(view, seen, asked, count, seed) for view in views}
    labels = seen.labels.tolist()
    numbers: dict[str, Any] = {
        "queries": len(asked), "neighbours": count, "images": len(labels), "seed": seed,
        "shown": [seen.names[q] for q in asked[:queries]],
        "chance": float(np.mean([(labels.count(labels[q]) - 1) / (len(labels) - 1) for q in asked])),
        "runs": {view.label: _numbers(found[view.label], labels, asked, view.strength) for view in views},
    }  # fmt: skip
    shown = _shown(views, seen, asked[:queries], found, numbers)
    html = fragment("neighbours.html", queries=shown, count=count)
    return Figure(
        "neighbours",
        "Nearest images of augmented features",
        _caption(views, numbers),
        numbers,
        _png(shown, count),
        None,
        html,
    )


def _queries(seen: Seen, shown: int, seed: int) -> list[int]:
    """Places of random queries; those that are shown come first and have different classes if possible."""
    order: list[int] = np.random.default_rng([seed, 1]).permutation(len(seen.indices)).tolist()
    first: list[int] = []
    classes: set[int] = set()
    for place in order:
        if len(first) < shown and int(seen.labels[place]) not in classes:
            first.append(place)
            classes.add(int(seen.labels[place]))
    rest = [place for place in order if place not in first]
    return (first + rest)[: max(MEASURED, shown)]


def _find(view: View, seen: Seen, asked: Sequence[int], count: int, seed: int) -> Found:
    gallery = seen.features[view.label]
    own, labels = gallery[list(asked)], seen.labels[list(asked)]
    draws = view.draws(own, labels, count, torch.Generator().manual_seed(seed))
    moved = [nearest_each(draws[:, i], gallery, seen.same, q) for i, q in enumerate(asked)]
    unmoved = [nearest_each(own[i].expand(count, -1), gallery, seen.same, q) for i, q in enumerate(asked)]
    closest = torch.stack([(gallery[q] - gallery[near[0]]).norm() for q, near in zip(asked, unmoved, strict=True)])
    shift = (draws - own).norm(dim=2).mean(0) / closest.clamp_min(1e-12)
    return Found(moved, unmoved, float(shift.mean()))


def _numbers(found: Found, labels: Sequence[int], asked: Sequence[int], strength: float) -> dict[str, float]:
    kept = [len(set(a) & set(b)) / len(b) for a, b in zip(found.moved, found.unmoved, strict=True)]
    return {
        "same_class": _share(labels, asked, found.moved),
        "unmoved_same_class": _share(labels, asked, found.unmoved),
        "kept": float(np.mean(kept)),
        "shift": found.shift,
        "strength": strength,
    }


def _share(labels: Sequence[int], asked: Sequence[int], found: Sequence[Sequence[int]]) -> float:
    hits = [labels[place] == labels[q] for q, near in zip(asked, found, strict=True) for place in near]
    return float(np.mean(hits))


def _shown(
    views: Sequence[View], seen: Seen, asked: Sequence[int], found: Mapping[str, Found], numbers: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What is drawn of each query, for the PNG and for the page alike."""
    classes = views[0].classes

    def photo(place: int, query: int | None) -> dict[str, Any]:
        picture = seen.thumbnails[place]
        label = int(seen.labels[place])
        return {
            "picture": picture,
            "uri": data_uri(Image.fromarray(picture), quality=85),
            "name": words(classes[label]),
            "file": seen.names[place],
            "same": None if query is None else label == int(seen.labels[query]),
        }

    return [
        {
            "query": photo(q, None),
            "rows": [
                {
                    "label": view.label,
                    "share": numbers["runs"][view.label]["same_class"],
                    "photos": [photo(place, q) for place in found[view.label].moved[i]],
                }
                for view in views
            ],
        }
        for i, q in enumerate(asked)
    ]


def _png(shown: Sequence[Mapping[str, Any]], count: int) -> bytes:
    """Blocks of a query and its rows, two blocks side by side."""
    side, step, line, margin, big = 0.86, 0.97, 1.2, 0.25, 1.25
    label = big + 0.22
    first = label + 1.12  # where the neighbours begin
    rows = len(shown[0]["rows"])
    width, height = first + count * step + 0.3, max(rows * line, big + 0.4) + 0.2
    photos, notes = [], []
    for i, block in enumerate(shown):
        left, top = margin + i % 2 * width, margin + i // 2 * height
        query = block["query"]
        photos.append(Photo(left, top, big, query["picture"], "query: " + wrapped(query["name"], 28)))
        for row in block["rows"]:
            notes.append(Note(left + label, top + 0.14, wrapped(row["label"], 13), 10, bold=True))
            text = f"{100 * row['share']:.0f} % same\nclass, over\nall queries"
            notes.append(Note(left + label, top + 0.36, text, 7, SOFT))
            for k, photo in enumerate(row["photos"]):
                text = "same class" if photo["same"] else wrapped(photo["name"], 17)
                frame = COLOURS[0] if photo["same"] else COLOURS[1]
                place = left + first + k * step
                photos.append(Photo(place, top, side, photo["picture"], text, frame, not photo["same"]))
            top += line
    columns = min(2, len(shown))
    return sheet(2 * margin + columns * width - 0.3, 2 * margin - 0.2 + -(-len(shown) // 2) * height, photos, notes)


def _caption(views: Sequence[View], numbers: Mapping[str, Any]) -> str:
    rows = numbers["runs"]
    shares = ", ".join(
        f"{label} {100 * row['same_class']:.0f} % ({100 * row['unmoved_same_class']:.0f} %)"
        for label, row in rows.items()
    )
    shifts = ", ".join(f"{label} {row['shift']:.2g} (λ = {row['strength']:.3g})" for label, row in rows.items())
    notes: dict[str, list[str]] = {}
    for view in views:
        for note in view.notes:
            notes.setdefault(note, []).append(view.label)
    return (
        "Each row shows the real images whose features are nearest to draws from N(a, λΣ) around the feature a of the "
        "query on the left, each image once; queries are drawn at random. A solid blue frame is an image of the "
        "query's class, a dashed orange one of another. Share of neighbours of the query's class (in brackets: of the "
        f"images nearest to a itself) over {numbers['queries']} queries among {numbers['images']} images: {shares}; by "
        f"chance {100 * numbers['chance']:.0f} %. How far a draw moves, relative to the distance of the nearest image: "
        f"{shifts}."
    ) + "".join(f" For {', '.join(labels)}, {note}." for note, labels in notes.items())
