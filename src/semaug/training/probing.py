"""Linear probes: the head of a network trained on cached features, by the same trainer as whole networks."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from semaug.data.cache import note_use, remove_damaged
from semaug.data.images import Preprocessing, to_device
from semaug.data.samples import Samples, Subset
from semaug.inference.loop import run_batches
from semaug.network.blocks import below, find_head
from semaug.network.network import Network
from semaug.training.batches import PixelLoader
from semaug.training.run_data import RunData, placed
from semaug.training.settings import TrainConfig
from semaug.util.errors import SettingError
from semaug.util.files import expanded, open_atomically
from semaug.util.locks import locked
from semaug.util.progress import Progress
from semaug.util.untrusted import add_checksum, map_array

VIEWS = 2  # of an image: the centre crop and its mirror image
BATCH = 64  # images on a GPU
CPU_BATCH = 8  # whose activations fit into the cache of a core: half the CPU time of 64
_VERSION = 2  # raised when the same network gives other features, or cache files change, so that old ones are not used


class Probe(nn.Module):
    """The head of a network, which maps features (N, D) to logits (N, C).

    Args:
        network: A classifier with a linear head. The probe shares the head with it; the rest is not part of the probe.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.head = find_head(network)[1]
        self._is_convolution = isinstance(self.head, nn.Conv2d)
        self._network = [network]  # in a list: no parameter of it is trained, or saved with the probe

    def forward(self, features: Tensor) -> Tensor:
        """Logits (N, C) of features (N, D)."""
        inputs = features[..., None, None] if self._is_convolution else features
        logits: Tensor = self.head(inputs)
        return logits.flatten(1)


def whole_network(model: nn.Module) -> nn.Module:
    """The network that a probe belongs to, with the probe's head; any other model itself."""
    return model._network[0] if isinstance(model, Probe) else model


@dataclass(frozen=True)
class FeatureViews(Preprocessing):
    """How cached features (N, views, D) become inputs of a probe, in place of pixels.

    Training draws the centre crop or its mirror image; evaluation takes the centre crop.
    """

    def draw_crops(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw which images to mirror; there are no boxes."""
        return torch.empty(0, count), torch.rand(count, generator=generator) < 0.5

    def cropped(self, pixels: Tensor, boxes: Tensor, flipped: Tensor) -> Tensor:
        """Take the drawn view of each image."""
        return pixels[torch.arange(len(pixels), device=pixels.device), to_device(flipped.long(), pixels.device)]

    def normalised(self, crops: Tensor) -> Tensor:
        """Features as they are."""
        return crops

    def evaluation_input(self, pixels: Tensor) -> Tensor:
        """The features of the centre crops."""
        return pixels[:, 0]


def with_features(
    config: TrainConfig, data: RunData, model: nn.Module, device: torch.device, progress: Progress
) -> RunData:
    """Replace the images of a run by their features, computed now or read from the cache.

    Training and validation images of one split of the data set share a file in the cache, whichever of them are held
    out.

    Args:
        config: Resolved settings of the run.
        data: Its data.
        model: Its network, which is left in evaluation mode.
        device: The device of the network.
        progress: Shows progress.

    Returns:
        The same data, with features (N, views, D) as images.

    Raises:
        DataError: An image cannot be read.
        FileError: The cache cannot be read or written.
        SettingError: The network has no single linear head.
    """
    train, val = data.splits["train"], data.splits["val"]
    views = FeatureViews(**vars(config.preprocessing))
    if isinstance(train, Subset) and isinstance(val, Subset) and train.whole is val.whole:
        indices = np.array(sorted({*train.indices, *val.indices}))
        features = _features(config, Subset(train.whole, indices.tolist()), model, device, progress)
        rows = [torch.from_numpy(np.searchsorted(indices, np.array(part.indices))) for part in (train, val)]
        parts = [features[own] for own in rows]
    else:
        parts = [_features(config, part, model, device, progress) for part in (train, val)]
    of_train, of_val = (placed(part, config, device) for part in parts)
    return replace(data, train=of_train, val=of_val, preprocessing=views)


def _features(
    config: TrainConfig, samples: Samples, model: nn.Module, device: torch.device, progress: Progress
) -> Tensor:
    """Features, fp32 (N, views, D), of all images of a split."""
    preprocessing = config.preprocessing
    try:
        network = Network(model.eval())
        network.prepare(torch.zeros(2, 3, preprocessing.crop, preprocessing.crop, device=device))
    except ValueError as error:  # no linear head
        raise SettingError(str(error)) from error
    shape = (len(samples), VIEWS, network.feature_dim)

    def views(images: Tensor) -> Tensor:
        return torch.stack([network.features(images), network.features(images.flip(-1))], 1)

    def compute() -> list[Tensor]:
        pixels = PixelLoader(preprocessing, device, config.workers).load(
            samples, torch.arange(len(samples)).split(BATCH if device.type == "cuda" else CPU_BATCH)
        )
        parts, done = [], 0
        with progress.task("computing features", len(samples)) as advance:
            for part in run_batches(views, pixels, preprocessing, device=device, autocast=config.autocast):
                parts.append(part)
                done += len(part)
                advance(done, len(samples))
        return parts

    if config.cache is None:
        return torch.cat(compute())
    cache = expanded(config.cache)
    file = cache / f"{_key(config, samples, model)}.npy"
    remove_damaged(file, shape, np.float32)
    # Of processes that need the same features, one computes them.
    with locked(cache, f"{file.stem}.lock", wait=True):
        if not file.exists():
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            parts = compute()
            with open_atomically(file, "wb+") as opened:
                np.lib.format.write_array_header_1_0(opened, header)
                opened.writelines(part.numpy().tobytes() for part in parts)
                add_checksum(opened)
        note_use(file, f"{config.data}, features of {config.model}")
    return torch.from_numpy(map_array(file, shape, np.float32))


def _key(config: TrainConfig, samples: Samples, model: nn.Module) -> str:
    """Name of the file in the cache; another one if an image, its preparation, or a weight of the network changes."""
    head, _ = find_head(model)
    weights = {name: value.cpu() for name, value in model.state_dict().items() if not below(name, head)}
    digest = hashlib.sha256(safetensors_bytes(weights))
    state = (_VERSION, config.model, config.precision, vars(config.preprocessing), samples.fingerprint())
    digest.update(repr(state).encode())
    return digest.hexdigest()[:32]
