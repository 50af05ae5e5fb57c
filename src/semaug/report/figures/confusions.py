"""The most confused pairs of classes, with wrongly classified images."""

from pathlib import Path
from typing import Any

import numpy as np

from semaug.data.samples import Samples
from semaug.report.canvas import to_png
from semaug.report.figures.figure import Figure, fragment
from semaug.report.figures.photos import Photo, PhotoBlock, photo_grid
from semaug.report.figures.runs import choose_images, compute_features, open_runs, run_images
from semaug.util.errors import RunError, SettingError
from semaug.util.names import counted
from semaug.util.progress import ProgressCallback


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
    """Draw the pairs of classes that a run confuses most, with images of each that were classified as the other.

    Numbers: `pairs`, a list of {a, b, a_as_b, b_as_a, images_a, images_b}; `mistakes`, the number of all; `top1`.

    Args:
        run: Run directory.
        samples: Images, labelled by the run's classes; by default those that the run was evaluated on.
        pairs: Most pairs to show.
        images: Maximum number of wrong images of each class of a pair, beside a right one.
        limit: Most images to classify.
        seed: Seed of the choice of images.
        device: Where to run the network.
        progress: Called with the numbers of finished and of all images.

    Raises:
        SemaugError: If the run makes no mistake on these images.
    """
    if pairs < 1 or images < 1:
        raise SettingError(f"need at least 1 pair and 1 image, not {pairs} and {images}")
    [opened] = open_runs({"run": run}, device=device)
    classes = opened.classes
    samples = run_images(opened.classifier) if samples is None else samples
    indices = choose_images(samples, limit, seed)
    computed = compute_features(samples, indices, opened.classifier, {"run": opened.features}, 128, progress)
    probability, predicted = (part.numpy() for part in opened.logits(computed.features["run"]).softmax(1).max(1))
    true = computed.labels.numpy()
    counts = np.zeros((len(classes),) * 2, dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    mistakes = int((true != predicted).sum())
    if not mistakes:
        raise RunError(f"{run} makes no mistake on these {len(true)} images: there is no confused pair to show")
    both = np.triu(counts + counts.T, 1)
    order = np.argsort(-both, axis=None, kind="stable")[:pairs]
    shown = [(int(a), int(b)) for a, b in zip(*np.unravel_index(order, both.shape), strict=True) if both[a, b]]
    totals = counts.sum(1).tolist()
    numbers: dict[str, Any] = {
        "images": len(true),
        "mistakes": mistakes,
        "top1": 1 - mistakes / len(true),
        "seed": seed,
    }
    numbers["pairs"] = [
        {
            "a": classes[a], "b": classes[b], "a_as_b": int(counts[a, b]), "b_as_a": int(counts[b, a]),
            "images_a": totals[a], "images_b": totals[b],
        }
        for a, b in shown
    ]  # fmt: skip
    random = np.random.default_rng(seed)

    def photos(label: int, answer: int, most: int) -> list[Photo]:
        chosen = random.permutation(np.flatnonzero((true == label) & (predicted == answer)))[:most].tolist()
        texts = [f"wrong, {100 * probability[i]:.0f} %" if label != answer else "right" for i in chosen]
        return [
            Photo(computed.thumbnails[i], text, computed.names[i], label == answer)
            for i, text in zip(chosen, texts, strict=True)
        ]

    blocks = []
    for a, b in shown:
        right = {label: photos(label, label, 1) for label in (a, b)}
        rows = [
            (
                classes[label],
                f"{counts[label, other]} of {totals[label]} images classified as the other",
                [*right[label], *photos(label, other, images)],
            )
            for label, other in ((a, b), (b, a))
        ]
        blocks.append(PhotoBlock(f"{classes[a]} ↔ {classes[b]}", None, rows))
    first = numbers["pairs"][0]
    caption = (
        f"{counted(len(shown), 'pair')} of classes with the most confusions, of {counted(mistakes, 'mistake')} on "
        f"{counted(len(true), 'image')} "
        f"(top-1 {100 * numbers['top1']:.1f} %). First {first['a']} and {first['b']}: "
        f"{first['a_as_b']} of {first['images_a']} and {first['b_as_a']} of {first['images_b']} images are classified "
        "as the other. Solid blue frames: right, for comparison; dashed orange frames: wrong, with the "
        "probability of the wrong answer. Images are drawn at random."
    )
    html = fragment("photos.html", blocks=blocks, good="right", bad="wrong")
    return Figure("confusions", "Most confused classes", caption, numbers, to_png(photo_grid(blocks)), None, html)
