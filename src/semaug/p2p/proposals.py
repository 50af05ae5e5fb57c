"""The parts of an image: anchors, a network that scores them, selection without overlaps, and crops.

All sizes are the paper's for images of 448 pixels, scaled to the image. Boxes are (left, top, right, bottom) in whole
pixels of the image *padded* by half its side (224 at 448), so that every anchor is inside.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SIDE = 448  # of the image to which the sizes below refer
_RATIOS = (2 / 3, 1.0, 3 / 2)  # width over height


_LEVELS: tuple[tuple[int, int, tuple[float, ...]], ...] = (
    # of score maps: stride relative to the map before, size of the anchors, and its factors
    (1, 48, (2 ** (1 / 3), 2 ** (2 / 3))),
    (2, 96, (2 ** (1 / 3), 2 ** (2 / 3))),
    (2, 192, (1.0, 2 ** (1 / 3), 2 ** (2 / 3))),
)


def padding(height: int, width: int) -> int:
    """The width of the border of zeros around an image of `height` × `width`: half its smaller side."""
    return min(height, width) // 2


def anchors(image_size: tuple[int, int], map_size: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """All boxes (A, 4) that :class:`ProposalNet` scores, in its order, for an image and its last feature map.

    The first level has a position for each element of the feature map (32 pixels apart for a map of 14 × 14 at 448);
    each further level has half as many per side, rounded up, twice as far apart.
    """
    (height, width), (rows, columns) = image_size, map_size
    pad, scale = padding(height, width), min(height, width) / _SIDE
    step_down, step_right = height / rows, width / columns
    boxes = []
    for stride, base, factors in _LEVELS:
        step_down, step_right = min(step_down * stride, height), min(step_right * stride, width)
        rows, columns = math.ceil(rows / stride), math.ceil(columns / stride)
        y = (torch.arange(rows, device=device, dtype=torch.float32) + 0.5) * step_down + pad
        x = (torch.arange(columns, device=device, dtype=torch.float32) + 0.5) * step_right + pad
        centres = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 2)
        for size in (scale * base * factor for factor in factors):
            for root in (math.sqrt(ratio) for ratio in _RATIOS):
                left, top = centres[:, 0] - size * root / 2, centres[:, 1] - size / root / 2
                right, bottom = centres[:, 0] + size * root / 2, centres[:, 1] + size / root / 2
                boxes.append(torch.stack((left, top, right, bottom), 1))
    return torch.cat(boxes).round()


class ProposalNet(nn.Module):
    """Scores all anchors from the last feature map, with one small score map per level.

    Args:
        channels: Channels D of the feature map.
        width: Channels of the hidden layers.
    """

    def __init__(self, channels: int, width: int = 128) -> None:
        super().__init__()
        inputs = (channels, *[width] * (len(_LEVELS) - 1))
        self.down = nn.ModuleList(
            nn.Conv2d(before, width, 3, stride, 1) for before, (stride, *_) in zip(inputs, _LEVELS, strict=True)
        )
        self.score = nn.ModuleList(nn.Conv2d(width, len(factors) * len(_RATIOS), 1) for *_, factors in _LEVELS)

    def forward(self, features: Tensor) -> Tensor:
        """Scores (N, A) of all anchors from `features` (N, D, rows, columns)."""
        scores = []
        for down, score in zip(self.down, self.score, strict=True):
            features = F.relu(down(features))
            scores.append(score(features).flatten(1))  # by size and ratio, then by position, like the anchors
        return torch.cat(scores, 1)


@torch.no_grad()
def select_parts(scores: Tensor, boxes: Tensor, count: int = 4, threshold: float = 0.25) -> Tensor:
    """Select the best anchors of each image by hard non-maximum suppression.

    Each round takes the best anchor of every image and excludes those that overlap it. This selects the same as
    `torchvision.ops.nms`, but for all images together, in `count` rounds, and without a wait for the GPU. If all
    anchors are excluded, the best one that is not yet selected follows, so that there are always `count` parts.

    Args:
        scores: Scores (N, A).
        boxes: Anchors (A, 4).
        count: Number of parts.
        threshold: Largest IoU of two parts.

    Returns:
        Indices (N, count) of the anchors, best first.

    Raises:
        ValueError: There are fewer than `count` anchors.
    """
    from torchvision.ops import box_iou  # here, because torchvision takes a second to import

    if not 1 <= count <= len(boxes):
        raise ValueError(f"cannot choose {count} parts among {len(boxes)} anchors")
    excluded = torch.zeros_like(scores, dtype=torch.bool)
    selected = excluded.clone()
    rounds = []
    for _ in range(count):
        out = torch.where(excluded.all(1, keepdim=True), selected, excluded)
        best = scores.masked_fill(out, -torch.inf).argmax(1)
        rounds.append(best)
        selected = selected.scatter(1, best[:, None], True)
        excluded = excluded | selected | (box_iou(boxes[best], boxes) > threshold)
    return torch.stack(rounds, 1)


@torch.no_grad()
def crop_parts(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Cut boxes (N, P, 4) from padded images and resize them to (N, P, channels, size, size), without a graph.

    Bilinear with aligned corners, as in the released code. Sampling outside the image gives 0, like a padding with
    zeros, so no padded copy is made.
    """
    count, parts = boxes.shape[:2]
    channels, height, width = images.shape[1:]
    dtype = torch.promote_types(images.dtype, torch.float32)  # 16 bits cannot tell pixels apart
    corners = boxes.to(dtype) - padding(height, width)
    along = torch.linspace(0, 1, size, device=images.device, dtype=dtype)
    x = corners[..., 0, None] + along * (corners[..., 2, None] - corners[..., 0, None] - 1)  # (N, P, size)
    y = corners[..., 1, None] + along * (corners[..., 3, None] - corners[..., 1, None] - 1)
    x, y = (2 * x + 1) / width - 1, (2 * y + 1) / height - 1  # pixel centres in the coordinates of grid_sample
    grid = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), -1)  # (N, P, size, size, 2)
    crops = F.grid_sample(images.to(dtype), grid.view(count, parts * size, size, 2), align_corners=False)
    return crops.view(count, channels, parts, size, size).transpose(1, 2).to(images.dtype)
