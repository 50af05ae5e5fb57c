"""Data sets as `datasets` and webdataset write them: read like the photos that they were made of, or refused."""

import io
import json
import tarfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples, mutated, odd_json, outcome
from photos import photo_folder, quick_config
from semaug.cli.main import main
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import DataSet, ImageFiles
from semaug.data.shards import write_shards
from semaug.training.trainer import train
from semaug.util.errors import DataError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return read_data(str(photo_folder(tmp_path_factory.mktemp("photos"), species=3, train=5, test=2, size=32)))


def rows(data: DataSet, split: str) -> list[tuple[bytes, str, int]]:
    """Bytes, name and label of each image."""
    samples = data.splits[split]
    assert isinstance(samples, ImageFiles)
    return [(file.read_bytes(), file.name, label) for file, label in zip(samples.files, samples.labels, strict=True)]


def features(data: DataSet) -> dict[str, Any]:
    return {"image": {"_type": "Image"}, "label": {"names": list(data.classes), "_type": "ClassLabel"}}


def table(data: DataSet, split: str) -> pa.Table:
    """Images and labels in the types of `datasets`, with its description."""
    contents, names, labels = zip(*rows(data, split), strict=True)
    images = pa.StructArray.from_arrays([pa.array(contents, pa.binary()), pa.array(names)], ["bytes", "path"])
    described = {"huggingface": json.dumps({"info": {"features": features(data)}})}
    return pa.table({"image": images, "label": pa.array(labels)}).replace_schema_metadata(described)


def saved(data: DataSet, folder: Path) -> Path:
    """As by `DatasetDict.save_to_disk`."""
    for split in data.splits:
        part = folder / split
        part.mkdir(parents=True)
        whole = table(data, split)
        with pa.ipc.new_stream(str(part / "data-00000-of-00001.arrow"), whole.schema) as writer:
            writer.write_table(whole, max_chunksize=4)
        (part / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (part / "dataset_info.json").write_text(json.dumps({"features": features(data)}))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(data.splits)}))
    return folder


