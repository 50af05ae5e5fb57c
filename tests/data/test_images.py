"""Decode once, crop and flip later."""

import errno
import os
import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from photos import photo_folder
from semaug.data.images import Preprocessing, cache_file, decoded
from semaug.data.readers import read_data
from semaug.data.samples import Samples
from semaug.util.errors import SemaugError


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return read_data(str(photo_folder(tmp_path / "photos", train=4))).splits["train"]


def test_crops_are_windows_of_the_image_or_their_mirror_images() -> None:
    preprocessing = Preprocessing(12, 8)
    pixels = torch.randint(256, (40, 12, 12, 3), dtype=torch.uint8)
    crops = preprocessing.training_crops(pixels, torch.Generator().manual_seed(0))
    corners, flips = set(), 0
    for image, crop in zip(pixels.permute(0, 3, 1, 2), crops, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(crop.flip(2) if mirrored else crop, image[:, top : top + 8, left : left + 8])
        ]
        assert len(found) == 1
        corners.add(found[0][:2])
        flips += found[0][2]
    assert len(corners) > 12
    assert 10 < flips < 30


def test_evaluation_takes_the_normalised_centre() -> None:
    preprocessing = Preprocessing(12, 8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    pixels = torch.randint(256, (2, 12, 12, 3), dtype=torch.uint8)
    expected = (pixels.numpy()[:, 2:10, 2:10] / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.3, 0.4])
    inputs = preprocessing.evaluation_input(pixels)
    torch.testing.assert_close(inputs, torch.from_numpy(expected).permute(0, 3, 1, 2).float(), rtol=1e-5, atol=1e-5)


def test_squash_keeps_the_whole_image_and_aspect_its_middle_square() -> None:
    image = Image.new("RGB", (90, 30), "black")
    image.paste("white", (30, 0, 60, 30))  # the middle square
    assert Preprocessing(30, 30, "aspect").pixels(image).min() > 200
    squashed = Preprocessing(30, 30, "squash").pixels(image)
    assert squashed[:, :8].max() < 50
    assert squashed[:, 13:17].min() > 200


def test_the_cache_gives_what_decoding_gives_and_decodes_once(samples: Samples, tmp_path: Path) -> None:
    preprocessing = Preprocessing(24, 20)
    told: list[tuple[int, int]] = []
    fresh = decoded(samples, preprocessing, None)
    first = decoded(samples, preprocessing, tmp_path / "cache", workers=2, progress=lambda *n: told.append(n))
    assert told[-1] == (12, 12)
    told.clear()
    again = decoded(samples, preprocessing, tmp_path / "cache", progress=lambda *n: told.append(n))
    assert not told
    assert torch.equal(first, fresh)
    assert torch.equal(again, fresh)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_changed_file_or_size_makes_another_cache(samples: Samples, tmp_path: Path) -> None:
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


def test_a_broken_image_leaves_no_half_cache(samples: Samples, tmp_path: Path) -> None:
    broken = tmp_path / "photos" / samples.name(5)
    broken.write_bytes(b"not an image")
    with pytest.raises(SemaugError, match=f"1 of 12 images cannot be read: .*{broken.name} \\(it is not an image"):
        decoded(samples, Preprocessing(24, 20), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_is_told_in_one_sentence(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        assert length > len(samples) * 8 * 8 * 3
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").touch()
    with pytest.raises(SemaugError, match=r"^cannot write .*file/.*npy: .*; name another folder by --cache"):
        decoded(samples, Preprocessing(8, 8), tmp_path / "file")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SemaugError, match="No space left on device; name another folder by --cache, or --cache None"):
        decoded(samples, Preprocessing(8, 8), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_killed_processes_left_in_the_cache_is_removed(samples: Samples, tmp_path: Path) -> None:
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    settings, machine = Preprocessing(8, 8), re.sub("[^A-Za-z0-9]", "-", platform.node())
    stem = cache_file(samples, settings, tmp_path).stem
    kept = [f"{stem}.another-machine.{gone}.part", f"{stem}.{machine}.{os.getppid()}.part", f"x.{machine}.{gone}.part"]
    for name in (f"{stem}.{machine}.{gone}.part", f"{stem}.{machine}.{9**30}.part", *kept):
        (tmp_path / name).touch()
    decoded(samples, settings, tmp_path)
    assert {file.name for file in tmp_path.glob("*.part")} == set(kept)


def test_rotated_photos_are_righted(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "black")
    image.paste("white", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right to see it upright
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        image.save(tmp_path / "set" / name / "1.png", exif=exif)
    upright = read_data(str(tmp_path / "set")).splits["train"].load(0)
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5)) == (255, 255, 255)
