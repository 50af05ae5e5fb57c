"""The parts drawn on their images, with the crops beside, to see what a model looks at."""

import io
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semaug.figures.drawing import COLOURS
from semaug.p2p.alignment import reordered
from semaug.p2p.proposals import crop_parts, padding

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

GAP = 6


def parts_picture(images: Tensor, boxes: Tensor, order: Tensor, side: int = 224) -> "Image":
    """One row per image: the image with its numbered parts, then each part by itself, in canonical order.

    `images` (N, 3, H, W) are uint8, as they look; `boxes` (N, P, 4) and `order` (N, P) come from a model's outputs. An
    image is drawn within its padding's inner half, in which nearly all parts lie; a part has one colour in all rows.
    """
    from PIL import Image, ImageDraw

    count, parts = order.shape
    height, width = images.shape[2:]
    ordered = reordered(boxes, order).cpu()
    shown = images.cpu()
    crops = crop_parts(shown.float(), ordered, side).round().clamp(0, 255).to(torch.uint8)
    pad = padding(height, width)
    margin, scale = pad / 2, side / (min(height, width) + pad)
    page = Image.new("RGB", (parts * (side + GAP) + side + 2 * GAP, count * (side + GAP) + GAP), "white")
    for row in range(count):
        top = GAP + row * (side + GAP)
        size = (round(width * scale), round(height * scale))
        tile = Image.new("RGB", (side, side), "#d9dce1")
        tile.paste(_pillow(shown[row]).resize(size), (round(margin * scale), round(margin * scale)))
        draw = ImageDraw.Draw(tile)
        for part in range(parts):
            box = [(float(edge) - pad + margin) * scale for edge in ordered[row, part]]
            _frame(draw, box, part)
        page.paste(tile, (GAP, top))
        for part in range(parts):
            crop = _pillow(crops[row, part])
            _frame(ImageDraw.Draw(crop), [1, 1, side - 2, side - 2], part)
            page.paste(crop, (2 * GAP + side + part * (side + GAP), top))
    return page


def png(picture: "Image") -> bytes:
    """A picture as the bytes of a PNG file."""
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def _pillow(image: Tensor) -> "Image":
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _frame(draw: "ImageDraw", box: list[float], part: int) -> None:
    colour = COLOURS[part % len(COLOURS)]
    left, top = max(box[0], 0), max(box[1] - 13, 0)  # the number stands above the part, which may be small
    draw.rectangle(box, outline=colour, width=2)
    draw.rectangle([left, top, left + 11, top + 13], fill=colour)
    draw.text((left + 3, top + 1), str(part + 1), fill="white")
