"""The parts that a P2P-Net looks at, drawn on its images."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.inference.classifier import load_classifier
from semaug.inference.pictures import data_uri
from semaug.p2p.alignment import reordered
from semaug.p2p.model import P2PNet
from semaug.p2p.proposals import crop_parts, padding
from semaug.report.figures.drawing import COLOURS
from semaug.report.figures.figure import Figure, fragment
from semaug.report.figures.looking import look, run_samples
from semaug.util.errors import SemaugError

GAP = 6


def parts(
    run: Path,
    samples: Samples | None = None,
    *,
    images: int = 8,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """The parts that the P2P-Net of a run picks in some images, in canonical order, with each part by itself.

    The images are drawn by `seed` from what the run was evaluated on.

    Numbers: `files`, `boxes` (image by image, in pixels of the image as the network sees it) and `scores`, both in
    canonical order; `distance`, how far the middle of a part lies from that of the image on average, in image sides;
    `side`, the mean side of a part, likewise.
    """
    if images < 1:
        raise SemaugError(f"need at least 1 image, not {images}")
    classifier = load_classifier(run, device)
    if not isinstance(classifier.model, P2PNet):
        raise SemaugError(f"{run} was trained by {classifier.config.get('method')}; only the p2p methods have parts")
    samples = run_samples(classifier) if samples is None else samples
    seen: list[Tensor] = []
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.inference_mode()
    def see(pixels: Tensor) -> Tensor:
        model = classifier.model
        assert isinstance(model, P2PNet)
        outputs = model.outputs(classifier.preprocessing.evaluation_input(pixels.to(device)))
        found.append((outputs.boxes.cpu(), outputs.order.cpu(), outputs.scores.float().cpu()))
        seen.append(classifier.preprocessing.evaluation_crops(pixels))
        return outputs.logits.float().cpu()

    chosen = np.random.default_rng(seed).permutation(len(samples))[:images].tolist()
    looked = look(samples, chosen, classifier, {"run": see}, progress=progress)
    boxes, order, scores = (torch.cat(column) for column in zip(*found, strict=True))
    shown = torch.cat(seen)
    picture = parts_picture(shown, boxes, order)
    count, side = order.shape[1], min(shown.shape[2:])
    ordered = reordered(boxes, order) - padding(*shown.shape[2:])
    middle = (ordered[..., :2] + ordered[..., 2:]) / 2 / side - 0.5
    sizes = (ordered[..., 2:] - ordered[..., :2]).mean() / side
    numbers = {
        "files": list(looked.names),
        "boxes": ordered.round().int().tolist(),
        "scores": scores.gather(1, order).tolist(),
        "distance": float(middle.norm(dim=-1).mean()),
        "side": float(sizes),
        "seed": seed,
    }
    caption = (
        f"The {count} parts that P2P-Net picks in {len(shown)} images, which were drawn at random. Left the image with "
        "its parts as numbered frames (grey: beyond its edge), then each part by itself, as the network sees it. "
        "Number and colour are the place in the canonical order; the more a column shows one part of the bodies, the "
        "better it was learned. "
        f"A part's side is {float(sizes):.2f} of the image's on average."
    )
    html = fragment("parts.html", uri=data_uri(picture, quality=85), names=looked.names)
    return Figure("parts", "The parts of P2P-Net", caption, numbers, png(picture), None, html)


def parts_picture(images: Tensor, boxes: Tensor, order: Tensor, side: int = 224) -> Image.Image:
    """One row per image: the image with its numbered parts, then each part by itself, in canonical order.

    `images` (N, 3, H, W) are uint8, as they look; `boxes` (N, P, 4) and `order` (N, P) come from a model's outputs. An
    image is drawn within its padding's inner half, in which nearly all parts lie; a part has one colour in all rows.
    """
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


def png(picture: Image.Image) -> bytes:
    """A picture as the bytes of a PNG file."""
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def _pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _frame(draw: ImageDraw.ImageDraw, box: list[float], part: int) -> None:
    colour = COLOURS[part % len(COLOURS)]
    left, top = max(box[0], 0), max(box[1] - 13, 0)  # the number stands above the part, which may be small
    draw.rectangle(box, outline=colour, width=2)
    draw.rectangle([left, top, left + 11, top + 13], fill=colour)
    draw.text((left + 3, top + 1), str(part + 1), fill="white")
