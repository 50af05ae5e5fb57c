"""Fine-tunes the last four blocks of MobileNetV2 at 128 px on a CPU, with basic training and ISDA at several strengths.

`python docs/last_blocks.py PHOTOS WEIGHTS SEED SETTING …` needs photos in one folder per class, ImageNet weights in
torchvision's names (safetensors), and settings: `basic`, λ0, `auto`, or "auto SHARE". The activations of the blocks
before, of six random crops and the centre of each photo at 150 px, are computed once and stored beside the photos. Six
photos of each class, drawn by the seed, are held out. A line of CSV is printed for each setting. The runs of
docs/results/last-blocks-runs.csv took about four minutes each on one core.
"""

import csv
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.nn import functional as F

import semaug

RESIZE, SIDE = 150, 128  # pixels of a photo's shorter side, and of a crop
VIEWS, FIRST = 6, 15  # random crops of each photo, the first block that is trained
EPOCHS, BATCH, RATE, DECAY = 10, 64, 0.03, 5e-4


def mobilenet(weights: Path) -> nn.Module:
    """The network with its ImageNet weights."""
    network = torchvision.models.mobilenet_v2()
    network.load_state_dict(load_file(weights))
    return network.to(memory_format=torch.channels_last)


def activations(photos: list[Path], weights: Path) -> np.ndarray:
    """The outputs of the blocks that are not trained, for the crops and the centre of each photo."""
    body = fuse(nn.Sequential(*mobilenet(weights).eval().features[:FIRST])).to(memory_format=torch.channels_last)
    random, results = np.random.default_rng(7), []
    mean, std = (torch.tensor(values)[:, None, None] for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.inference_mode():
        for photo in photos:
            image = Image.open(photo).convert("RGB")
            scale = RESIZE / min(image.size)
            size = [max(SIDE, round(length * scale)) for length in image.size]
            pixels = (
                torch.from_numpy(np.array(image.resize(size, Image.BILINEAR))).permute(2, 0, 1) / 255 - mean
            ) / std
            height, width = pixels.shape[1] - SIDE, pixels.shape[2] - SIDE
            crops = []
            for _ in range(VIEWS):
                top, left = random.integers(height + 1), random.integers(width + 1)
                crop = pixels[:, top : top + SIDE, left : left + SIDE]
                crops.append(crop.flip(2) if random.random() < 0.5 else crop)
            crops.append(pixels[:, height // 2 : height // 2 + SIDE, width // 2 : width // 2 + SIDE])
            results.append(body(torch.stack(crops).contiguous(memory_format=torch.channels_last)).half().numpy())
    return np.stack(results)


def train(stored: np.ndarray, labels: Tensor, weights: Path, seed: int, setting: str) -> list[str]:
    """Train with one setting; the accuracy of the last and the best epoch, training accuracy, loss and λ at the end."""
    classes, split = int(labels.max()) + 1, torch.Generator().manual_seed(1000 + seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(classes):
        photos = (labels == label).nonzero()[:, 0]
        held_out[photos[torch.randperm(len(photos), generator=split)[:6]]] = True
    training, validation = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]

    def inputs(photos: Tensor, views: Tensor | int) -> Tensor:
        values = torch.from_numpy(stored[photos.numpy(), views if isinstance(views, int) else views.numpy()])
        return values.float().contiguous(memory_format=torch.channels_last)

    torch.manual_seed(seed)
    blocks = mobilenet(weights).features[FIRST:]
    backbone = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
    head = nn.Linear(1280, classes)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)
    kind, _, share = setting.partition(" ")
    strength = kind if kind == "auto" else float(kind.replace("basic", "0"))
    criterion = semaug.ISDALoss(num_classes=classes, feature_dim=1280, strength=strength)
    if share:
        criterion.strength = semaug.AutoStrength(float(share))
    order, steps, best = torch.Generator().manual_seed(seed), len(training) // BATCH, 0.0
    for epoch in range(EPOCHS):
        backbone.train()
        photos = training[torch.randperm(len(training), generator=order)]
        views = torch.randint(VIEWS, (len(photos),), generator=order)
        loss_sum, right = 0.0, 0
        for step in range(steps):
            progress = (epoch * steps + step) / (EPOCHS * steps)
            optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * progress))
            batch = slice(step * BATCH, (step + 1) * BATCH)
            features, targets = backbone(inputs(photos[batch], views[batch])), labels[photos[batch]]
            criterion.set_progress(progress)
            augmented = setting != "basic"
            loss = criterion(features, targets, head) if augmented else F.cross_entropy(head(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
            with torch.no_grad():
                right += int((head(features).argmax(1) == targets).sum())
        backbone.eval()
        with torch.inference_mode():
            parts = validation.split(64)
            hits = sum(int((head(backbone(inputs(part, VIEWS))).argmax(1) == labels[part]).sum()) for part in parts)
        accuracy = 100 * hits / len(validation)
        best = max(best, accuracy)
    end = 0.0 if setting == "basic" else float(criterion.strength.value)
    ends = (accuracy, best, 100 * right / (steps * BATCH), loss_sum / steps, end)
    return [f"{value:.{digits}f}" for value, digits in zip(ends, (2, 2, 2, 4, 3), strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, weights, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    photos = [(photo, label) for label, name in enumerate(classes) for photo in sorted(name.iterdir())]
    file = folder.with_name(f"{folder.name}-{SIDE}px.npy")
    if not file.exists():
        np.save(file, activations([photo for photo, _ in photos], weights))
    stored, labels = np.load(file, mmap_mode="r"), torch.tensor([label for _, label in photos])
    for setting in sys.argv[4:]:
        csv.writer(sys.stdout).writerow([folder, seed, setting, *train(stored, labels, weights, seed, setting)])
