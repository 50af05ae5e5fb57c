"""Preprocessing, and the cache of decoded images."""

import errno
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional

from forks import Fork, hold_lock
from photos import photo_folder
from semaug.data import cache as cache_module
from semaug.data.cache import cache_file, decoded
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import Samples
from semaug.util import distributed
from semaug.util.errors import DataError, FileError, SettingError


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return read_data(str(photo_folder(tmp_path / "photos", train=4))).splits["train"]


def test_crops_are_windows_of_the_image_or_their_mirror_images() -> None:
    preprocessing = Preprocessing(12, 8)
    pixels = torch.randint(256, (40, 12, 12, 3), dtype=torch.uint8)
    crops = preprocessing.cropped(pixels, *preprocessing.draw_crops(40, torch.Generator().manual_seed(0)))
    corners, flips = set(), 0
    for image, crop in zip(pixels.permute(0, 3, 1, 2), crops, strict=True):
        matches = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(crop.flip(2) if mirrored else crop, image[:, top : top + 8, left : left + 8])
        ]
        assert len(matches) == 1
        corners.add(matches[0][:2])
        flips += matches[0][2]
    assert len(corners) > 12
    assert 10 < flips < 30


def test_evaluation_takes_the_normalised_centre() -> None:
    preprocessing = Preprocessing(12, 8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    pixels = torch.randint(256, (2, 12, 12, 3), dtype=torch.uint8)
    expected = (pixels.numpy()[:, 2:10, 2:10] / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.3, 0.4])
    inputs = preprocessing.evaluation_input(pixels)
    torch.testing.assert_close(inputs, torch.from_numpy(expected).permute(0, 3, 1, 2).float(), rtol=1e-5, atol=1e-5)


def test_squash_shows_the_whole_image_and_aspect_its_middle_square() -> None:
    image = Image.new("RGB", (90, 30), "black")
    image.paste("white", (30, 0, 60, 30))  # the middle square
    assert Preprocessing(30, 30, "aspect").pixels(image).min() > 200
    squashed = Preprocessing(30, 30, "squash").pixels(image)
    assert squashed[:, :8].max() < 50
    assert squashed[:, 13:17].min() > 200


def test_the_cache_gives_what_decoding_gives_and_decodes_once(samples: Samples, tmp_path: Path) -> None:
    preprocessing = Preprocessing(24, 20)
    steps: list[tuple[int, int]] = []
    fresh = decoded(samples, preprocessing, None)
    first = decoded(samples, preprocessing, tmp_path / "cache", workers=2, progress=lambda *n: steps.append(n))
    assert steps[-1] == (12, 12)
    steps.clear()
    again = decoded(samples, preprocessing, tmp_path / "cache", progress=lambda *n: steps.append(n))
    assert not steps
    assert torch.equal(first, fresh)
    assert torch.equal(again, fresh)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def flip(file: Path, start: int) -> None:
    """Change one bit of each byte from one on."""
    content = bytearray(file.read_bytes())
    content[start:] = (byte ^ 0x80 for byte in content[start:])
    file.write_bytes(content)


def test_a_damaged_cache_file_is_decoded_again(samples: Samples, tmp_path: Path) -> None:
    settings, cache = Preprocessing(24, 20), tmp_path / "cache"
    fresh = decoded(samples, settings, cache).clone()
    file = cache_file(samples, settings, cache)
    own = file.read_bytes()
    assert np.array_equal(np.load(file), fresh.numpy()), "NumPy ignores the checksum at its end"
    for damage in (
        lambda: flip(file, 5000),
        lambda: flip(file, len(own) - 5),
        lambda: os.truncate(file, 1000),
        lambda: file.write_bytes(b""),
    ):
        damage()
        with pytest.warns(UserWarning, match=f"^semaug: {file} was damaged; writing it again$"):
            assert torch.equal(decoded(samples, settings, cache), fresh)
        assert file.read_bytes() == own
        assert list(cache.iterdir()) == [file]