def on_the_hub(data: DataSet, folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    for split in data.splits:
        name = "validation" if split == "val" else split
        file = folder / "data" / f"{name}-00000-of-00001.parquet"
        pa.parquet.write_table(table(data, split), file, row_group_size=4)
    return folder


def with_metadata(data: DataSet, folder: Path, suffix: str = "jsonl") -> Path:
    for split in data.splits:
        (folder / split / "images").mkdir(parents=True)
        lines = []
        for i, (content, name, label) in enumerate(rows(data, split)):
            (folder / split / "images" / f"{i}-{name}").write_bytes(content)
            lines.append({"file_name": f"images/{i}-{name}", "label": data.classes[label]})
        text = "\n".join(map(json.dumps, lines))
        if suffix == "csv":
            text = "\n".join(["file_name,label", *(f"{line['file_name']},{line['label']}" for line in lines)])
        (folder / split / f"metadata.{suffix}").write_text(text)
    return folder


def in_tars(data: DataSet, folder: Path, kind: str = "cls") -> Path:
    """As by webdataset's own writer."""
    folder.mkdir()
    for split in data.splits:
        with webdataset.ShardWriter(str(folder / f"birds-{split}-%04d.tar"), maxcount=4, verbose=0) as writer:
            for i, (content, name, label) in enumerate(rows(data, split)):
                part = {"cls": label} if kind == "cls" else {"json": {"label": data.classes[label], "page": 3}}
                writer.write({"__key__": f"{name.split('.')[0]}-{i}", "png": content, **part})
    if kind == "cls":
        (folder / "classnames.txt").write_text("\n".join(data.classes))
    return folder


FORMS: dict[str, Callable[[DataSet, Path], Path]] = {
    "save_to_disk": saved,
    "parquet": on_the_hub,
    "metadata.jsonl": with_metadata,
    "metadata.csv": lambda data, folder: with_metadata(data, folder, "csv"),
    "webdataset .cls": in_tars,
    "webdataset .json": lambda data, folder: in_tars(data, folder, "json"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_images_and_labels(photos: DataSet, tmp_path: Path, form: str) -> None:
    data = read_data(str(FORMS[form](photos, tmp_path / "data")))
    assert data.classes == photos.classes
    assert list(data.splits) == list(photos.splits)
    for split, samples in photos.splits.items():
        other = data.splits[split]
        wanted = {(samples.load(i).tobytes(), samples.labels[i]) for i in range(len(samples))}
        assert {(other.load(i).tobytes(), other.labels[i]) for i in range(len(other))} == wanted
        assert len({other.name(i) for i in range(len(other))}) == len(other) == len(samples)
        assert other.fingerprint() == read_data(str(tmp_path / "data")).splits[split].fingerprint()


def test_files_whose_labels_are_numbered_differently(photos: DataSet, tmp_path: Path) -> None:
    reordered = DataSet(photos.name, photos.classes[::-1], photos.splits)
    for form in (saved, on_the_hub):
        folder = form(photos, tmp_path / form.__name__)
        # the same classes for the same images, under other numbers, as when each split is encoded for itself
        highest = len(photos.classes) - 1
        other = table(reordered, "test")
        numbers = pa.array([highest - label for label in other.column("label").to_pylist()])
        other = other.set_column(1, "label", numbers)
        if form is on_the_hub:
            pa.parquet.write_table(other, folder / "data" / "test-00000-of-00001.parquet")
        else:
            with pa.ipc.new_stream(str(folder / "test" / "data-00000-of-00001.arrow"), other.schema) as writer:
                writer.write_table(other)
            (folder / "test" / "dataset_info.json").write_text(json.dumps({"features": features(reordered)}))
        data = read_data(str(folder))
        for split, samples in photos.splits.items():
            classes = [data.classes[label] for label in data.splits[split].labels]
            assert classes == [photos.classes[label] for label in samples.labels]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_metadata_without_a_label_are_refused(photos: DataSet, tmp_path: Path, suffix: str) -> None:
    folder = with_metadata(photos, tmp_path / "data", suffix)
    file = folder / "train" / f"metadata.{suffix}"
    text = file.read_text()
    cut = text.rindex(photos.classes[-1])
    file.write_text(text[:cut] + text[cut + len(photos.classes[-1]) :])
    with pytest.raises(DataError, match="label"):
        read_data(str(folder))


@pytest.mark.parametrize("column", ["split", "set"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_metadata_may_name_the_splits(photos: DataSet, tmp_path: Path, suffix: str, column: str) -> None:
    """In one folder of images, which does not say anything about them."""
    images, listed = tmp_path / "data" / "images", list[dict[str, str]]()
    images.mkdir(parents=True)
    for split in photos.splits:
        for i, (content, _, label) in enumerate(rows(photos, split)):
            (images / f"{split[:2]}{i}.png").write_bytes(content)
            name = "Validation" if split == "val" else split
            listed.append({"file_name": f"images/{split[:2]}{i}.png", "label": photos.classes[label], column: name})

    def write(listed: list[dict[str, str]]) -> None:
        csv = [",".join(listed[0]), *(",".join(row.values()) for row in listed)]
        lines = csv if suffix == "csv" else list(map(json.dumps, listed))
        (images.parent / f"metadata.{suffix}").write_text("\n".join(lines))

    write(listed)
    data = read_data(str(images.parent))
    assert {name: len(samples) for name, samples in data.splits.items()} == {
        name: len(samples) for name, samples in photos.splits.items()
    }
    for split, samples in data.splits.items():
        assert samples.labels == photos.splits[split].labels
    for wrong, sentence in {
        "fold 3": r"line 1: the split 'fold 3' is not one of" if suffix == "jsonl" else r"line 2: the split 'fold 3'",
        "test": "is listed twice, in test and in train",
    }.items():
        write([{**listed[0], column: wrong}, *listed])
        with pytest.raises(DataError, match=sentence):
            read_data(str(images.parent))


def test_damaged_metadata_beside_class_folders_are_not_ignored(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", species=2, train=2, test=1, size=32)
    (folder / "metadata.csv").write_bytes("file_name,label\na.png,M\u00f6we\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"metadata.csv line 2: this is not UTF-8 text"):
        read_data(str(folder))


def test_training_and_packing_take_them(photos: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = on_the_hub(photos, tmp_path / "hub")
    run = train(quick_config(folder, tmp_path / "run", epochs=1, val_per_class=1, method="basic"))
    assert (run / "model.safetensors").is_file()
    assert main(["data", "check", str(folder), "--workers", "0"]) == 0
    assert "no problems found" in capsys.readouterr().out.replace("fewer than 5", "")
    write_shards(read_data(str(in_tars(photos, tmp_path / "tars"))), tmp_path / "packed")
    packed = read_data(str(tmp_path / "packed")).splits["train"]
    with tarfile.open(tmp_path / "packed" / "train-000000.tar") as archive:
        assert {Path(name).suffix for name in archive.getnames()} == {".png", ".cls", ".txt"}
    assert len(packed) == len(photos.splits["train"])


def test_a_single_parquet_file_and_a_test_split_without_labels(photos: DataSet, tmp_path: Path) -> None:
    folder = on_the_hub(photos, tmp_path / "hub")
    alone = read_data(str(folder / "data" / "train-00000-of-00001.parquet"))
    assert (alone.classes, list(alone.splits)) == (photos.classes, ["train"])
    hidden = table(photos, "test").set_column(1, "label", pa.array([-1] * len(photos.splits["test"])))
    pa.parquet.write_table(hidden, folder / "data" / "test-00000-of-00001.parquet")
    assert list(read_data(str(folder)).splits) == ["train"]


def test_class_folders_beside_other_tables_are_still_class_folders(photos: DataSet, tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", species=2, train=2, test=1, size=32)
    (folder / "metadata.csv").write_text("camera,lens\na,b\n")
    pa.parquet.write_table(pa.table({"path": ["a"], "label": ["b"]}), folder / "labels.parquet")
    assert len(read_data(str(folder)).classes) == 2


def member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    return info, io.BytesIO(content)


def tar_of(folder: Path, *members: tuple[tarfile.TarInfo, io.BytesIO]) -> Path:
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "train-0.tar", "w") as archive:
        for info, content in members:
            archive.addfile(info, content)
    return folder


def test_hostile_tar_files(photos: DataSet, tmp_path: Path) -> None:
    picture = rows(photos, "train")[0][0]
    bad = {
        "have no .cls": [member("a.png", picture)],
        "not one of the 1 named": [member("a.png", picture), member("a.cls", b"9" * 50)],
        "should be an object": [member("a.png", picture), member("a.json", b"[1]")],
        "more than 1048576 bytes": [member("a.png", picture), member("a.cls", bytes(2**20 + 1))],
    }
    for sentence, members in bad.items():
        folder = tar_of(tmp_path / "t", *members)
        (folder / "classnames.txt").write_text("a")
        with pytest.raises(DataError, match=sentence):
            read_data(str(folder))
    links = tarfile.TarInfo("b.png")
    links.type, links.linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tar_of(
        tmp_path / "l", (links, io.BytesIO()), member("b.cls", b"1"), member("a.png", picture), member("a.cls", b"0")
    )
    assert len(read_data(str(folder)).splits["train"]) == 1  # links are no images
    whole = (folder / "train-0.tar").read_bytes()
    for length in (600, 700, 1024, 1536, 2048, 3000):
        (folder / "train-0.tar").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"train-0.tar(: unexpected end of data| is damaged or cut off)"):
            read_data(str(folder))


def test_no_image_of_a_tar_file_is_lost_without_a_word(photos: DataSet, tmp_path: Path) -> None:
    (one, *_), (two, *_) = rows(photos, "train")[:2]

    def sound() -> list[tuple[tarfile.TarInfo, io.BytesIO]]:
        return [member("a.png", one), member("a.cls", b"0"), member("b.png", two), member("b.cls", b"1")]

    for name, (extra, sentence) in {
        "twice": ([member("a.png", two), member("a.cls", b"1")], "train-0.tar has two members 'a.png'"),
        "two images": ([member("a.jpg", two)], "two images with one key: 'a.png', 'a.jpg'"),
        "only parts": ([member("c.left.png", one), member("c.cls", b"1")], "1 images of .* have no .cls"),
        "other labels": (
            [member("c.png", one), member("c.json", b'{"label": "g"}')],
            "in several places: '.cls', 'label'; use one for all images",
        ),
    }.items():
        with pytest.raises(DataError, match=sentence):
            read_data(str(tar_of(tmp_path / name, *sound(), *extra)))
    dotted = [member("c.1.png", one), member("c.1.cls", b"0"), member("a.mask.png", two), member("a.boxes.json", b"[]")]
    other = [member("._a.png", b"x"), member("._a.cls", b"x"), member("d.heic", b"x"), member("d.cls", b"1")]
    other += [member("e.heic", b"x"), member("e.json", b'{"label": 1}')]
    folder = tar_of(tmp_path / "good", *sound(), *dotted, *other)
    (folder / "train-1.tgz").touch()
    data = read_data(str(folder))
    assert (list(data.splits["train"].labels), data.ignored) == ([0, 1, 0], {".heic": 2, ".tgz": 1})
    file = folder / "train-0.tar"
    file.write_bytes(2 * file.read_bytes())
    with pytest.raises(DataError, match="or another archive follows in it"):
        read_data(str(folder))


def test_a_blank_line_between_names_of_classes_is_refused(photos: DataSet, tmp_path: Path) -> None:
    """Labels after it would have the name of the next class."""
    folder = in_tars(photos, tmp_path / "tars")
    (folder / "classnames.txt").write_text("\n\n".join(photos.classes))
    with pytest.raises(DataError, match="classnames.txt line 3 follows a blank line"):
        read_data(str(folder))


def test_a_mask_and_a_group_of_classes_may_come_first(photos: DataSet, tmp_path: Path) -> None:
    whole = table(photos, "train")
    group, mask = pa.array([0] * len(whole)), whole.column("image").take(list(range(len(whole)))[::-1])
    columns = ("group", "label", "species", "category")
    names = {name: {"names": list(photos.classes), "_type": "ClassLabel"} for name in columns}
    described = {"huggingface": json.dumps({"info": {"features": names}})}
    for form, changed in {
        "named": whole.add_column(0, "group", group).add_column(0, "mask", mask),
        "unnamed": whole.rename_columns(["image", "species"]).append_column("category", group),
    }.items():
        (tmp_path / form).mkdir()
        pa.parquet.write_table(changed.replace_schema_metadata(described), tmp_path / form / "train.parquet")
        samples, expected = read_data(str(tmp_path / form)).splits["train"], photos.splits["train"]
        assert list(samples.labels) == list(expected.labels)
        assert [samples.load(i).tobytes() for i in range(3)] == [expected.load(i).tobytes() for i in range(3)]


def test_two_labels_never_become_one_class(photos: DataSet, tmp_path: Path) -> None:
    folder = in_tars(photos, tmp_path / "tars")
    (folder / "classnames.txt").write_text("crane\nowl\ncrane\n")
    with pytest.raises(DataError, match="two classes of .*classnames.txt have the same name: 'crane'"):
        read_data(str(folder))
    picture = rows(photos, "train")[0][0]
    latin = [
        member("a.png", picture),
        member("a.cls", b"M\xf6we"),
        member("b.png", picture),
        member("b.cls", b"M\xe4we"),
    ]
    with pytest.raises(DataError, match=r"'a.cls' is not UTF-8 text"):
        read_data(str(tar_of(tmp_path / "latin", *latin)))
    described = json.dumps({"info": {"features": {"label": {"names": ["crane", "crane"], "_type": "ClassLabel"}}}})
    whole = table(photos, "train").replace_schema_metadata({"huggingface": described})
    pa.parquet.write_table(whole, tmp_path / "train.parquet")
    with pytest.raises(DataError, match="train.parquet have the same name: 'crane'"):
        read_data(str(tmp_path / "train.parquet"))


@pytest.mark.parametrize("form", ["metadata.jsonl", "webdataset .json"])
def test_a_missing_label_is_not_taken_from_another_column(photos: DataSet, tmp_path: Path, form: str) -> None:
    picture = rows(photos, "train")[0][0]
    labels = [
        json.dumps({"file_name": f"{i}.png", "label": own, "category": "bird"}) for i, own in enumerate(["jay", None])
    ]
    if form == "metadata.jsonl":
        for i in range(2):
            (tmp_path / f"{i}.png").write_bytes(picture)
        (tmp_path / form).write_text("\n".join(labels))
    else:
        parts = [part for i in range(2) for part in ((f"{i}.png", picture), (f"{i}.json", labels[i].encode()))]
        tar_of(tmp_path, *(member(*part) for part in parts))
    with pytest.raises(DataError, match="line 2 has no file_name or no label|several places: 'category', 'label'"):
        read_data(str(tmp_path))


@pytest.mark.parametrize(
    ("label", "sentence"), [(float("nan"), "has no label"), ([1, 2], "is neither text nor a number")]
)
def test_cells_without_one_label_are_no_class(photos: DataSet, tmp_path: Path, label: Any, sentence: str) -> None:
    whole = table(photos, "train").replace_schema_metadata(None)
    values = [[float(i)] if isinstance(label, list) else float(i) for i in range(len(whole) - 1)] + [label]
    pa.parquet.write_table(whole.set_column(1, "label", pa.array(values)), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=sentence):
        read_data(str(tmp_path / "train.parquet"))


@pytest.mark.parametrize("kind", ["metadata", "tar", "parquet", "save_to_disk"])
def test_class_folders_beside_other_files_of_images_are_not_left_out(
    photos: DataSet, tmp_path: Path, kind: str
) -> None:
    folder = photo_folder(tmp_path / "photos", species=3, train=5, test=2, size=32)
    first = sorted(file.relative_to(folder / "train").as_posix() for file in (folder / "train").rglob("*.png"))
    if kind == "metadata":
        some = [f"{name},{Path(name).parent.name}" for name in first if not name.endswith("/0.png")]
        (folder / "train" / "metadata.csv").write_text("\n".join(["file_name,label", *some]))
    elif kind == "tar":
        in_tars(photos, tmp_path / "tars", "json")
        (tmp_path / "tars" / "birds-train-0000.tar").rename(folder / "train" / "sample.tar")
    elif kind == "parquet":
        pa.parquet.write_table(table(photos, "train"), folder / "train.parquet")
    else:
        saved(DataSet("x", photos.classes, {"train": photos.splits["train"]}), tmp_path / "saved")
        for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
            (tmp_path / "saved" / "train" / name).rename(folder / name)
    for name in ("val", "valid"):  # which could not be read as splits
        (folder / name).mkdir()
    left_out = 1 + 6 if kind == "metadata" else 15 + 6
    with pytest.raises(DataError, match=f"photos has {left_out} images in folders of classes that are not in its list"):
        read_data(str(folder))


def test_other_pictures_beside_packed_images_do_not_matter(photos: DataSet, tmp_path: Path) -> None:
    """As those of a README, or the masks of images."""
    (_, *_), (picture, *_) = rows(photos, "train")[:2]
    hub, listed = on_the_hub(photos, tmp_path / "hub"), with_metadata(photos, tmp_path / "listed")
    for place in (hub / "assets" / "banner.png", listed / "train" / "masks" / "0.png", listed / "docs" / "a.png"):
        place.parent.mkdir()
        place.write_bytes(picture)
    for folder, ignored in ((hub, {"assets/": 1}), (listed, {"masks/": 1, "docs/": 1})):
        (folder / "empty").mkdir()
        data = read_data(str(folder))
        assert (len(data.splits["train"]), data.ignored) == (15, ignored)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "selects rows by a list of indices"),
        ({"_data_files": [{"filename": "data-00000-of-00001.arrow", "take": 2}]}, "holds a part of a file"),
        ({"_data_files": [{"filename": "data-00000-of-00001.arrow"}] * 2}, "lists 'train/data-.*' twice"),
    ],
)
def test_saved_data_sets_whose_rows_are_not_those_of_their_files_are_refused(
    photos: DataSet, tmp_path: Path, state: dict[str, Any], sentence: str
) -> None:
    folder = saved(photos, tmp_path / "saved")
    file = folder / "train" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | state))
    with pytest.raises(DataError, match=sentence):
        read_data(str(folder))


def test_every_line_of_metadata_names_its_split_if_one_does(photos: DataSet, tmp_path: Path) -> None:
    folder = with_metadata(DataSet("x", photos.classes, {"train": photos.splits["train"]}), tmp_path / "photos")
    file = folder / "train" / "metadata.jsonl"
    first, *rest = (json.loads(line) for line in file.read_text().splitlines())
    file.write_text("\n".join(map(json.dumps, [first | {"split": "train"}, *rest])))
    with pytest.raises(DataError, match="line 2 has no split, and other lines have one"):
        read_data(str(folder))


def test_decimal_numbers_are_labels(photos: DataSet, tmp_path: Path) -> None:
    whole = table(photos, "train").replace_schema_metadata(None)
    values = pa.array([Decimal(i % 2) for i in range(len(whole))])
    pa.parquet.write_table(whole.set_column(1, "label", values), tmp_path / "train.parquet")
    assert read_data(str(tmp_path / "train.parquet")).classes == ("0", "1")


@pytest.mark.parametrize("form", ["save_to_disk", "parquet", "webdataset .cls"])
def test_splits_of_other_names_are_neither_train_nor_instead_of_it(photos: DataSet, tmp_path: Path, form: str) -> None:
    """As "extra" of SVHN. Where nothing is called train, images without a split are the training images."""
    names = {"train": "train", "val": "testing", "test": "extra"}
    splits = dict(zip(names, (photos.splits["train"], photos.splits["test"], photos.splits["test"]), strict=True))
    renamed = DataSet("x", photos.classes, {names[split]: samples for split, samples in splits.items()})
    data = read_data(str(FORMS[form](renamed, tmp_path / "data")))
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 15, "test": 6}
    assert sum(data.ignored.values()) == 6
    alone = DataSet("x", photos.classes, {"all": photos.splits["train"], "test": photos.splits["test"]})
    data = read_data(str(FORMS[form](alone, tmp_path / "alone")))
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 15, "test": 6}
    assert not data.ignored


