"""Data sets in shards: nothing is lost or repeated, other programs can read them, and damage is reported."""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from photos import photo_folder
from semaug.cli.main import main
from semaug.data import shards
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import ImageFiles, embedded_birds
from semaug.data.shards import ShardedImages, read_shards, write_shards
from semaug.util.errors import DataError, SettingError


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


def test_the_command_line_packs_and_checks(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "packed"
    assert main(["data", "shards", str(photos), str(folder), "--per-shard", "10"]) == 0
    assert "27 images in 4 shards" in capsys.readouterr().out
    assert main(["data", "check", str(folder), "--workers", "0"]) == 0
    assert "changed since they were written" not in capsys.readouterr().out
    with open(folder / "train-000001.tar", "r+b") as file:
        file.seek(700)
        file.write(b"\0\1\2\3")
    assert main(["data", "check", str(folder), "--workers", "0"]) == 0
    assert "changed since they were written: train-000001.tar" in capsys.readouterr().out
    assert main(["data", "shards", str(photos), str(folder)]) == 2
    assert "already holds shards" in capsys.readouterr().err


def test_a_call_that_was_killed_is_resumed_with_the_same_result(photos: Path, packed: Path, tmp_path: Path) -> None:
    folder, write = tmp_path / "again", shards._write_shard

    def killed(file: Path, *rest: Any) -> None:
        if file.name == "train-000001.tar":
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, *rest)

    def child() -> None:
        shards._write_shard = killed
        write_shards(read_data(str(photos)), folder, 8)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [file.name for file in folder.glob("*.tar")] == ["train-000000.tar"]
    with pytest.raises(DataError, match="are incomplete; write them again to resume"):
        read_data(str(folder))
    with pytest.raises(SettingError, match="unfinished shards of other images"):
        write_shards(read_data(str(photos)), folder, per_shard=9)
    written = (folder / "train-000000.tar").stat().st_mtime_ns
    write_shards(read_data(str(photos)), folder, per_shard=8)
    assert (folder / "train-000000.tar").stat().st_mtime_ns == written
    for file in packed.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_folders_with_other_content_are_not_touched(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SettingError, match="is not empty"):
        write_shards(read_data(str(photos)), tmp_path)
    with pytest.raises(SettingError, match="at least one image"):
        write_shards(read_data(str(photos)), tmp_path / "new", per_shard=0)
    assert os.listdir(tmp_path) == ["mine.txt"]


# -------------------------------------------------------------------------------------------------------------- names


def chosen(data: Path) -> dict[str, set[str]]:
    """The names of the images in each split that a run sees."""
    splits = training_splits(read_data(str(data)), val_per_class=2)
    return {split: {samples.name(i) for i in range(len(samples))} for split, samples in splits.items()}


def test_validation_images_are_those_of_the_folder_and_no_tar_file_is_read(photos: Path, packed: Path) -> None:
    expected = chosen(photos)
    assert {split: len(names) for split, names in expected.items()} == {"train": 15, "val": 6, "test": 6}
    for file in packed.glob("*.tar"):
        size = file.stat().st_size
        file.unlink()
        file.touch()
        os.truncate(file, size)
    assert chosen(packed) == expected


# ------------------------------------------------------------------------------------------------------------- damage


def saved(content: "np.ndarray[Any, Any]", *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, content, allow_pickle=pickled)
    return file.getvalue()


