"""Anchors, the proposal network, selection and crops against plain per-image references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torchvision.ops import nms

from semaug.p2p.proposals import ProposalNet, anchors, crop_parts, select_parts


def by_hand(side, map_side):
    """The paper's anchors one at a time: by level, scale, ratio, row, column."""
    boxes, stride, size = [], side / map_side, map_side
    for level, (base, scales) in enumerate([(48, [1, 2]), (96, [1, 2]), (192, [0, 1, 2])]):
        if level:
            stride, size = min(2 * stride, side), (size + 1) // 2
        for third in scales:
            for ratio in (2 / 3, 1, 3 / 2):
                area = (base * 2 ** (third / 3) * side / 448) ** 2
                height = math.sqrt(area / ratio)
                width = area / height
                for row in range(size):
                    for column in range(size):
                        x, y = (column + 0.5) * stride + side // 2, (row + 0.5) * stride + side // 2
                        boxes.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    return torch.tensor(boxes).round()


@pytest.mark.parametrize(("side", "map_side"), [(448, 14), (64, 2), (96, 12), (32, 1)])
def test_anchors_equal_a_plain_loop(side, map_side):
    torch.testing.assert_close(anchors((side, side), (map_side, map_side)), by_hand(side, map_side))


def test_anchors_at_448_are_the_papers():
    boxes = anchors((448, 448), (14, 14))
    assert len(boxes) == 14 * 14 * 6 + 7 * 7 * 6 + 4 * 4 * 9
    assert boxes.min() >= 0
    assert boxes.max() <= 448 + 2 * 224
    size = 48 * 2 ** (1 / 3)
    wide, tall = size * math.sqrt(2 / 3), size / math.sqrt(2 / 3)
    first = [240 - wide / 2, 240 - tall / 2, 240 + wide / 2, 240 + tall / 2]
    assert boxes[0].tolist() == [round(edge) for edge in first]
    centres = (boxes[-16:, :2] + boxes[-16:, 2:]) / 2 - 224  # of the last ratio at the last level
    assert centres[:4, 0].sub(torch.tensor([64.0, 192, 320, 448])).abs().max() <= 0.5


@pytest.mark.parametrize(("image", "rows", "columns"), [((448, 448), 14, 14), ((96, 160), 3, 5), ((64, 64), 2, 2)])
def test_scores_are_in_the_order_of_the_anchors(image, rows, columns):
    network = ProposalNet(7, width=8)
    scores = network(torch.randn(2, 7, rows, columns))
    boxes = anchors(image, (rows, columns))
    assert scores.shape == (2, len(boxes))
    # A score map that grows to the right and downwards ranks its anchors by position.
    with torch.no_grad():
        for layer in network.down:
            layer.weight.zero_()
            layer.weight[:, :, 1, 1] = 1
            layer.bias.zero_()
        for layer in network.score:
            layer.weight.fill_(1)
            layer.bias.zero_()
        ramp = torch.zeros(1, 7, rows, columns) + torch.arange(columns) + 100 * torch.arange(rows)[:, None]
        scores = network(ramp)[0]
    first = scores[: 6 * rows * columns].view(6, -1)
    places = boxes[: 6 * rows * columns].view(6, -1, 4)
    for score, place in zip(first, places, strict=True):
        y_then_x = place[:, 1] * 10_000 + place[:, 0]
        assert torch.equal(score.argsort(), y_then_x.argsort())


def plain_nms(scores, boxes, count, threshold):
    """One image, one box at a time."""
    left = sorted(range(len(boxes)), key=lambda k: -scores[k])
    selected = []
    while left and len(selected) < count:
        best = left.pop(0)
        selected.append(best)
        x0, y0, x1, y1 = boxes[best]
        rest = []
        for k in left:
            u0, v0, u1, v1 = boxes[k]
            common = max(0, min(x1, u1) - max(x0, u0)) * max(0, min(y1, v1) - max(y0, v0))
            if common / ((x1 - x0) * (y1 - y0) + (u1 - u0) * (v1 - v0) - common) <= threshold:
                rest.append(k)
        left = rest
    return selected


@given(seed=st.integers(0, 10**6), side=st.sampled_from([(64, 2), (96, 6), (96, 12)]))
def test_selection_equals_a_plain_loop_and_torchvision(seed, side):
    boxes = anchors((side[0],) * 2, (side[1],) * 2)
    scores = torch.randn(3, len(boxes), generator=torch.Generator().manual_seed(seed))
    chosen = select_parts(scores, boxes, 4, 0.25)
    for image, indices in zip(scores, chosen, strict=True):
        assert indices.tolist() == plain_nms(image.tolist(), boxes.tolist(), 4, 0.25)
        assert indices.tolist() == nms(boxes, image, 0.25)[:4].tolist()


def test_the_number_of_parts_is_always_reached():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 9, 10], [50, 50, 60, 60], [0, 0, 9, 9]])
    scores = torch.tensor([[3.0, 5, 4, 1, 2], [1, 2, 3, 9, 8]])
    # The best of the overlapping ones, then the distant one, then the others by score.
    assert select_parts(scores, boxes, 4).tolist() == [[1, 3, 2, 0], [3, 4, 2, 1]]
    with pytest.raises(ValueError, match="cannot choose 6 parts among 5 anchors"):
        select_parts(scores, boxes, 6)


def test_crops_equal_padding_cutting_and_resizing_one_by_one():
    images = torch.randn(3, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    boxes = anchors((64, 64), (8, 8))
    chosen = boxes[torch.randint(len(boxes), (3, 4))]
    chosen[0, 0], chosen[0, 1] = boxes[0], boxes[-1]  # over the edge of the image
    crops = crop_parts(images, chosen, 32)
    assert crops.shape == (3, 4, 3, 32, 32)
    assert not crops.requires_grad
    padded = F.pad(images.detach(), (32, 32, 32, 32))
    for n in range(3):
        for p in range(4):
            x0, y0, x1, y1 = chosen[n, p].int().tolist()
            cut = padded[n : n + 1, :, y0:y1, x0:x1]
            expected = F.interpolate(cut, size=(32, 32), mode="bilinear", align_corners=True)[0]
            torch.testing.assert_close(crops[n, p], expected)


def test_crops_of_half_precision_images_are_at_the_same_positions():
    images = torch.randn(1, 3, 448, 448)
    boxes = anchors((448, 448), (14, 14))[None, [0, 700, 1500, 1613]]
    crops = crop_parts(images.bfloat16(), boxes, 224)
    torch.testing.assert_close(crops.float(), crop_parts(images, boxes, 224), atol=0.04, rtol=0.02)
