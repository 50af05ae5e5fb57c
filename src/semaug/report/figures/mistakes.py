"""The most confused pairs of classes, with images that were mistaken."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.inference.pictures import data_uri
from semaug.report.figures.drawing import COLOURS, SOFT, Note, Photo, sheet, wrapped
from semaug.report.figures.figure import Figure, fragment, words
from semaug.report.figures.looking import Seen, choose, look, run_samples
from semaug.report.figures.views import load_view
from semaug.util.errors import SemaugError


def confusions(
    run: Path,
    samples: Samples | None = None,
    *,
    pairs: int = 6,
    images: int = 2,
    limit: int = 20_000,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """The pairs of classes that a run confuses most, each with images of both that were taken for the other.

    A pair counts the mistakes both ways; of equals the first by class comes first. Shown are, drawn by `seed`, one
    image of each class that was recognised, where there is one, and up to `images` mistaken ones each way. `samples`
    are by default what the run was evaluated on; their labels are indices of its classes.

    Numbers: `pairs`, a list of {a, b, a_as_b, b_as_a, images_a, images_b}; `mistakes`, the number of all; `top1`.
    """
    if pairs < 1 or images < 1:
        raise SemaugError(f"need at least 1 pair and 1 image, not {pairs} and {images}")
    view = load_view("run", run, device)
    samples = run_samples(view.classifier) if samples is None else samples
    looks = {"run": view.features}
    seen = look(samples, choose(samples, limit, seed), view.classifier, looks, side=128, progress=progress)
    probabilities = view.logits(seen.features["run"]).softmax(1)
    sure, predicted = (part.numpy() for part in probabilities.max(1))
    true = seen.labels.numpy()
    counts = np.zeros((len(view.classes),) * 2, dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    mistakes = int((true != predicted).sum())
    if not mistakes:
        raise SemaugError(f"{run} makes no mistake on these {len(true)} images: there is no confused pair to show")
    both = np.triu(counts + counts.T, 1)
    order = np.argsort(-both, axis=None, kind="stable")[:pairs]
    found = [(int(a), int(b)) for a, b in zip(*np.unravel_index(order, both.shape), strict=True) if both[a, b]]
    per_class = counts.sum(1)
    numbers: dict[str, Any] = {
        "images": len(true),
        "mistakes": mistakes,
        "top1": 1 - mistakes / len(true),
        "seed": seed,
        "pairs": [
            {
                "a": view.classes[a], "b": view.classes[b], "a_as_b": int(counts[a, b]), "b_as_a": int(counts[b, a]),
                "images_a": int(per_class[a]), "images_b": int(per_class[b]),
            }
            for a, b in found
        ],
    }  # fmt: skip
    dice = np.random.default_rng(seed)

    def pick(label: int, answer: int, most: int) -> list[dict[str, Any]]:
        places = np.flatnonzero((true == label) & (predicted == answer))
        chosen = dice.permutation(places)[:most].tolist()
        return [_photo(seen, place, float(sure[place]), view.classes[answer], label != answer) for place in chosen]

    shown = [
        {
            **row,
            "name_a": words(row["a"]),
            "name_b": words(row["b"]),
            "right_a": pick(a, a, 1),
            "right_b": pick(b, b, 1),
            "wrong_a": pick(a, b, images),
            "wrong_b": pick(b, a, images),
        }
        for row, (a, b) in zip(numbers["pairs"], found, strict=True)
    ]
    first = numbers["pairs"][0]
    caption = (
        f"The {len(shown)} pairs of classes that are confused most, of {mistakes} mistakes on {len(true)} images "
        f"(top-1 {100 * numbers['top1']:.1f} %). First {words(first['a'])} and {words(first['b'])}: "
        f"{first['a_as_b']} of {first['images_a']} and {first['b_as_a']} of {first['images_b']} images were taken "
        "for the other. Solid blue frames: recognised, for comparison; dashed orange frames: mistaken, with the "
        "probability of the wrong answer. "
        "Images are drawn at random."
    )
    html = fragment("confusions.html", pairs=shown)
    return Figure("confusions", "Most confused classes", caption, numbers, _png(shown, images), None, html)


def _photo(seen: Seen, place: int, sure: float, answer: str, wrong: bool) -> dict[str, Any]:
    picture = seen.thumbnails[place]
    return {
        "picture": picture,
        "uri": data_uri(Image.fromarray(picture), quality=85),
        "file": seen.names[place],
        "text": f"taken for {words(answer)}, {100 * sure:.0f} %" if wrong else "recognised",
        "sure": sure,
        "wrong": wrong,
    }


def _png(shown: Sequence[Mapping[str, Any]], images: int) -> bytes:
    """Two pairs side by side; of each, a row of images for either class."""
    side, step, line, margin, names = 0.95, 1.08, 1.24, 0.25, 1.75
    width, height = max(names + (1 + images) * step + 0.3, 5.3), 0.34 + 2 * line + 0.12
    photos, notes = [], []
    titles = [wrapped(f"{pair['name_a']}  ↔  {pair['name_b']}", 64) for pair in shown]
    for i, pair in enumerate(shown):
        left, top = margin + i % 2 * width, margin + i // 2 * height
        notes.append(Note(left, top, titles[i], 10 if max(map(len, titles)) <= 50 else 7.5, bold=True))
        top += 0.34
        for way, other in (("a", "b"), ("b", "a")):
            count, total = pair[f"{way}_as_{other}"], pair[f"images_{way}"]
            text = wrapped(pair[f"name_{way}"], 24) + f"\n{count} of {total} taken\nfor the other"
            notes.append(Note(left, top + 0.2, text, 8, SOFT))
            for k, photo in enumerate([*(pair[f"right_{way}"] or [None]), *pair[f"wrong_{way}"]]):
                if photo is not None:
                    colour = COLOURS[1] if photo["wrong"] else COLOURS[0]
                    text = f"mistaken, {100 * photo['sure']:.0f} %" if photo["wrong"] else "recognised"
                    place = left + names + k * step + (0.12 if k else 0)
                    photos.append(Photo(place, top, side, photo["picture"], text, colour, photo["wrong"]))
            top += line
    columns = min(2, len(shown))
    return sheet(2 * margin + columns * width - 0.2, 2 * margin - 0.2 + -(-len(shown) // 2) * height, photos, notes)