def test_names_in_tar_files_need_not_be_text(photos: DataSet, tmp_path: Path) -> None:
    picture = rows(photos, "train")[0][0]
    labels = {"\udcff": b"a", "b": b"a", "c": b"b"}
    files = [(f"{key}.png", picture) for key in labels] + [(f"{key}.cls", label) for key, label in labels.items()]
    data = read_data(str(tar_of(tmp_path / "t", *(member(*file) for file in files))))
    assert data.splits["train"].name(0) == "train-0.tar/?.png"
    assert sum(map(len, training_splits(data).values())) == 3  # validation images are chosen by name


def test_files_below_1_mb_do_not_unpack_to_gigabytes(tmp_path: Path) -> None:
    count = 2_000_000
    zeros = pa.array(np.zeros(count, np.int8))
    nothing = pa.StructArray.from_arrays([pa.array([b""]).take(zeros), pa.nulls(count, pa.string())], ["bytes", "path"])
    large = {"bytes": bytes(50_000_000), "path": None}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    tables = {
        "more than are allowed": pa.table({"image": nothing, "label": zeros}),
        "more than 100 times its size": pa.table({"image": pa.array([large], kind), "label": [0]}),
    }
    for sentence, table in tables.items():
        pyarrow.parquet.write_table(table, tmp_path / "train.parquet", compression="zstd", use_dictionary=["label"])
        assert (tmp_path / "train.parquet").stat().st_size < 1_000_000
        with pytest.raises(DataError, match=sentence):
            read_data(str(tmp_path))
    listed = pa.table({"path": pa.array(["a"]).take(zeros), "label": zeros})
    pyarrow.parquet.write_table(listed, tmp_path / "listed.parquet")
    with pytest.raises(DataError, match="more than are allowed"):
        read_data(str(tmp_path / "listed.parquet"))


