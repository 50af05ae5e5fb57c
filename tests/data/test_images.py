"""Preprocessing, and the cache of decoded images."""

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
from semaug.util.errors import DataError, FileError


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
    with pytest.raises(FileError, match=r"^cannot write .*file/.*npy: .*; choose another `cache` folder, or None$"):
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
