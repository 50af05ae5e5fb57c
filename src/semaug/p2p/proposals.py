"""The parts of an image: anchors, a network that scores them, suppression of overlaps, and the crops.

All numbers are the paper's for images of 448 pixels and scale with the side of the image. Boxes are (left, top, right,
bottom) in whole pixels of the image *padded* by half its side (224 at 448), in which every anchor lies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_iou

SIDE = 448  # of the image for which the sizes below are given
RATIOS = (2 / 3, 1.0, 3 / 2)  # width over height


@dataclass(frozen=True)
class Level:
    """Anchors of one score map: its step relative to the map before, and the sizes of boxes at each place."""

    stride: int
    size: float
    scales: tuple[float, ...]

    @property
    def per_place(self) -> int:
        return len(self.scales) * len(RATIOS)


LEVELS = (
    Level(1, 48, (2 ** (1 / 3), 2 ** (2 / 3))),
    Level(2, 96, (2 ** (1 / 3), 2 ** (2 / 3))),
    Level(2, 192, (1.0, 2 ** (1 / 3), 2 ** (2 / 3))),
)


def padding(height: int, width: int) -> int:
    """How many zeros surround the image: half its side."""
    return min(height, width) // 2


def anchors(image_size: tuple[int, int], map_size: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """All boxes (A, 4) that :class:`ProposalNet` scores, in its order, for an image and its last feature map.

    The first level has a place per element of the feature map (32 pixels apart for a map of 14 × 14 at 448), each
    further level half as many per side, rounded up, twice as far apart; a map of one place has it in the middle.
    """
    (height, width), (rows, columns) = image_size, map_size
    pad, scale = padding(height, width), min(height, width) / SIDE
    step_down, step_right = height / rows, width / columns
    boxes = []
    for level in LEVELS:
        step_down, step_right = min(step_down * level.stride, height), min(step_right * level.stride, width)
        rows, columns = math.ceil(rows / level.stride), math.ceil(columns / level.stride)
        y = (torch.arange(rows, device=device, dtype=torch.float32) + 0.5) * step_down + pad
        x = (torch.arange(columns, device=device, dtype=torch.float32) + 0.5) * step_right + pad
        centres = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 2)
        for size in (scale * level.size * factor for factor in level.scales):
            for root in (math.sqrt(ratio) for ratio in RATIOS):
                left, top = centres[:, 0] - size * root / 2, centres[:, 1] - size / root / 2
                right, bottom = centres[:, 0] + size * root / 2, centres[:, 1] + size / root / 2
                boxes.append(torch.stack((left, top, right, bottom), 1))
    return torch.cat(boxes).round()


class ProposalNet(nn.Module):
    """Scores (N, A) of all anchors from the last feature map (N, D, rows, columns): one small map per level."""

    def __init__(self, channels: int, width: int = 128) -> None:
        super().__init__()
        inputs = (channels, *[width] * (len(LEVELS) - 1))
        self.down = nn.ModuleList(
            nn.Conv2d(before, width, 3, level.stride, 1) for before, level in zip(inputs, LEVELS, strict=True)
        )
        self.score = nn.ModuleList(nn.Conv2d(width, level.per_place, 1) for level in LEVELS)

    def forward(self, features: Tensor) -> Tensor:
        scores = []
        for down, score in zip(self.down, self.score, strict=True):
            features = F.relu(down(features))
            scores.append(score(features).flatten(1))  # by size and ratio, then by place, as the anchors are
        return torch.cat(scores, 1)


@torch.no_grad()
def select_parts(scores: Tensor, boxes: Tensor, count: int = 4, threshold: float = 0.25) -> Tensor:
    """Hard non-maximum suppression: indices (N, count) of the anchors chosen for each image, the best first.

    Each round takes the best anchor of every image and strikes out those that overlap it by more than the IoU
    `threshold`. That is what `torchvision.ops.nms` keeps first, but for all images at once, with `count` rounds
    instead of a pass over all pairs, and without making the host wait. There are always `count` parts: where all
    anchors are struck out, the best that is not yet chosen follows, whatever it overlaps.
    """
    if not 1 <= count <= len(boxes):
        raise ValueError(f"cannot choose {count} parts among {len(boxes)} anchors")
    struck = torch.zeros_like(scores, dtype=torch.bool)
    taken = struck.clone()
    chosen = []
    for _ in range(count):
        out = torch.where(struck.all(1, keepdim=True), taken, struck)
        best = scores.masked_fill(out, -torch.inf).argmax(1)
        chosen.append(best)
        taken = taken.scatter(1, best[:, None], True)
        struck = struck | taken | (box_iou(boxes[best], boxes) > threshold)
    return torch.stack(chosen, 1)


@torch.no_grad()
def crop_parts(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """The boxes (N, P, 4) cut from the padded images and resized to (N, P, channels, size, size), without a graph.

    Bilinear, corners on corners, as in the released code. Sampling outside the image gives 0, which is what padding
    with zeros would give, so no padded copy is made; one call serves all images and parts.
    """
    count, parts = boxes.shape[:2]
    channels, height, width = images.shape[1:]
    dtype = torch.promote_types(images.dtype, torch.float32)  # 16 bits cannot tell pixels apart
    corners = boxes.to(dtype) - padding(height, width)
    along = torch.linspace(0, 1, size, device=images.device, dtype=dtype)
    x = corners[..., 0, None] + along * (corners[..., 2, None] - corners[..., 0, None] - 1)  # (N, P, size)
    y = corners[..., 1, None] + along * (corners[..., 3, None] - corners[..., 1, None] - 1)
    x, y = (2 * x + 1) / width - 1, (2 * y + 1) / height - 1  # centres of pixels as grid_sample counts them
    grid = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), -1)  # (N, P, size, size, 2)
    crops = F.grid_sample(images.to(dtype), grid.view(count, parts * size, size, 2), align_corners=False)
    return crops.view(count, channels, parts, size, size).transpose(1, 2).to(images.dtype)