def test_a_compressed_arrow_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array([{"bytes": bytes(100_000_000), "path": None}], kind), "label": ["a"]})
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "dataset_info.json").write_text("{}")
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    file = str(tmp_path / "data.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as written:
        written.write_table(table)
    assert (tmp_path / "data.arrow").stat().st_size < 100_000
    del table
    pool = pa.system_memory_pool()  # whose peak begins here
    before, peak = pa.default_memory_pool(), 0
    pa.set_memory_pool(pool)
    try:
        peak = pool.max_memory()
        with pytest.raises(DataError, match="is compressed"):
            read_data(str(tmp_path))
        assert pool.max_memory() - peak < 10_000_000
    finally:
        pa.set_memory_pool(before)


def test_state_files_do_not_lead_out_of_their_folder(photos: DataSet, tmp_path: Path) -> None:
    folder = saved(photos, tmp_path / "saved")
    for name in ("../../x.arrow", "/etc/passwd"):
        (folder / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(DataError, match="outside of the data set's folder"):
            read_data(str(folder))
    listed = with_metadata(photos, tmp_path / "listed")
    (listed / "train" / "metadata.jsonl").write_text('{"file_name": "../../../x.png", "label": "a"}')
    with pytest.raises(DataError, match="outside of the data set's folder"):
        read_data(str(listed))


@pytest.fixture(scope="module")
def small(photos: DataSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("small")
    return {name: FORMS[name](photos, folder / str(i)) for i, name in enumerate(("save_to_disk", "parquet"))} | {
        "webdataset .cls": in_tars(photos, folder / "tars")
    }


@pytest.mark.parametrize("form", ["save_to_disk", "parquet", "webdataset .cls"])
@examples(40)
@given(data=st.data())
def test_damaged_files_are_data_or_one_sentence(small: dict[str, Path], form: str, data: st.DataObject) -> None:
    file = sorted(file for file in small[form].rglob("*") if file.suffix in (".arrow", ".parquet", ".tar"))[-1]
    original = file.read_bytes()
    try:
        file.write_bytes(data.draw(mutated(original)))
        result, _ = outcome(read_data, str(small[form]))
        if result is not None:
            for samples in result.splits.values():
                for i in range(len(samples)):
                    outcome(samples.load, i)
    finally:
        file.write_bytes(original)


def test_damage_between_the_index_and_the_images_is_one_sentence_for_each(photos: DataSet, tmp_path: Path) -> None:
    folder = FORMS["parquet"](photos, tmp_path / "data")
    for file in folder.rglob("*.parquet"):
        content = file.read_bytes()
        file.write_bytes(content[:4] + bytes(8) + content[12:])  # the header of the first page, which holds images
    data = read_data(str(folder))
    with pytest.raises(DataError, match=r"cannot read the image .*: .*page header"):
        data.splits["train"].load(0)


def test_files_that_a_saved_data_set_names_and_lacks_are_one_short_sentence(photos: DataSet, tmp_path: Path) -> None:
    folder = saved(photos, tmp_path / "saved")
    names = {"dataset_dict.json": "splits", "train/state.json": "_data_files"}
    for name, key in names.items():
        original = (folder / name).read_text()
        for other in ("absent", "x" * 100_000):
            value = [other] if key == "splits" else [{"filename": other}]
            (folder / name).write_text(json.dumps({**json.loads(original), key: value}))
            with pytest.raises(DataError, match=rf"{name}: '{other[:99]}…?' is missing$"):
                read_data(str(folder))
        (folder / name).write_text(original)


def test_features_that_are_no_features_are_ignored(photos: DataSet, tmp_path: Path) -> None:
    folder = saved(photos, tmp_path / "saved")
    for file in folder.rglob("dataset_info.json"):
        file.write_text('{"features": true}')
    assert read_data(str(folder)).classes == ("0", "1", "2")  # the labels have lost their names


@examples(60)
@given(data=st.data())
def test_odd_descriptions_are_data_or_one_sentence(small: dict[str, Path], data: st.DataObject) -> None:
    part = small["save_to_disk"] / "train"
    file = part / data.draw(st.sampled_from(["state.json", "dataset_info.json"]))
    original = file.read_bytes()
    try:
        file.write_bytes(data.draw(odd_json(json.loads(original))))
        outcome(read_data, str(part.parent))
    finally:
        file.write_bytes(original)
