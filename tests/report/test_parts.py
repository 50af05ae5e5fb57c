"""The picture of the parts: each part's frame and crop in its colour, where its box is."""

import io

import torch
from PIL import Image

from semaug.report.canvas import COLOURS
from semaug.report.figures.parts import GAP, parts, parts_picture


def colour(number):
    return tuple(int(COLOURS[number][k : k + 2], 16) for k in (1, 3, 5))


def test_parts_are_drawn_in_canonical_order_and_colour():
    images = torch.full((2, 3, 64, 64), 255, dtype=torch.uint8)
    images[:, :, :32, :32] = 0
    boxes = torch.tensor([[32.0, 32, 64, 64], [64, 64, 96, 96], [64, 32, 96, 64], [32, 64, 64, 96]]).expand(2, 4, 4)
    order = torch.tensor([[0, 1, 2, 3], [1, 0, 2, 3]])
    picture = parts_picture(images, boxes, order, side=96)
    assert picture.size == (5 * 96 + 6 * GAP, 2 * 96 + 3 * GAP)
    # image and half its padding fill 96 pixels, so a pixel of the image is one of the tile; it begins at 16
    for row in range(2):
        top = GAP + row * (96 + GAP)
        for number in range(4):
            left, up = (int(edge) - 16 for edge in boxes[row, order[row, number], :2])
            assert picture.getpixel((GAP + left + 20, top + up + 1)) == colour(number)
            crop = (2 * GAP + 96 + number * (96 + GAP), top)
            assert picture.getpixel((crop[0] + 48, crop[1] + 1)) == colour(number)
            black = order[row, number] == 0
            assert picture.getpixel((crop[0] + 48, crop[1] + 48)) == ((0, 0, 0) if black else (255, 255, 255))


def test_numbers_are_those_of_the_run(runs, drawn):
    figure = drawn["parts"]
    assert parts(runs["p2p"], images=2) == figure
    assert len(figure.numbers["files"]) == len(figure.numbers["boxes"]) == 2
    assert all(len(boxes) == 4 for boxes in figure.numbers["boxes"])
    for left, top, right, bottom in [box for boxes in figure.numbers["boxes"] for box in boxes]:
        assert -16 <= left < right <= 48  # the image has 32 pixels and a padding of 16
        assert -16 <= top < bottom <= 48
    assert Image.open(io.BytesIO(figure.png)).height == 2 * (224 + GAP) + GAP