def damaged_manifests(packed: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Manifests with a fault, and the message that each must lead to."""
    sound = json.loads((packed / shards.MANIFEST).read_text())
    outside, long = (json.loads((packed / shards.MANIFEST).read_text()) for _ in range(2))
    outside["splits"]["train"][0]["file"] = "../secret.tar"
    long["splits"]["train"][0]["file"] = "x" * 5000
    without_train = {split: entries for split, entries in sound["splits"].items() if split != "train"}
    return {
        "other version": ({**sound, "version": 7}, "has version 7"),
        "text as classes": ({**sound, "classes": "ab"}, "classes should be a list"),
        "no classes": ({**sound, "classes": []}, "shards.json is damaged"),
        "repeated classes": ({**sound, "classes": ["a", "a", "b"]}, "shards.json is damaged"),
        "empty entry": ({**sound, "splits": {"train": [{}]}}, "train.0 should be an object with bytes, file, images"),
        "number as splits": ({**sound, "splits": 3}, "splits should be an object"),
        "file outside": (outside, "shards.json is damaged"),
        "long name of a file": (long, "shards.json is damaged"),
        "no train": ({**sound, "splits": without_train}, "have no images in the split train"),
        "empty train": ({**sound, "splits": {"train": []}}, "have no images in the split train"),
        "empty val": ({**sound, "splits": {**sound["splits"], "val": []}}, "have no images in the split val"),
        "odd split": ({**sound, "splits": {**sound["splits"], "\x1b[2J": []}}, "shards.json is damaged"),
        "long class": ({**sound, "classes": ["a", "b", "c" * 2000]}, "shards.json is damaged"),
    }


def damaged_tables(packed: Path) -> dict[str, tuple[bytes, str]]:
    """Tables with a fault, and the message that each must lead to."""
    with open(packed / "train-000000.npy", "rb") as file:
        table, names = np.load(file), np.load(file)

    def with_value(place: tuple[int, int], value: int) -> bytes:
        changed = table.copy()
        changed[place] = value
        return saved(changed) + saved(names)

    archive, objects = io.BytesIO(), np.array([{"a": 1}], dtype=object)
    np.savez(archive, table)
    return {
        "empty": (b"", "cannot be read"),
        "huge shape": (saved(table).replace(b"6)", b"999999999999)", 1), "cannot be read"),
        "no header": (saved(table)[:8] + b"\x76\0" + b"(" * 118, "cannot be read"),
        "far offset": (with_value((0, 0), 10**12), "the table of the shard"),
        "large size": (with_value((1, 1), 10**9), "the table of the shard"),
        "unknown label": (with_value((2, 2), 3), "the table of the shard"),
        "label of another class": (with_value((2, 2), (int(table[2, 2]) + 1) % 3), "the table of the shard"),
        "other names": (saved(table) + saved(names ^ 1), "the table of the shard"),
        "negative offset": (with_value((0, 3), -1), "the table of the shard"),
        "pickled table": (saved(objects, pickled=True), "cannot be read"),
        "no names": (saved(table), "cannot be read"),
        "few names": (saved(table) + saved(names[:3]), "the table of the shard"),
        "names of another type": (saved(table) + saved(names.astype(np.int8)), "the table of the shard"),
        "names that are no array": (saved(table) + b"no array", "cannot be read"),
        "pickled names": (saved(table) + saved(objects, pickled=True), "cannot be read"),
        "zip archive": (archive.getvalue(), "cannot be read"),
    }


def test_damage_ends_in_one_sentence(packed: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(DataError) as caught:
            read_data(str(packed))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    sound = {file: file.read_bytes() for file in (packed / shards.MANIFEST, packed / "train-000000.npy")}
    manifest, table = sound
    for name, (content, expected) in damaged_manifests(packed).items():
        manifest.write_text(json.dumps(content))
        assert expected in refusal(), name
    manifest.write_bytes(sound[manifest])
    for name, (packed_table, expected) in damaged_tables(packed).items():
        table.write_bytes(packed_table)
        assert expected in refusal(), name
        if name in ("label of another class", "other names"):  # which the checksum alone shows
            continue
        signed = json.loads(sound[manifest])  # as by whoever made the table
        signed["splits"]["train"][0]["table"] = hashlib.sha256(packed_table).hexdigest()
        manifest.write_text(json.dumps(signed))
        assert expected in refusal(), name
        manifest.write_bytes(sound[manifest])
    table.write_bytes(sound[table])
    assert read_data(str(packed)).splits
    os.truncate(packed / "train-000000.tar", 3000)
    assert "is damaged: it has 3000 bytes instead of" in refusal()
    (packed / "train-000000.tar").unlink()
    assert "cannot be read" in refusal()


def test_a_damaged_image_is_named(photos: Path, packed: Path) -> None:
    samples = read_shards(packed).splits["train"]
    assert isinstance(samples, ShardedImages)
    with open(samples.files[0], "r+b") as file:
        file.seek(int(samples.table[0, 0]))
        file.write(b"\0" * 8)
    reason = "the shard train-000000.tar is damaged, or another one of the same size"
    with pytest.raises(DataError, match=f"^cannot read the image {samples.name(0)}: {reason}$"):
        samples.load(0)
    assert samples.name(0) in {read_data(str(photos)).splits["train"].name(i) for i in range(21)}


def test_two_shards_that_changed_places_are_noticed(tmp_path: Path) -> None:
    for i in range(8):
        file = tmp_path / "photos" / "train" / "ab"[i % 2] / f"{i}.bmp"  # all of one size
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * i, 0, 0)).save(file)
    write_shards(read_data(str(tmp_path / "photos")), tmp_path / "shards", per_shard=4)
    first, second = (tmp_path / "shards" / f"train-00000{i}.tar" for i in range(2))
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "other")
    second.rename(first)
    (tmp_path / "other").rename(second)
    samples = read_shards(tmp_path / "shards").splits["train"]
    for i in range(8):
        with pytest.raises(DataError, match=r"is damaged, or another one of the same size$"):
            samples.load(i)


def test_members_have_no_owner_and_no_date(packed: Path) -> None:
    with tarfile.open(packed / "train-000000.tar") as archive:
        assert {(member.uid, member.gid, member.mtime, member.uname) for member in archive} == {(0, 0, 0, "")}


def test_a_shard_that_leaves_the_cache_of_open_files_is_still_read(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if threads read more shards than are kept open."""
    samples = read_shards(packed).splits["train"]
    expected = [samples.name(i) for i in range(len(samples))]
    read = os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        shards._opened.cache_clear()
        return read(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert [samples.name(i) for i in range(len(samples))] == expected
