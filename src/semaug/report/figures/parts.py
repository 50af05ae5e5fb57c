"""The parts that a P2P-Net finds in its images."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from semaug.data.samples import Samples
from semaug.inference.classifier import load_classifier
from semaug.inference.pictures import data_uri
from semaug.p2p.alignment import reordered
from semaug.p2p.model import P2PNet
from semaug.p2p.proposals import crop_parts, padding
from semaug.report.canvas import COLOURS
from semaug.report.figures.figure import Figure, fragment
from semaug.report.figures.runs import compute_features, run_images
from semaug.util.errors import RunError, SettingError
from semaug.util.progress import ProgressCallback

GAP = 6  # pixels between pictures


def parts(
    run: Path,
    samples: Samples | None = None,
    *,
    images: int = 8,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Figure:
    """Draw the parts that the P2P-Net of a run finds in some images, in canonical order.

    Numbers: `files`; `boxes` of each image in pixels of the network's input, and `scores`, both in canonical order;
    `distance`, the mean distance of a part's centre from that of the image, and `side`, the mean side of a part, both
    relative to the side of the image.

    Args:
        run: Run directory.
        samples: Images; by default those that the run was evaluated on.
        images: Number of images, drawn at random.
        seed: Seed of the choice.
        device: Where to run the network.
        progress: Called with the numbers of finished and of all images.

    Raises:
        SemaugError: If the run has no P2P-Net.
    """
    if images < 1:
        raise SettingError(f"`images` must be at least 1, not {images}")
    classifier = load_classifier(run, device)
    model = classifier.model
    if not isinstance(model, P2PNet):
        raise RunError(f"{run} was trained by {classifier.config.get('method')}; only the p2p methods have parts")
    samples = run_images(classifier) if samples is None else samples
    crops: list[Tensor] = []
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.inference_mode()
    def compute(pixels: Tensor) -> Tensor:
        output = model.outputs(classifier.preprocessing.evaluation_input(pixels.to(device)))
        outputs.append((output.boxes.cpu(), output.order.cpu(), output.scores.float().cpu()))
        crops.append(classifier.preprocessing.evaluation_crops(pixels))
        return output.logits.float().cpu()

    chosen = np.random.default_rng(seed).permutation(len(samples))[:images].tolist()
    names = list(compute_features(samples, chosen, classifier, {"run": compute}, progress=progress).names)
    boxes, order, scores = (torch.cat(column) for column in zip(*outputs, strict=True))
    shown = torch.cat(crops)
    picture = parts_picture(shown, boxes, order)
    side = min(shown.shape[2:])
    ordered = reordered(boxes, order) - padding(*shown.shape[2:])
    centres = (ordered[..., :2] + ordered[..., 2:]) / 2 / side - 0.5
    sides = float((ordered[..., 2:] - ordered[..., :2]).mean() / side)
    numbers = {
        "files": names,
        "boxes": ordered.round().int().tolist(),
        "scores": scores.gather(1, order).tolist(),
        "distance": float(centres.norm(dim=-1).mean()),
        "side": sides,
        "seed": seed,
    }
    caption = (
        f"The {order.shape[1]} parts that P2P-Net picks in {len(shown)} images, drawn at random. On the left "
        "the image with its parts as numbered frames (grey: beyond its edge), then each part as the network sees it. "
        "Number and colour are the place in the canonical order; the more a column shows the same part of the bodies, "
        f"the better it was learned. A part's side is {sides:.2f} of the image's on average."
    )
    file = io.BytesIO()
    picture.save(file, "png")
    html = fragment("parts.html", uri=data_uri(picture, quality=85), names=names)
    return Figure("parts", "The parts of P2P-Net", caption, numbers, file.getvalue(), None, html)


def parts_picture(images: Tensor, boxes: Tensor, order: Tensor, side: int = 224) -> Image.Image:
    """Draw one row for each image: the image with its numbered parts, then each part in canonical order.

    Args:
        images: Images, uint8 (N, 3, H, W).
        boxes: Boxes of the parts (N, P, 4), in pixels of the padded image.
        order: Canonical order (N, P).
        side: Side of each picture.

    Returns:
        The picture; an image is drawn with half of its padding, which holds nearly all parts.
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
        tile = Image.new("RGB", (side, side), "#d9dce1")
        size = (round(width * scale), round(height * scale))
        tile.paste(_pillow(shown[row]).resize(size), (round(margin * scale), round(margin * scale)))
        for part in range(parts):
            _frame(tile, [(float(edge) - pad + margin) * scale for edge in ordered[row, part]], part)
            crop = _pillow(crops[row, part])
            _frame(crop, [1, 1, side - 2, side - 2], part)
            page.paste(crop, (2 * GAP + side + part * (side + GAP), top))
        page.paste(tile, (GAP, top))
    return page


def _pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _frame(image: Image.Image, box: list[float], part: int) -> None:
    draw, colour = ImageDraw.Draw(image), COLOURS[part % len(COLOURS)]
    left, top = max(box[0], 0), max(box[1] - 13, 0)  # the number is above the part, which may be small
    draw.rectangle(box, outline=colour, width=2)
    draw.rectangle([left, top, left + 11, top + 13], fill=colour)
    draw.text((left + 3, top + 1), str(part + 1), fill="white")
