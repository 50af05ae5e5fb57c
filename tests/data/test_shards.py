"""Data sets in shards: nothing is lost or repeated, other programs can read them, and damage is told."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from photos import photo_folder
from semaug.cli.main import main
from semaug.data import shards
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import ImageFiles, embedded_birds
from semaug.data.shards import ShardedImages, read_shards, write_shards
from semaug.util.errors import SemaugError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=3, train=7, test=2, size=32)


@pytest.fixture
def packed(photos: Path, tmp_path: Path) -> Path:
    write_shards(read_data(str(photos)), tmp_path / "shards", per_shard=8)
    return tmp_path / "shards"


def test_shards_hold_the_same_images_labels_and_names(photos: Path, packed: Path) -> None:
    before, after = read_data(str(photos)), read_data(str(packed))
    assert after.classes == before.classes
    assert list(after.splits) == list(before.splits)
    for split, samples in before.splits.items():
        packed_samples = after.splits[split]
        places = {packed_samples.name(i): i for i in range(len(packed_samples))}
        assert len(places) == len(samples) == len(packed_samples)
        for i in range(len(samples)):
            place = places[samples.name(i)]
            assert packed_samples.labels[place] == samples.labels[i]
            assert np.array_equal(np.asarray(packed_samples.load(place)), np.asarray(samples.load(i)))
    assert sorted(file.name for file in packed.glob("*.tar")) == [
        "test-000000.tar", "train-000000.tar", "train-000001.tar", "train-000002.tar",
    ]  # fmt: skip
    assert not (packed / shards.UNFINISHED).exists()


def test_other_programs_can_read_them(photos: Path, packed: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    read = webdataset.WebDataset([str(file) for file in sorted(packed.glob("train-*.tar"))], shardshuffle=False)
    samples = read_data(str(photos)).splits["train"]
    assert isinstance(samples, ImageFiles)
    by_name = {samples.name(i): i for i in range(len(samples))}
    seen = set()
    for sample in read:
        i = by_name[sample["txt"].decode()]
        (image,) = (value for key, value in sample.items() if key in ("png", "jpg"))
        assert image == samples.files[i].read_bytes()
        assert int(sample["cls"]) == samples.labels[i]
        seen.add(i)
    assert len(seen) == len(samples)


def test_embedded_birds_are_written_as_png(tmp_path: Path) -> None:
    data = embedded_birds(num_species=2, train_per_species=3, test_per_species=1, size=32)
    assert write_shards(data, tmp_path / "birds", per_shard=4) == 3
    again = read_shards(tmp_path / "birds")
    for split, samples in data.splits.items():
        other = again.splits[split]
        drawn = {samples.name(i): np.asarray(samples.load(i)).tobytes() for i in range(len(samples))}
        assert {other.name(i): np.asarray(other.load(i)).tobytes() for i in range(len(other))} == drawn


def test_the_command_line_packs_checks_and_trains(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packed"
    assert main(["data", "shards", str(photos), str(folder), "--per-shard", "10"]) == 0
    assert "27 images in 4 shards" in capsys.readouterr().out
    assert main(["data", "check", str(folder), "--workers", "0"]) == 0
    assert "not what was written" not in capsys.readouterr().out
    options = (
        "--model small --pretrained False --epochs 1 --resize 32 --crop 24 --batch-size 4 --workers 0 --cache None"
    )
    for name, data in (("folder", photos), ("shards", folder)):
        output = tmp_path / name
        assert main(["train", "--data", str(data), "--output", str(output), "--method", "isda", *options.split()]) == 0
    assert (tmp_path / "shards" / "model.safetensors").is_file()
    capsys.readouterr()
    with open(folder / "train-000001.tar", "r+b") as file:
        file.seek(700)
        file.write(b"\0\1\2\3")
    assert main(["data", "check", str(folder), "--workers", "0"]) == 0
    assert "not what was written: train-000001.tar" in capsys.readouterr().out
    assert main(["data", "shards", str(photos), str(folder)]) == 2
    assert "holds shards already" in capsys.readouterr().err


def test_a_call_that_was_killed_goes_on_and_gives_the_same(photos: Path, packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    script = (
        "import os, signal, sys\nfrom semaug.data import shards\nfrom semaug.data.readers import read_data\n"
        "write = shards._write_shard\n"
        "def killed(file, *rest):\n"
        "    if file.name == 'train-000001.tar':\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(file, *rest)\n"
        "shards._write_shard = killed\nshards.write_shards(read_data(sys.argv[1]), shards.Path(sys.argv[2]), 8)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(photos), str(folder)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [file.name for file in folder.glob("*.tar")] == ["train-000000.tar"]
    with pytest.raises(SemaugError, match="are not complete; run the command that makes them again"):
        read_data(str(folder))
    with pytest.raises(SemaugError, match="the beginning of shards of other images"):
        write_shards(read_data(str(photos)), folder, per_shard=9)
    kept = (folder / "train-000000.tar").stat().st_mtime_ns
    write_shards(read_data(str(photos)), folder, per_shard=8)
    assert (folder / "train-000000.tar").stat().st_mtime_ns == kept
    for file in packed.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_folders_with_something_else_are_left_alone(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SemaugError, match="is not empty"):
        write_shards(read_data(str(photos)), tmp_path)
    with pytest.raises(SemaugError, match="at least one image"):
        write_shards(read_data(str(photos)), tmp_path / "new", per_shard=0)
    assert os.listdir(tmp_path) == ["mine.txt"]


# -------------------------------------------------------------------------------------------------------------- names


def chosen(data: Path) -> dict[str, set[str]]:
    """The names of the images in each split that a run sees."""
    splits = training_splits(read_data(str(data)), val_per_class=2)
    return {split: {samples.name(i) for i in range(len(samples))} for split, samples in splits.items()}


def without_names(folder: Path) -> Path:
    """Make tables as they were written before they held the names."""
    for file in folder.glob("*.npy"):
        np.save(file, np.load(file))
    return folder


def emptied(folder: Path) -> Path:
    """Put zeros in place of all that is in the tar files."""
    for file in folder.glob("*.tar"):
        size = file.stat().st_size
        file.unlink()
        file.touch()
        os.truncate(file, size)
    return folder


def test_validation_images_are_those_of_the_folder_and_no_tar_file_is_read(
    photos: Path, packed: Path, tmp_path: Path
) -> None:
    expected = chosen(photos)
    assert {split: len(names) for split, names in expected.items()} == {"train": 15, "val": 6, "test": 6}
    earlier = without_names(Path(shutil.copytree(packed, tmp_path / "earlier")))
    assert sum(file.stat().st_size for file in earlier.glob("*.npy")) < sum(
        file.stat().st_size for file in packed.glob("*.npy")
    )
    some = Path(shutil.copytree(packed, tmp_path / "some"))
    shutil.copy(earlier / "train-000001.npy", some)
    for folder in (packed, earlier, some):
        assert chosen(folder) == expected
    assert read_shards(earlier).splits["train"].fingerprint() == read_shards(packed).splits["train"].fingerprint()
    shards._opened.cache_clear()
    assert chosen(emptied(packed)) == expected
    assert chosen(emptied(earlier)) != expected


def test_images_of_earlier_shards_are_the_same(packed: Path, tmp_path: Path) -> None:
    now = read_shards(packed).splits["train"]
    earlier = read_shards(without_names(Path(shutil.copytree(packed, tmp_path / "earlier")))).splits["train"]
    assert [earlier.name(i) for i in range(21)] == [now.name(i) for i in range(21)]
    for i in range(21):
        assert np.array_equal(np.asarray(earlier.load(i)), np.asarray(now.load(i)))


# ------------------------------------------------------------------------------------------------------------- damage


def manifest(folder: Path, **changes: object) -> None:
    content = json.loads((folder / shards.MANIFEST).read_text())
    (folder / shards.MANIFEST).write_text(json.dumps({**content, **changes}))


def saved(content: "np.ndarray[Any, Any]", *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, content, allow_pickle=pickled)
    return file.getvalue()


def test_damage_is_told_in_one_sentence(packed: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> Path:
        return Path(shutil.copytree(packed, tmp_path / name))

    cases: list[tuple[Path, str]] = []
    folder = damaged("other version")
    manifest(folder, version=7)
    cases.append((folder, "is of version 7"))
    for place, changes in enumerate(
        ({"classes": "ab"}, {"classes": []}, {"classes": ["a", "a", "b"]}, {"splits": {"train": [{}]}}, {"splits": 3})
    ):
        folder = damaged(f"manifest {place}")
        manifest(folder, **changes)
        cases.append((folder, "shards.json is damaged"))
    folder = damaged("outside")
    content = json.loads((folder / shards.MANIFEST).read_text())
    content["splits"]["train"][0]["file"] = "../secret.tar"
    (folder / shards.MANIFEST).write_text(json.dumps(content))
    cases.append((folder, "is damaged"))
    folder = damaged("no train")
    content = json.loads((folder / shards.MANIFEST).read_text())
    del content["splits"]["train"]
    (folder / shards.MANIFEST).write_text(json.dumps(content))
    cases.append((folder, "have no split train"))
    folder = damaged("truncated")
    os.truncate(folder / "train-000000.tar", 3000)
    cases.append((folder, "has 3000 bytes and not"))
    folder = damaged("lost")
    (folder / "train-000000.tar").unlink()
    cases.append((folder, "cannot be read"))
    folder = damaged("table lost")
    (folder / "train-000000.npy").write_bytes(b"")
    cases.append((folder, "cannot be read"))
    table = np.load(packed / "train-000000.npy")
    for name, place, value in (
        ("far", (0, 0), 10**12),
        ("long", (1, 1), 10**9),
        ("label", (2, 2), 3),
        ("minus", (0, 3), -1),
    ):
        folder = damaged(name)
        changed = table.copy()
        changed[place] = value
        np.save(folder / "train-000000.npy", changed)
        cases.append((folder, "the table of the shard"))
    folder = damaged("pickle")
    np.save(folder / "train-000000.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    cases.append((folder, "cannot be read"))
    for name, behind, sentence in (
        ("names cut", saved(np.zeros(3, np.uint8)), "the table of the shard"),
        ("names of other kind", saved(np.zeros(int(table[:, 4].sum()), np.int8)), "the table of the shard"),
        ("something behind", b"no array", "cannot be read"),
        ("pickle behind", saved(np.array([{"a": 1}], dtype=object), pickled=True), "cannot be read"),
    ):
        folder = damaged(name)
        (folder / "train-000000.npy").write_bytes(saved(table) + behind)
        cases.append((folder, sentence))
    folder = damaged("archive")
    np.savez(folder / "train-000000", table)
    (folder / "train-000000.npz").replace(folder / "train-000000.npy")
    cases.append((folder, "cannot be read"))
    for folder, sentence in cases:
        with pytest.raises(SemaugError) as told:
            read_data(str(folder))
        assert sentence in str(told.value), folder.name
        assert "\n" not in str(told.value)


def test_an_image_that_is_damaged_inside_is_named(photos: Path, packed: Path) -> None:
    samples = read_shards(packed).splits["train"]
    assert isinstance(samples, ShardedImages)
    with open(samples.files[0], "r+b") as file:
        file.seek(int(samples.table[0, 0]))
        file.write(b"\0" * 8)
    reason = "it is not an image, or in a format that is not known"
    with pytest.raises(SemaugError, match=f"^cannot read the image {samples.name(0)}: {reason}$"):
        samples.load(0)
    assert samples.name(0) in {read_data(str(photos)).splits["train"].name(i) for i in range(21)}


def test_members_have_no_owner_and_no_date(packed: Path) -> None:
    with tarfile.open(packed / "train-000000.tar") as archive:
        assert {(member.uid, member.gid, member.mtime, member.uname) for member in archive} == {(0, 0, 0, "")}


def test_a_shard_that_leaves_the_cache_of_open_files_is_still_read(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it happens where threads read more shards than are kept open."""
    samples = read_shards(packed).splits["train"]
    expected = [samples.name(i) for i in range(len(samples))]
    read = os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        shards._opened.cache_clear()
        return read(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert [samples.name(i) for i in range(len(samples))] == expected
