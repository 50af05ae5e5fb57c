"""RandAugment and Random Erasing against torchvision's."""

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from semaug.data import augmentation as image_level
from semaug.data.augmentation import RAND_AUGMENT, rand_augment, random_erasing, rectangles

THEIRS = {
    "identity": "Identity", "shear x": "ShearX", "shear y": "ShearY", "translate x": "TranslateX",
    "translate y": "TranslateY", "rotate": "Rotate", "brightness": "Brightness", "colour": "Color",
    "contrast": "Contrast", "sharpness": "Sharpness", "posterise": "Posterize", "solarise": "Solarize",
    "autocontrast": "AutoContrast", "equalise": "Equalize",
}  # fmt: skip


def images(count: int, height: int = 40, width: int = 56, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.rand(count, 3, 5, 7, generator=generator)
    large = torch.nn.functional.interpolate(smooth, (height, width), mode="bilinear")
    return (255 * large * torch.rand(count, 3, 1, 1, generator=generator)).to(torch.uint8)


def theirs(image: torch.Tensor, name: str, sign: int) -> torch.Tensor:
    transform = v2.RandAugment()
    magnitudes, _ = transform._AUGMENTATION_SPACE[THEIRS[name]]
    values = magnitudes(transform.num_magnitude_bins, *image.shape[-2:])
    magnitude = 0.0 if values is None else sign * float(values[transform.magnitude])
    return transform._apply_image_or_video_transform(
        image, THEIRS[name], magnitude, interpolation=transform.interpolation, fill=transform._fill
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", RAND_AUGMENT)
def test_each_operation_is_torchvisions(name: str, sign: int) -> None:
    assert set(THEIRS.values()) == set(v2.RandAugment._AUGMENTATION_SPACE)
    operation, signed = RAND_AUGMENT[name]
    assert signed == v2.RandAugment._AUGMENTATION_SPACE[THEIRS[name]][1]
    if sign < 0 and not signed:
        return
    batch = images(5)
    changed = operation(batch, sign * image_level.LEVEL)
    expected = torch.stack([theirs(image, name, sign) for image in batch])
    torch.testing.assert_close(changed, expected, rtol=0, atol=1)  # torchvision's levels are in fp32
    assert (changed != expected).double().mean() < 0.01


def test_each_image_has_two_operations_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch as it would be image by image with the same draws."""
    batch = images(40)
    before = batch.clone()
    draws: list[torch.Tensor] = []
    randint, rand = torch.randint, torch.rand

    def noted(values: torch.Tensor) -> torch.Tensor:
        draws.append(values)
        return values

    monkeypatch.setattr(torch, "randint", lambda *args, **options: noted(randint(*args, **options)))
    monkeypatch.setattr(torch, "rand", lambda *args, **options: noted(rand(*args, **options)))
    torch.manual_seed(3)
    changed = rand_augment(batch)
    monkeypatch.undo()
    assert torch.equal(batch, before)
    assert len(draws) == 4
    for i, image in enumerate(batch):
        expected = image
        for drawn, sign in ((draws[0], draws[1]), (draws[2], draws[3])):
            operation, signed = list(RAND_AUGMENT.values())[int(drawn[i])]
            expected = operation(expected, -image_level.LEVEL if signed and sign[i] <= 0.5 else image_level.LEVEL)
        torch.testing.assert_close(changed[i], expected, rtol=0, atol=0)
    assert len({int(number) for number in draws[0]}) > 8  # not one operation for all


def test_rectangles_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    count, height, width = 6000, 32, 24
    ours = rectangles(count, height, width).double()
    transform = v2.RandomErasing(p=0.5)
    found = []
    for _ in range(count):
        erased = torch.rand(()) < 0.5
        drawn = transform.make_params([torch.zeros(3, height, width)]) if erased else {"v": None}
        found.append([drawn["i"], drawn["j"], drawn["h"], drawn["w"]] if drawn["v"] is not None else [0, 0, 0, 0])
    reference = torch.tensor(found, dtype=torch.float64).T
    ours_erased, reference_erased = ours[2] > 0, reference[2] > 0
    assert abs(float(ours_erased.double().mean() - reference_erased.double().mean())) < 0.03
    for mine, other in zip(ours[:, ours_erased].numpy(), reference[:, reference_erased].numpy(), strict=True):
        values = np.arange(33)
        gap = np.abs((mine[:, None] <= values).mean(0) - (other[:, None] <= values).mean(0)).max()
        assert gap < 1.9 * np.sqrt(2 / 3000)  # Kolmogorov-Smirnov, about one in a thousand


def test_a_rectangle_is_erased_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.tensor([[3, 0], [5, 0], [4, 0], [7, 0]])  # the second image stays
    monkeypatch.setattr(image_level, "rectangles", lambda *_: drawn)
    batch = torch.ones(2, 3, 20, 30)
    changed = random_erasing(batch)
    expected = batch.clone()
    expected[0, :, 3:7, 5:12] = 0
    assert torch.equal(changed, expected)


def test_rectangles_lie_inside_and_fit_tiny_images() -> None:
    for height, width in ((3, 3), (2, 40), (8, 8)):
        top, left, high, wide = rectangles(500, height, width)
        assert (top >= 0).all()
        assert (left >= 0).all()
        assert (top + high <= height).all()
        assert (left + wide <= width).all()


@pytest.mark.parametrize("change", [rand_augment, random_erasing])
def test_some_rows_of_a_batch_become_what_they_become_in_the_whole_of_it(change: Any) -> None:
    batch = torch.randint(256, (24, 3, 20, 16), dtype=torch.uint8)
    batch = batch if change is rand_augment else batch.double()
    rows = torch.tensor([3, 4, 5, 20, 21])
    torch.manual_seed(5)
    whole = change(batch)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(change(batch[rows], rows, 24), whole[rows])
    assert torch.equal(torch.rand(1), after)  # and as many numbers are drawn
    assert not torch.equal(whole[rows], batch[rows])
