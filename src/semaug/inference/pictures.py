"""Small pictures that are part of the file."""

import base64
import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from semaug.data.samples import Samples
from semaug.inference.runs import Classifier

SIDE = 128


def data_uri(image: Image.Image, quality: int = 85) -> str:
    """The picture as a JPEG inside its own address."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def sample_pictures(
    classifier: Classifier, samples: Samples, seed: int = 0, wrong: int = 12, right: int = 12, tried: int = 512
) -> list[dict[str, Any]]:
    """Pictures with what the classifier says of them, for samples.json: some that it gets wrong, then some right ones.

    They are drawn at random, not chosen: the first mistakes and the first correct ones among `tried` random images.
    """
    chosen = random.Random(seed).sample(range(len(samples)), min(tried, len(samples)))
    mistakes: list[dict[str, Any]] = []
    correct: list[dict[str, Any]] = []
    for start in range(0, len(chosen), 32):
        for row in _classified(classifier, samples, chosen[start : start + 32]):
            kept, limit = (correct, right) if row["true"] == row["predicted"] else (mistakes, wrong)
            if len(kept) < limit:
                image = row.pop("picture")
                image.thumbnail((SIDE, SIDE))
                kept.append({"image": data_uri(image), **row})
        if len(mistakes) == wrong and len(correct) == right:
            break
    return mistakes + correct


def _classified(classifier: Classifier, samples: Samples, indices: Sequence[int]) -> list[dict[str, Any]]:
    images = [samples.load(i) for i in indices]
    pixels = np.stack([classifier.preprocessing.pixels(image) for image in images])
    confidence, predicted = classifier.probabilities(torch.from_numpy(pixels)).max(1)
    return [
        {
            "picture": image,
            "name": samples.name(i),
            "true": classifier.classes[samples.labels[i]],
            "predicted": classifier.classes[int(answer)],
            "probability": round(float(sure), 4),
        }
        for i, image, answer, sure in zip(indices, images, predicted, confidence, strict=True)
    ]
