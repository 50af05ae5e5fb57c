"""Copies of photos across splits, in other sizes, formats and brightness, found by features."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from photos import photo_folder
from semaug.cli.main import main
from semaug.data import near_duplicates as module
from semaug.data.near_duplicates import grey_thumbnails, near_duplicates
from semaug.data.readers import read_data
from semaug.inference.embedding import embed_images, open_features
from semaug.util.errors import ModelError


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, and in the test split four altered copies of training photos."""
    folder = photo_folder(tmp_path_factory.mktemp("photos"), species=3, train=5, test=3, size=64)
    files = sorted((folder / "train").rglob("*.png"))
    changes = {
        "small": lambda image: image.resize((40, 50)),
        "mirrored": ImageOps.mirror,
        "dark": lambda image: image.point(lambda value: value * 2 // 3),
        "jpeg": lambda image: image,
    }
    for file, (name, change) in zip(files[::3], changes.items(), strict=False):
        with Image.open(file) as image:
            change(image).save(folder / "test" / file.parent.name / f"{name}-{file.stem}.jpg", quality=40)
    (folder / "test" / files[0].parent.name / "broken.png").write_bytes(b"no image")
    return folder


def copies(pairs: tuple[module.NearDuplicate, ...]) -> set[str]:
    """Kinds of copies that were paired with their originals."""
    found = set()
    for pair in pairs:
        kind, _, original = Path(pair.second.name).stem.partition("-")
        if Path(pair.first.name).stem == original and pair.first.class_name == pair.second.class_name:
            found.add(kind)
    return found


def test_thumbnails_find_altered_copies_and_nothing_else(leaky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_data(str(leaky))
    pairs = near_duplicates(data, grey_thumbnails, 0.98)
    assert copies(pairs[:4]) == {"small", "mirrored", "dark", "jpeg"}
    assert [pair.similarity for pair in pairs] == sorted((pair.similarity for pair in pairs), reverse=True)
    assert all((pair.first.split, pair.second.split) == ("train", "test") for pair in pairs)
    monkeypatch.setattr(module, "_BLOCK", 2)  # as if there were many images
    assert near_duplicates(data, grey_thumbnails, 0.98) == pairs
    monkeypatch.setattr(module, "LISTED", 2)
    assert near_duplicates(data, grey_thumbnails, 0.98) == pairs[:2]


def test_similarities_are_those_of_all_pairs(leaky: Path) -> None:
    data = read_data(str(leaky))
    vectors = {split: np.stack(list(grey_thumbnails(samples))) for split, samples in data.splits.items()}
    values = np.max([vectors["train"][:, 0] @ vectors["test"][:, k].T for k in (0, 1)], 0)
    pairs = near_duplicates(data, grey_thumbnails, 0.5)
    assert len(pairs) == int((values >= 0.5).sum())
    assert [pair.similarity for pair in pairs[:5]] == pytest.approx(np.sort(values.ravel())[::-1][:5], abs=1e-4)


def test_a_single_split_is_compared_with_itself(leaky: Path) -> None:
    data = read_data(str(leaky / "train"))
    assert list(data.splits) == ["train"]
    pairs = near_duplicates(data, grey_thumbnails, -1.0)
    count = len(data.splits["train"])
    assert len(pairs) == count * (count - 1) // 2


def test_features_of_a_network_find_them_too(leaky: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from semaug.network.models import SmallNet

    torch.manual_seed(0)
    save_file(SmallNet(1000).state_dict(), leaky / "small.safetensors")
    network, preprocessing = open_features("small", leaky / "small.safetensors")
    data = read_data(str(leaky))
    features = list(embed_images(network, preprocessing, data.splits["test"]))
    lengths = [float(np.linalg.norm(vector)) for vector in features]
    assert len(features) == len(data.splits["test"])
    assert lengths.count(0.0) == 1  # the file that is no image
    assert sorted(lengths)[1:] == pytest.approx([1.0] * (len(lengths) - 1), abs=1e-5)
    pairs = near_duplicates(data, partial(embed_images, network, preprocessing), 0.0)
    assert "jpeg" in copies(pairs[:6])
    with pytest.raises(ModelError, match="there is no weights file"):
        open_features("small", leaky / "none.safetensors")


def test_the_check_lists_pairs(leaky: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["--near-duplicates", "pixels", "--similarity", "0.98", "--workers", "0", "--json", str(report)]
    assert main(["data", "check", str(leaky), *options]) == 0
    out = capsys.readouterr().out
    stored = json.loads(report.read_text())["near_duplicates"]
    assert f"! {len(stored)} pairs of images look alike" in out
    assert out.count("  test: ") >= 4
    assert {"first", "second", "similarity"} == set(stored[0])
    assert main(["data", "check", str(leaky), "--near-duplicates", "pixels", "--similarity", "2"]) == 2
    assert "--similarity must be from -1 to 1" in capsys.readouterr().err
