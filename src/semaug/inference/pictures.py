"""Sample images with their predictions, small enough to be part of a report."""

import base64
import io
import random
from typing import Any

import numpy as np
import torch
from PIL import Image

from semaug.data.samples import Samples
from semaug.inference.classifier import Classifier
from semaug.inference.loop import decode_batches

SIDE = 128


def data_uri(image: Image.Image, quality: int = 85) -> str:
    """Encode an image as a JPEG, of a quality from 1 to 95, in a data URI."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def sample_pictures(
    classifier: Classifier, samples: Samples, seed: int = 0, wrong: int = 12, right: int = 12, tried: int = 512
) -> list[dict[str, Any]]:
    """Draw images at random, some with wrong and some with right predictions, for samples.json.

    Args:
        classifier: The classifier.
        samples: The split; its labels index the classifier's classes.
        seed: Seed of the random order.
        wrong: Number of wrong predictions.
        right: Number of right predictions.
        tried: Number of images to classify at most.

    Returns:
        The first wrong and then the first right predictions, each with its image as a data URI.
    """
    chosen = random.Random(seed).sample(range(len(samples)), min(tried, len(samples)))
    pictures: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    limits = {False: wrong, True: right}
    for batch in decode_batches(lambda i: (i, samples.load(i)), chosen, 32, workers=1):
        pixels = np.stack([classifier.preprocessing.pixels(image) for _, image in batch])
        probabilities, predicted = classifier.probabilities(torch.from_numpy(pixels)).max(1)
        for (i, image), label, probability in zip(batch, predicted.tolist(), probabilities.tolist(), strict=True):
            is_right = label == samples.labels[i]
            if len(pictures[is_right]) == limits[is_right]:
                continue
            image.thumbnail((SIDE, SIDE))
            row = {"image": data_uri(image), "name": samples.name(i), "true": classifier.classes[samples.labels[i]]}
            row |= {"predicted": classifier.classes[label], "probability": round(probability, 4)}
            pictures[is_right].append(row)
        if all(len(pictures[is_right]) == limits[is_right] for is_right in limits):
            break
    return pictures[False] + pictures[True]