def test_under_torchrun_the_first_process_of_a_machine_checks_the_cache(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Preprocessing(24, 20)
    decoded(samples, settings, tmp_path / "cache")
    checked: list[Path] = []
    monkeypatch.setattr(cache_module, "is_intact", lambda file, *_: not checked.append(file))
    monkeypatch.setattr(distributed, "is_running", lambda: True)
    for local_rank, times in (("0", 1), ("1", 1)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        decoded(samples, settings, tmp_path / "cache")
        assert len(checked) == times


def test_a_changed_file_or_size_has_another_cache_file(samples: Samples, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = decoded(samples, Preprocessing(24, 20), cache).clone()
    decoded(samples, Preprocessing(28, 20), cache)
    decoded(samples, Preprocessing(24, 20, "aspect"), cache)
    assert len(list(cache.iterdir())) == 3
    file = tmp_path / "photos" / samples.name(0)
    Image.new("RGB", (40, 40), "red").save(file)
    os.utime(file, (1, 1))
    after = decoded(samples, Preprocessing(24, 20), cache)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1:], before[1:])


def test_other_images_of_the_same_names_sizes_and_dates_have_another_cache_file(tmp_path: Path) -> None:
    """As two versions of a data set from archives that set the dates of their files."""
    colours = []
    for colour in ("red", "blue"):
        for name in ("a", "b"):
            file = tmp_path / colour / name / "0.bmp"
            file.parent.mkdir(parents=True)
            Image.new("RGB", (8, 8), colour).save(file)
            os.utime(file, (1, 1))
        samples = read_data(str(tmp_path / colour)).splits["train"]
        colours.append(decoded(samples, Preprocessing(8, 8), tmp_path / "cache")[0, 0, 0].tolist())
    assert colours == [[255, 0, 0], [0, 0, 255]]


def test_a_damaged_image_leaves_no_partial_cache(samples: Samples, tmp_path: Path) -> None:
    damaged = tmp_path / "photos" / samples.name(5)
    damaged.write_bytes(b"not an image")
    with pytest.raises(DataError, match=f"1 of 12 images cannot be read: .*{damaged.name} \\(it is not an image"):
        decoded(samples, Preprocessing(24, 20), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_ends_in_one_sentence(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        assert length > len(samples) * 8 * 8 * 3
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"^cannot write to .*file: .*; choose another `cache` folder, or None$"):
        decoded(samples, Preprocessing(8, 8), tmp_path / "file")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileError, match="No space left on device; choose another `cache` folder"):
        decoded(samples, Preprocessing(8, 8), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_files_that_killed_processes_left_in_the_cache_are_removed(samples: Samples, tmp_path: Path) -> None:
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    settings, machine = Preprocessing(8, 8), re.sub("[^A-Za-z0-9]", "-", platform.node())
    stem = cache_file(samples, settings, tmp_path).stem
    kept = [f"{stem}.another-machine.{gone}.part", f"{stem}.{machine}.{os.getppid()}.part", f"x.{machine}.{gone}.part"]
    for name in (f"{stem}.{machine}.{gone}.part", f"{stem}.{machine}.{9**30}.part", *kept):
        (tmp_path / name).touch()
    decoded(samples, settings, tmp_path)
    assert {file.name for file in tmp_path.glob("*.part")} == set(kept)


def test_crops_may_reach_into_a_black_border() -> None:
    """The draws of torchvision's RandomCrop with padding: every place of the bordered image is equally likely."""
    preprocessing = Preprocessing(6, 5, padding=2)
    pixels = torch.randint(1, 256, (400, 6, 6, 3), dtype=torch.uint8)
    boxes, flipped = preprocessing.draw_crops(400, torch.Generator().manual_seed(0))
    crops = preprocessing.cropped(pixels, boxes, flipped)
    for image, box, mirrored, crop in zip(pixels, boxes.T.tolist(), flipped, crops, strict=True):
        expected = functional.crop(functional.pad(image.permute(2, 0, 1), [2]), *box, 5, 5)
        assert torch.equal(crop.flip(2) if mirrored else crop, expected)
    assert torch.bincount(boxes[0], minlength=6).min() > 40
    assert boxes.max() == 5


@pytest.mark.parametrize(("resize", "crop"), [(64, 56), (80, 24)])
def test_crops_of_random_size_equal_torchvisions_of_the_same_box(resize: int, crop: int) -> None:
    preprocessing = Preprocessing(resize, crop, crop_scale=0.08)
    pixels = torch.randint(256, (60, resize, resize, 3), dtype=torch.uint8)
    boxes, flipped = preprocessing.draw_crops(60, torch.Generator().manual_seed(0))
    crops = preprocessing.cropped(pixels, boxes, flipped)
    assert crops.shape == (60, 3, crop, crop)
    assert crops.dtype == torch.uint8
    largest = 0
    for image, box, mirrored, result in zip(pixels, boxes.T.tolist(), flipped, crops, strict=True):
        expected = functional.resized_crop(image.permute(2, 0, 1).float(), *box, [crop, crop], antialias=True)
        difference = (result.flip(2) if mirrored else result).float() - expected
        largest = max(largest, float(difference.abs().max()))
    print(f"largest difference to torchvision: {largest:.3f} of 255")
    assert largest < 0.51  # rounding to whole numbers


def test_boxes_of_random_size_have_the_distribution_of_random_resized_crop() -> None:
    boxes, _ = Preprocessing(256, 224, crop_scale=0.08).draw_crops(20000, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    image = torch.empty(3, 256, 256)
    theirs = torch.tensor([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(5000)])
    assert (boxes[:2] >= 0).all()
    assert (boxes[:2] + boxes[2:] <= 256).all()
    for name, of in {
        "area": lambda box: box[2] * box[3] / 256**2,
        "ratio": lambda box: (box[3] / box[2]).log(),
        "place": lambda box: (box[0] + box[2] / 2) / 256,
    }.items():
        mine, other = of(boxes.double()).numpy(), of(theirs.T.double()).numpy()
        distance = float(ks_2samp(mine, other).statistic)
        print(f"{name}: largest difference of the distributions {distance:.3f}")
        assert distance < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": -1}, "`padding` must be from 0 to 512, not -1"),
        ({"crop_scale": 0.0}, "`crop_scale` must be above 0 and at most 1, not 0"),
        ({"crop_scale": 1.5}, "`crop_scale` must be above 0 and at most 1, not 1.5"),
        ({"crop_scale": 0.5, "padding": 4}, "`padding` is for crops of a fixed size"),
    ],
)
def test_wrong_crops_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Preprocessing(12, 8, **options)


def test_of_several_processes_one_process_decodes_into_the_cache(samples: Samples, tmp_path: Path) -> None:
    """The file appears while this process waits for the other one, and is then used."""
    settings = Preprocessing(24, 20)
    decoded(samples, settings, tmp_path / "before")
    file, before = (cache_file(samples, settings, tmp_path / name) for name in ("cache", "before"))
    other = Fork(tmp_path / "log", hold_lock, file.parent, f"{file.stem}.lock", 1.0, before, file)
    other.wait_until(lambda: other.log.exists() and other.log.read_text() == "locked\n")
    steps: list[int] = []
    decoded(samples, settings, tmp_path / "cache", progress=lambda done, total: steps.append(done))
    assert other.wait()[0] == 0
    assert not steps, "nothing was decoded here"
    assert [found.name for found in (tmp_path / "cache").iterdir()] == [file.name]
