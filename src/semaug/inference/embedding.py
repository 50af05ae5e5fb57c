"""Features of images, computed by a network, to compare images by content."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from semaug.data.images import NORMALIZATIONS, Preprocessing, pixels_or_reason
from semaug.data.samples import Samples
from semaug.inference.classifier import load_classifier
from semaug.inference.loop import decode_batches, run_batches
from semaug.network.models import build_model, load_weights
from semaug.network.network import Network
from semaug.network.pretrained import pixel_statistics
from semaug.util.errors import ModelError

_BATCH, _SIDE = 64, 224


def open_features(name: str, weights: Path | None = None, device: str = "cpu") -> tuple[Network, Preprocessing]:
    """Open a network for features.

    Args:
        name: A run directory or exported folder; or the name of a model, with pretrained weights.
        weights: File of the model's weights. Default: those of its library, which are downloaded.
        device: Where the network runs.

    Returns:
        The network, in evaluation mode, and how images become its inputs.

    Raises:
        SemaugError: There is no such run or model, or the weights do not fit.
    """
    if Path(name).is_dir():
        classifier = load_classifier(Path(name), device)
        model, preprocessing = classifier.model, classifier.preprocessing
    else:
        model = build_model(name, 1000, _SIDE, weights is None)
        statistics = pixel_statistics(name) or NORMALIZATIONS["imagenet"]
        preprocessing = Preprocessing(_SIDE, _SIDE, mean=statistics[0], std=statistics[1])
        if weights is not None:
            load_weights(model, weights)
    try:
        return Network(model.to(device).to(memory_format=torch.channels_last).eval()), preprocessing
    except ValueError as error:
        raise ModelError(str(error)) from error


def embed_images(
    network: Network, preprocessing: Preprocessing, samples: Samples, device: str = "cpu"
) -> Iterator[npt.NDArray[np.float32]]:
    """Compute features of length 1, (1, D) for each image in order; 0 for images that cannot be read.

    Args:
        network: The network, in evaluation mode.
        preprocessing: How images become its inputs.
        samples: The images.
        device: Where the network is.
    """
    for batch in decode_batches(partial(pixels_or_reason, samples, preprocessing), range(len(samples)), _BATCH):
        pixels = [image for image in batch if not isinstance(image, str)]
        features = iter(())
        if pixels:
            stacked = torch.from_numpy(np.stack(pixels))
            [values] = run_batches(network.features, [stacked], preprocessing, device=device)
            features = iter((values / values.norm(dim=1, keepdim=True).clamp_min(1e-12)).numpy()[:, None])
        for image in batch:
            yield np.zeros((1, network.feature_dim), np.float32) if isinstance(image, str) else next(features)
