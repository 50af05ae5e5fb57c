"""Small images with predictions and class-activation maps, for a report."""

import base64
import io
import random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from semaug.data.samples import Samples
from semaug.inference.classifier import Classifier
from semaug.inference.loop import Pixels, decode_batches
from semaug.network.activation_maps import class_maps
from semaug.util.errors import ModelError

SIDE = 128
HEAT = ((0, 0, 0), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))
"""Colours of an overlay from no evidence to the most."""


def data_uri(image: Image.Image, quality: int = 85) -> str:
    """Encode an image as a JPEG, of a quality from 1 to 95, in a data URI."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def overlay(picture: Pixels, class_map: Tensor, most: float) -> Pixels:
    """Colour a photo, in grey, by how much each position adds to a class.

    Args:
        picture: The photo, uint8 (H, W, 3).
        class_map: A map (h, w) of :func:`semaug.network.activation_maps.class_maps`. Negative values count as 0.
        most: The value that gets the brightest colour.

    Returns:
        The coloured photo, uint8 (H, W, 3).
    """
    size = picture.shape[:2]
    heat = F.interpolate(class_map[None, None].float().clamp_min(0), size, mode="bilinear")[0, 0].numpy()
    heat = heat / max(most, np.finfo(heat.dtype).tiny)
    steps = np.linspace(0, 1, len(HEAT))
    colours = np.stack([np.interp(heat, steps, channel) for channel in zip(*HEAT, strict=True)], -1)
    mixed: Pixels = (0.5 * picture.mean(-1, keepdims=True) + 0.5 * colours).round().astype(np.uint8)
    return mixed


def class_overlays(classifier: Classifier, pixels: Tensor, labels: Tensor) -> list[list[Pixels]]:
    """Draw class-activation maps of some classes over the crop that the network sees, for each image.

    Args:
        classifier: The classifier.
        pixels: Images, uint8 (N, resize, resize, 3).
        labels: The classes to explain for each (N, K).

    Returns:
        For each image the crop with each of its K maps, uint8 (crop, crop, 3), in colours of one scale.

    Raises:
        ModelError: If the network has no feature map.
    """
    device = next((parameter.device for parameter in classifier.model.parameters()), torch.device("cpu"))
    inputs = classifier.preprocessing.evaluation_input(pixels.to(device))
    maps = torch.stack([class_maps(classifier.model, inputs, own) for own in labels.T], 1).cpu()
    crops = classifier.preprocessing.evaluation_crops(pixels).permute(0, 2, 3, 1).numpy()
    return [[overlay(crop, one, float(own.max())) for one in own] for crop, own in zip(crops, maps, strict=True)]


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
        The first wrong and then the first right predictions, each with its image as a data URI. The wrong ones also
        have a class-activation map of the predicted class, under "map", if the network has a feature map.
    """
    chosen = random.Random(seed).sample(range(len(samples)), min(tried, len(samples)))
    pictures: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    limits = {False: wrong, True: right}
    for batch in decode_batches(lambda i: (i, samples.load(i)), chosen, 32, workers=1):
        pixels = torch.from_numpy(np.stack([classifier.preprocessing.pixels(image) for _, image in batch]))
        probabilities, predicted = classifier.probabilities(pixels).max(1)
        for k, ((i, image), label, probability) in enumerate(
            zip(batch, predicted.tolist(), probabilities.tolist(), strict=True)
        ):
            is_right = label == samples.labels[i]
            if len(pictures[is_right]) == limits[is_right]:
                continue
            image.thumbnail((SIDE, SIDE))
            row = {"image": data_uri(image), "name": samples.name(i), "true": classifier.classes[samples.labels[i]]}
            row |= {"predicted": classifier.classes[label], "probability": round(probability, 4)}
            if not is_right:
                row |= _map_of(classifier, pixels[k : k + 1], predicted[k : k + 1])
            pictures[is_right].append(row)
        if all(len(pictures[is_right]) == limits[is_right] for is_right in limits):
            break
    return pictures[False] + pictures[True]


def _map_of(classifier: Classifier, pixels: Tensor, label: Tensor) -> dict[str, str]:
    try:
        [[drawn]] = class_overlays(classifier, pixels, label[:, None])
    except ModelError:  # of a network without a feature map
        return {}
    return {"map": data_uri(Image.fromarray(drawn).resize((SIDE, SIDE), Image.Resampling.BOX))}
