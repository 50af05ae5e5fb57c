"""Where the network looks: class-activation maps over photos."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from semaug.data.samples import Samples
from semaug.inference.classifier import load_classifier
from semaug.inference.loop import Pixels, decode_samples
from semaug.inference.pictures import class_overlays
from semaug.report.canvas import to_png
from semaug.report.figures.figure import Figure, fragment
from semaug.report.figures.photos import Photo, PhotoBlock, photo_grid
from semaug.report.figures.runs import choose_images, run_images
from semaug.util.errors import SettingError
from semaug.util.progress import ProgressCallback

_BATCH, _SIDE = 32, 160


def cam(
    run: Path,
    samples: Samples | None = None,
    *,
    images: int = 8,
    limit: int = 512,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Draw class-activation maps of the two most probable classes of some photos.

    Numbers: `images`, a list of {file, true, predicted, probability, second}, wrong answers first.

    Args:
        run: Run directory.
        samples: Images, labelled by the run's classes; by default those that the run was evaluated on.
        images: Number of images to show; up to half of them are wrong answers.
        limit: Most images to classify, to choose from.
        seed: Seed of the choice.
        device: Where to run the network.
        progress: Called with the numbers of finished and of all images.

    Raises:
        ModelError: If the network has no feature map.
    """
    if images < 1:
        raise SettingError(f"`images` must be at least 1, not {images}")
    classifier = load_classifier(run, device)
    names = classifier.classes
    samples = run_images(classifier) if samples is None else samples
    candidates = choose_images(samples, limit, seed)
    pixels: dict[int, torch.Tensor] = {}  # of the images that may be shown
    ranked: dict[int, tuple[list[int], list[float]]] = {}
    right, wrong, done = list[int](), list[int](), 0
    order = np.random.default_rng(seed).permutation(candidates).tolist()
    for batch in decode_samples(samples, order, classifier.preprocessing, _BATCH):
        top = classifier.probabilities(batch).topk(min(2, len(names)))
        for own, indices, values in zip(batch, top.indices.tolist(), top.values.tolist(), strict=True):
            i = order[done]
            done += 1
            group = right if indices[0] == samples.labels[i] else wrong
            if len(group) < images:
                group.append(i)
                pixels[i], ranked[i] = own.clone(), (indices, values)
        if progress is not None:
            progress(done, len(order))
    shown = wrong[: max(images // 2, images - len(right))]
    shown += right[: images - len(shown)]
    stacked = torch.stack([pixels[i] for i in shown])
    overlays = class_overlays(classifier, stacked, torch.tensor([ranked[i][0] for i in shown]))
    crops = classifier.preprocessing.evaluation_crops(stacked).permute(0, 2, 3, 1).numpy()
    blocks, listed = [], list[dict[str, Any]]()
    for k, i in enumerate(shown):
        labels, values = ranked[i]
        true, is_right, file = names[samples.labels[i]], labels[0] == samples.labels[i], samples.name(i)
        photos = [Photo(_small(crops[k]), "input", file)]
        for rank, (label, value) in enumerate(zip(labels, values, strict=True)):
            frame = is_right if rank == 0 else None
            photos.append(Photo(_small(overlays[k][rank]), f"{names[label]}, {100 * value:.0f}\u00a0%", file, frame))
        blocks.append(
            PhotoBlock("", None, [(true, "right" if is_right else f"classified as {names[labels[0]]}", photos)])
        )
        answer = {"predicted": classifier.classes[labels[0]], "probability": values[0]}
        second = {"second": classifier.classes[labels[1]]} if len(labels) > 1 else {}
        listed.append({"file": file, "true": classifier.classes[samples.labels[i]], **answer, **second})
    caption = (
        f"Class-activation maps of the two most probable classes of {len(shown)} images, drawn at random from "
        f"{len(order)}; wrong answers first. On the left is the crop that the network sees. The brighter a position, "
        "the more it adds to the logit of the class named below; evidence against the class is dark. Solid blue frame: "
        "the predicted class is right; dashed orange frame: it is wrong."
    )
    numbers = {"images": listed, "classified": len(order), "seed": seed}
    html = fragment("photos.html", blocks=blocks, good="right answer", bad="wrong answer")
    return Figure("cam", "Where the network looks", caption, numbers, to_png(photo_grid(blocks)), None, html)


def _small(picture: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(picture).resize((_SIDE, _SIDE), Image.Resampling.BOX))
