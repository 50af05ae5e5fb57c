"""Image-level augmentation: RandAugment and Random Erasing against torchvision's, and the table of methods."""

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from semaug.data import augmentation
from semaug.data.augmentation import (
    IMAGE_TRANSFORMS,
    PLAIN,
    RAND_AUGMENT,
    ImageTransforms,
    _rectangles,
    rand_augment,
    random_erasing,
)

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
    changed = operation(batch, sign * augmentation.LEVEL)
    expected = torch.stack([theirs(image, name, sign) for image in batch])
    torch.testing.assert_close(changed, expected, rtol=0, atol=1)  # torchvision's levels are in fp32
    assert (changed != expected).double().mean() < 0.01


def test_each_image_has_its_own_two_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is changed as image by image with the same random numbers."""
    batch = images(40)
    before = batch.clone()
    draws: list[torch.Tensor] = []
    randint, rand = torch.randint, torch.rand

    def recorded(values: torch.Tensor) -> torch.Tensor:
        draws.append(values)
        return values

    monkeypatch.setattr(torch, "randint", lambda *args, **options: recorded(randint(*args, **options)))
    monkeypatch.setattr(torch, "rand", lambda *args, **options: recorded(rand(*args, **options)))
    torch.manual_seed(3)
    changed = rand_augment(batch)
    monkeypatch.undo()
    assert torch.equal(batch, before)
    assert len(draws) == 4
    for i, image in enumerate(batch):
        expected = image
        for drawn, sign in ((draws[0], draws[1]), (draws[2], draws[3])):
            operation, signed = list(RAND_AUGMENT.values())[int(drawn[i])]
            expected = operation(expected, -augmentation.LEVEL if signed and sign[i] <= 0.5 else augmentation.LEVEL)
        torch.testing.assert_close(changed[i], expected, rtol=0, atol=0)
    assert len({int(number) for number in draws[0]}) > 8  # not the same operation for all


def test_rectangles_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    count, height, width = 6000, 32, 24
    ours = _rectangles(count, height, width).double()
    transform = v2.RandomErasing(p=0.5)
    drawn_by_torchvision = []
    for _ in range(count):
        erased = torch.rand(()) < 0.5
        drawn = transform.make_params([torch.zeros(3, height, width)]) if erased else {"v": None}
        drawn_by_torchvision.append([drawn[key] for key in "ijhw"] if drawn["v"] is not None else [0] * 4)
    reference = torch.tensor(drawn_by_torchvision, dtype=torch.float64).T
    ours_erased, reference_erased = ours[2] > 0, reference[2] > 0
    assert abs(float(ours_erased.double().mean() - reference_erased.double().mean())) < 0.03
    for mine, other in zip(ours[:, ours_erased].numpy(), reference[:, reference_erased].numpy(), strict=True):
        values = np.arange(33)
        gap = np.abs((mine[:, None] <= values).mean(0) - (other[:, None] <= values).mean(0)).max()
        assert gap < 1.9 * np.sqrt(2 / 3000)  # Kolmogorov-Smirnov, about one in a thousand


def test_a_rectangle_is_erased_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.tensor([[3, 0], [5, 0], [4, 0], [7, 0]])  # the second image stays
    monkeypatch.setattr(augmentation, "_rectangles", lambda *_: drawn)
    batch = torch.ones(2, 3, 20, 30)
    changed = random_erasing(batch)
    expected = batch.clone()
    expected[0, :, 3:7, 5:12] = 0
    assert torch.equal(changed, expected)


def test_rectangles_are_inside_and_fit_tiny_images() -> None:
    for height, width in ((3, 3), (2, 40), (8, 8)):
        top, left, high, wide = _rectangles(500, height, width)
        assert (top >= 0).all()
        assert (left >= 0).all()
        assert (top + high <= height).all()
        assert (left + wide <= width).all()


@pytest.mark.parametrize("change", [rand_augment, random_erasing])
def test_rows_of_a_batch_change_as_they_do_in_the_whole_batch(change: Any) -> None:
    batch = torch.randint(256, (24, 3, 20, 16), dtype=torch.uint8)
    batch = batch if change is rand_augment else batch.double()
    rows = torch.tensor([3, 4, 5, 20, 21])
    torch.manual_seed(5)
    whole = change(batch)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(change(batch[rows], rows, 24), whole[rows])
    assert torch.equal(torch.rand(1), after)  # the same number of random numbers is drawn
    assert not torch.equal(whole[rows], batch[rows])


def test_plain_transforms_change_nothing() -> None:
    assert PLAIN.is_plain
    assert ImageTransforms().is_plain
    assert not any(make(3).is_plain for make in IMAGE_TRANSFORMS.values())


@pytest.mark.parametrize("name", IMAGE_TRANSFORMS)
def test_each_method_follows_the_calling_convention(name: str) -> None:
    transforms = IMAGE_TRANSFORMS[name](6)
    crops, labels = images(6, 16, 16), torch.arange(6)
    rows = torch.arange(6)
    changed = crops if transforms.on_crops is None else transforms.on_crops(crops, rows, 6)
    assert changed.dtype == torch.uint8
    normalised = changed.float() / 255 + 1  # no value is 0, as erased pixels are
    if transforms.on_images is not None:
        normalised = transforms.on_images(normalised, rows, 6)
    assert normalised.shape == crops.shape
    if transforms.on_batch is not None:
        normalised, soft = transforms.on_batch(normalised, labels)
        weight = soft[0, 0]  # image i is mixed with image i - 1
        expected = torch.nn.functional.one_hot(labels, 6) * weight
        expected += torch.nn.functional.one_hot(labels.roll(1), 6) * (1 - weight)
        torch.testing.assert_close(soft, expected, rtol=0, atol=1e-6)
    assert not torch.equal(normalised, crops.float() / 255 + 1)
