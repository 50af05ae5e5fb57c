"""Readers: every layout as it is distributed, and one sentence for every fault and for hostile content."""

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given
from hypothesis import strategies as st

import replicas
from fuzzing import examples
from replicas import put, put_image, put_lines
from semaug.data import annotations, layouts, matlab, readers
from semaug.data.layouts import Layout
from semaug.data.readers import read_data, split_validation, training_splits
from semaug.data.samples import IMAGE_SUFFIXES, DataSet, ImageFiles, embedded_birds, ignored_files
from semaug.util.errors import SemaugError, SettingError


def counts(data: DataSet) -> dict[str, list[int]]:
    """By split, the number of images of each class."""
    return {
        split: [Counter(samples.labels)[label] for label in range(len(data.classes))]
        for split, samples in data.splits.items()
    }


def names(data: DataSet, split: str) -> list[str]:
    return [data.splits[split].name(i) for i in range(len(data.splits[split]))]


def refusal(path: Path | str, **options: object) -> str:
    """The message with which a path is refused."""
    with pytest.raises(SemaugError) as caught:
        read_data(str(path), **options)
    return one_sentence(caught.value)


def one_sentence(error: SemaugError) -> str:
    assert "\n" not in str(error)
    assert len(str(error)) < 1000
    return str(error)


# ------------------------------------------------------------------------------------------------- as distributed


def test_cub(tmp_path):
    data = read_data(str(replicas.cub(tmp_path / "anything")))
    assert (data.name, data.classes) == ("cub", replicas.CUB_CLASSES)
    assert counts(data) == {"train": [2, 2, 2], "test": [2, 2, 2]}
    assert names(data, "train")[0] == "images/001.Black_footed_Albatross/Black_footed_Albatross_0000_7919.jpg"
    assert all(
        name.split("/")[1] == replicas.CUB_FOLDERS[label]
        for name, label in zip(names(data, "test"), data.splits["test"].labels, strict=True)
    )
    assert data.splits["train"].load(0).size == (10, 9)


def test_cub_classes_are_ordered_by_number_not_by_line(tmp_path):
    folder = replicas.cub(tmp_path)
    lines = (folder / "classes.txt").read_text().splitlines()
    put_lines(folder / "classes.txt", lines[::-1])
    assert read_data(str(folder)).classes == replicas.CUB_CLASSES


def test_nabirds(tmp_path):
    data = read_data(str(replicas.nabirds(tmp_path)))
    assert data.name == "nabirds"
    assert data.classes == ("Common Eider (Adult male)", "Common Eider (Female/juvenile)", "Oak Titmouse")
    assert counts(data) == {"train": [2, 2, 2], "test": [1, 1, 1]}
    oak = [name for name, label in zip(names(data, "train"), data.splits["train"].labels, strict=True) if label == 2]
    assert all(name.startswith("images/0817/") for name in oak)


def test_nabirds_categories_of_the_same_name_are_distinguished_by_number(tmp_path):
    folder = replicas.nabirds(tmp_path)
    text = (folder / "classes.txt").read_text()
    put(folder / "classes.txt", text.replace("(Adult male)", "(Adult)").replace("(Female/juvenile)", "(Adult)"))
    assert read_data(str(folder)).classes[:2] == ("Common Eider (Adult) [295]", "Common Eider (Adult) [296]")


@pytest.mark.parametrize("trainval", [True, False])
def test_aircraft_trains_on_trainval(tmp_path, trainval):
    folder = replicas.aircraft(tmp_path)
    if not trainval:
        (folder / "data" / "images_variant_trainval.txt").unlink()
    data = read_data(str(folder))
    assert (data.name, data.classes) == ("aircraft", replicas.VARIANTS)
    assert counts(data) == {"train": [3, 3, 3], "test": [2, 2, 2]}
    assert sorted(names(data, "train"))[0] == "data/images/1025794.jpg"
    assert data.splits["test"].load(1).mode == "RGB"
    assert counts(read_data(str(folder / "data"))) == counts(data)


def test_cars_devkit(tmp_path):
    data = read_data(str(replicas.cars_devkit(tmp_path)))
    assert (data.name, data.classes) == ("cars", replicas.CAR_CLASSES)
    assert counts(data) == {"train": [2, 2, 2], "test": [2, 2, 2]}
    assert names(data, "test")[:2] == ["cars_test/00001.jpg", "cars_test/00002.jpg"]
    assert list(data.splits["train"].labels) == [0, 1, 2, 0, 1, 2]


def test_cars_test_labels_may_be_in_the_devkit_and_image_folders_doubled(tmp_path):
    folder = replicas.cars_devkit(tmp_path / "cars")
    (folder / "cars_test_annos_withlabels.mat").rename(folder / "devkit" / "cars_test_annos_withlabels.mat")
    (folder / "cars_train").rename(tmp_path / "inner")
    (folder / "cars_train").mkdir()
    (tmp_path / "inner").rename(folder / "cars_train" / "cars_train")
    assert names(read_data(str(folder)), "train")[0] == "cars_train/cars_train/00001.jpg"


def test_cars_single_file(tmp_path):
    data = read_data(str(replicas.cars_single(tmp_path)))
    assert data.classes == replicas.CAR_CLASSES
    assert counts(data) == {"train": [2, 2, 2], "test": [1, 1, 1]}
    assert names(data, "test") == ["car_ims/000003.jpg", "car_ims/000006.jpg", "car_ims/000009.jpg"]


def test_cars_as_folders(tmp_path):
    replicas.image_folder(tmp_path / "stanford_cars", classes=("Acura RL Sedan 2012", "Ram C-V Cargo Van Minivan 2012"))
    data = read_data("cars", tmp_path)
    assert data.name == "cars"
    assert counts(data) == {"train": [3, 3], "test": [3, 3]}


def test_imagenet(tmp_path):
    data = read_data(str(replicas.imagenet(tmp_path)))
    assert (data.name, data.classes) == ("imagenet", replicas.WNIDS)
    assert counts(data) == {"train": [2, 2], "test": [2, 2]}


def test_a_part_of_imagenet_with_a_test_split_of_its_own_is_like_other_folders(tmp_path):
    folder = replicas.imagenet(tmp_path)
    for name in replicas.WNIDS:
        put_image(folder / "test" / name / "0.png", 1)
    assert counts(read_data(str(folder))) == {"train": [2, 2], "val": [2, 2], "test": [1, 1]}


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (("train", "val", "test"), {"train", "val", "test"}),
        (("train", "valid"), {"train", "val"}),
        (("Train", "validation"), {"train", "val"}),
        (("Training", "dev", "Testing"), {"train", "val", "test"}),
        (("training_set", "test_set"), {"train", "test"}),
        (("train",), {"train"}),
        (("",), {"train"}),
    ],
)
def test_image_folders(tmp_path, splits, expected):
    data = read_data(str(replicas.image_folder(tmp_path / "corvids", splits)))
    assert (data.name, data.classes) == ("corvids", ("crow", "jay"))
    assert counts(data) == {split: [3, 3] for split in expected}


def test_image_folders_nested_hidden_and_other_files(tmp_path):
    replicas.image_folder(tmp_path, ("",), ("crow", "jay"), 1)
    put_image(tmp_path / "crow" / "deep" / "deeper" / "BIG.JPEG", 1)
    put(tmp_path / "crow" / "x.PNG", replicas.picture(2, "PNG"))
    for ignored in ("crow/.hidden.jpg", "crow/.cache/1.jpg", ".git/1.jpg", "__MACOSX/crow/1.jpg", "preview.jpg"):
        put_image(tmp_path / ignored, 3)
    put(tmp_path / "crow" / "notes.txt", "x")
    data = read_data(str(tmp_path))
    assert names(data, "train") == ["crow/0.jpg", "crow/deep/deeper/BIG.JPEG", "crow/x.PNG", "jay/0.jpg"]


def test_images_outside_of_classes_and_splits_are_counted(tmp_path):
    replicas.image_folder(tmp_path, ("train", "test"))
    assert read_data(str(tmp_path)).ignored == {}
    replicas.image_folder(tmp_path, ("",), ("bus", "tram"), 4)
    put_image(tmp_path / "bus" / "deep" / "1.jpg", 1)
    put_image(tmp_path / "train" / "1.jpg", 1)
    data = read_data(str(tmp_path))
    assert data.ignored == {"bus/": 5, "tram/": 4, "train/": 1}
    phrase = "10 images outside of classes and splits ignored (bus/, tram/, train/)"
    assert ignored_files(data.ignored) == phrase
    assert ignored_files({**data.ignored, ".txt": 1}) == f"{phrase}; 1 file of another type ignored (.txt)"


def test_a_class_may_be_called_train(tmp_path):
    replicas.image_folder(tmp_path, ("",), ("bus", "train"))
    assert read_data(str(tmp_path)).classes == ("bus", "train")


def test_links_are_read_but_loops_are_not_followed(tmp_path):
    folder = replicas.image_folder(tmp_path / "data", ("",))
    replicas.image_folder(tmp_path / "elsewhere", ("",), ("magpie",))
    (folder / "magpie").symlink_to(tmp_path / "elsewhere" / "magpie")
    (folder / "loop").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "above").symlink_to(tmp_path)
    (folder / "jay" / "loop").symlink_to(folder / "jay")
    data = read_data(str(folder))
    assert data.classes == ("crow", "jay", "magpie")
    assert counts(data) == {"train": [3, 3, 3]}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".CSV"])
def test_tables(tmp_path, suffix):
    data = read_data(str(replicas.table(tmp_path / f"corvids{suffix}")))
    assert (data.name, data.classes) == ("corvids", ("crow", "jay"))
    assert counts(data) == {"train": [1, 1], "val": [1, 0], "test": [0, 1]}
    assert names(data, "val") == ["pictures/2.png"]


@pytest.mark.parametrize("header", ["filename,class", " Image , LABEL", '"file","class"', "\ufeffpath,label"])
def test_table_columns_have_several_names(tmp_path, header):
    rows = ("pictures/0.png,10", 'pictures/1.png,"9"', "", "pictures/2.png, 10")
    data = read_data(str(replicas.table(tmp_path / "t.csv", header, rows)))
    assert data.classes == ("9", "10")
    assert counts(data) == {"train": [1, 2]}


@pytest.mark.parametrize("column", ["split", "Set", "subset", "partition", "fold", "phase"])
def test_the_column_of_the_split_has_several_names(tmp_path, column):
    sizes = {"train": [1, 1], "val": [1, 0], "test": [0, 1]}
    assert counts(read_data(str(replicas.table(tmp_path / "t.csv", f"path,label,{column}")))) == sizes
    numbered = tuple(f"pictures/{i}.png,{i % 2},{i % 3}" for i in range(4))
    table = replicas.table(tmp_path / "t.csv", f"path,label,{column}", numbered)
    if column == "split":
        assert "line 2: the split '0' is not one of train" in refusal(table)
    else:  # such as the number of a fold
        assert counts(read_data(str(table))) == {"train": [2, 2]}
        mixed = replicas.table(tmp_path / "t.csv", f"path,label,{column}", (*numbered, "pictures/3.png,1,test"))
        assert "line 2: the split '0' is not one of train" in refusal(mixed)


@pytest.mark.parametrize("column", ["split", "set"])
def test_a_split_may_be_called_a_set(tmp_path, column):
    rows = [f"pictures/{i}.png,{i % 2},{('train set', 'Test_Set')[i // 2]}" for i in range(4)]
    table = replicas.table(tmp_path / "t.csv", f"path,label,{column}", tuple(rows))
    assert counts(read_data(str(table))) == {"train": [1, 1], "test": [1, 1]}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_the_separator_of_a_table_is_recognised(tmp_path, suffix, separator):
    put_image(tmp_path / "a, b; c.jpg", 1)
    rows = [["number", '"path"', "label"], ["1", '"a, b; c.jpg"', "crow"]]
    data = read_data(str(put_lines(tmp_path / f"t{suffix}", [separator.join(row) for row in rows])))
    assert (data.classes, names(data, "train")) == (("crow",), ["a, b; c.jpg"])


def test_table_with_absolute_paths_and_windows_lines(tmp_path):
    image, _ = (put_image(tmp_path / "far" / name, 1) for name in ("away.jpg", "back.jpg"))
    path = put(tmp_path / "near" / "t.csv", f"path,label\r\n{image},a\r\n../far/back.jpg,b\r\n")
    assert counts(read_data(str(path))) == {"train": [1, 1]}


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    put_image(tmp_path / "1.jpg", 1)
    path = tmp_path / "t.parquet"
    columns = {"pixels": [b"", b""], "image": ["1.jpg", "2.jpg"], "label": [0, 10], "split": ["train", "train"]}
    parquet.write_table(pyarrow.table(columns), path)
    assert read_data(str(path)).classes == ("0", "10")
    for name, cells in (("set", ["train", "val"]), ("fold", [1, None]), ("fold", [0.5, 1.5])):
        parquet.write_table(pyarrow.table({"image": ["1.jpg", "2.jpg"], "label": [1, 1], name: cells}), path)
        assert counts(read_data(str(path))) == ({"train": [1], "val": [1]} if name == "set" else {"train": [2]})
    parquet.write_table(pyarrow.table({"image": ["1.jpg", "2.jpg"], "label": ["a", None]}), path)
    assert "row 2" in refusal(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(20) + content[24:])
    assert "cannot read" in refusal(path)
    path.write_bytes(content[:-8])
    assert "cannot read" in refusal(path)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_for_real(tmp_path):
    import pyarrow
    import pyarrow.parquet

    put_image(tmp_path / "1.jpg", 1)
    table = pyarrow.table({"image": ["1.jpg", "2.jpg"], "label": [0, 10]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert read_data(str(tmp_path / "t.parquet")).classes == ("0", "10")
    assert "cannot read" in refusal(put(tmp_path / "bad.parquet", b"PAR1garbage"))


# --------------------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize(
    ("name", "folder", "build"),
    [
        ("cub", "CUB_200_2011", replicas.cub),
        ("cub", "CUB_200_2011/CUB_200_2011", replicas.cub),
        ("nabirds", "nabirds", replicas.nabirds),
        ("aircraft", "fgvc-aircraft-2013b", replicas.aircraft),
        ("cars", "stanford_cars", replicas.cars_devkit),
        ("cars", "stanford_cars", replicas.cars_single),
        ("cars", ".", replicas.cars_single),
        ("imagenet", "imagenet", replicas.imagenet),
    ],
)
def test_names(tmp_path, monkeypatch, name, folder, build):
    build(tmp_path / folder)
    expected = read_data(str(tmp_path / folder))
    assert expected.name == name
    assert read_data(name, tmp_path) == expected
    monkeypatch.setenv("SEMAUG_DATA", str(tmp_path))
    assert read_data(name) == expected


def test_the_default_root_is_the_folder_data(tmp_path, monkeypatch):
    monkeypatch.delenv("SEMAUG_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    replicas.cub(tmp_path / "data" / "CUB_200_2011")
    assert read_data("cub").name == "cub"


def test_birds():
    assert read_data("birds").classes == embedded_birds().classes


@pytest.mark.parametrize("name", readers.KNOWN)
def test_an_absent_set_says_where_to_get_it_and_where_to_put_it(tmp_path, name):
    sentence = refusal(name, root=tmp_path)
    assert "https://" in sentence
    assert str(tmp_path / readers.KNOWN[name].folders[0]) in sentence


def test_an_incomplete_set_says_what_is_missing(tmp_path):
    put(tmp_path / "CUB_200_2011" / "README", "")
    assert "CUB_200_2011/classes.txt is missing" in refusal("cub", root=tmp_path)
    put(tmp_path / "fgvc-aircraft-2013b" / "README", "")
    assert "variants.txt is missing" in refusal("aircraft", root=tmp_path)
    put_image(tmp_path / "stanford_cars" / "somewhere" / "deep" / "1.jpg", 1)
    assert "has neither cars_annos.mat nor" in refusal("cars", root=tmp_path)
    put_image(tmp_path / "imagenet" / "ILSVRC" / "deep" / "1.jpg", 1)
    assert "has no folder train" in refusal("imagenet", root=tmp_path)


def test_a_layout_is_added_by_one_entry_in_the_table(tmp_path, monkeypatch):
    """A flat folder in which the class is the first word of the file's name, by path and by name."""

    def read(folder):
        files = sorted(file for file in folder.glob("*_*.*") if file.suffix in IMAGE_SUFFIXES)
        classes = sorted({file.name.split("_")[0] for file in files})
        entries = [(file, classes.index(file.name.split("_")[0])) for file in files]
        return annotations.data_set("corvids", folder, classes, {"train": entries})

    flat = Layout(
        "corvids",
        recognise=lambda path: any(path.glob("*_*.jpg")),
        read=read,
        folders=("corvids-1.0",),
        source="corvids.zip from a friend",
    )
    monkeypatch.setattr(readers, "LAYOUTS", [flat, *readers.LAYOUTS])
    monkeypatch.setitem(readers.KNOWN, flat.name, flat)  # which follows from the table on import
    assert "corvids.zip from a friend" in refusal("corvids", root=tmp_path)
    for i, name in enumerate(("crow_1", "jay_1", "jay_2")):
        put_image(tmp_path / "corvids-1.0" / f"{name}.jpg", i)
    data = read_data("corvids", tmp_path)
    assert (data.name, data.classes, counts(data)) == ("corvids", ("crow", "jay"), {"train": [1, 2]})
    assert read_data(str(tmp_path / "corvids-1.0")) == data
    assert read_data(str(replicas.cub(tmp_path / "cub"))).name == "cub"


# ---------------------------------------------------------------------------------------------------------- faults


CUB_TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


@pytest.mark.parametrize("table", CUB_TABLES)
def test_missing_annotation_file(tmp_path, table):
    (replicas.cub(tmp_path) / table).unlink()
    assert f"{table} is missing" in refusal(tmp_path)
    if hasattr(os, "mkfifo"):  # which would wait forever for a writer
        os.mkfifo(tmp_path / table)
        assert f"{table}: it is not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("table", "old", "new", "expected"),
    [
        (
            "images.txt",
            "\n2 ",
            "\n2.",
            "_0001_15838.jpg' should be two fields",
        ),
        (
            "images.txt",
            "3 001.Black_footed_Albatross/Black_footed_Albatross_0002_23757.jpg",
            "3",
            "line 3: '3' should be two",
        ),
        ("images.txt", "\n2 ", "\n1 ", "line 2: '1' occurs twice"),
        ("images.txt", "\n2 ", "\n22 ", "only one of images.txt and image_class_labels.txt"),
        ("images.txt", "2 001.Black", "2 ../../001.Black", "outside of the data set"),
        ("images.txt", "2 001.Black", "2 /etc/001.Black", "outside of the data set"),
        ("images.txt", "2 001.Black", "2 C:\\001.Black", "outside of the data set"),
        ("images.txt", "2 001.Black", "2 a\\..\\..\\001.Black", "outside of the data set"),
        ("images.txt", "2 001.Black", "2 " + "x" * 5000, "1 of the 12 images"),
        ("images.txt", "2 001.Black", "2 \0", "1 of the 12 images"),
        ("image_class_labels.txt", "\n7 2", "\n7 4", "line 7: class 4 is not in classes.txt"),
        ("image_class_labels.txt", "\n7 2", "\n7 -1", "line 7: '-1' should be a number"),
        ("image_class_labels.txt", "\n7 2", "\n7 ٣", "line 7: '٣' should be a number"),
        ("image_class_labels.txt", "\n7 2", "\n7 " + "9" * 5000, "line 7"),
        ("image_class_labels.txt", "\n7 2", "", "only one of images.txt and image_class_labels.txt"),
        ("train_test_split.txt", "\n8 0", "\n8 2", "line 8: '2' should be 0 or 1"),
        ("classes.txt", "\n3 ", "\n03 a\n3 ", "line 4: the class '3' occurs twice"),
        ("classes.txt", "003.Sooty_Albatross", "002.Laysan_Albatross", "the same name: '002.Laysan_Albatross'"),
        ("classes.txt", "003.Sooty_Albatross", "003.Sooty_Albatross\n4 004.Ani", "classes without images: '004.Ani'"),
    ],
)
def test_faults_in_cub(tmp_path, table, old, new, expected):
    path = replicas.cub(tmp_path) / table
    text = path.read_text()
    assert old in text
    put(path, text.replace(old, new, 1))
    assert expected in refusal(tmp_path)


def test_absent_images_are_counted_and_the_first_is_named(tmp_path):
    folder = replicas.cub(tmp_path)
    for image in (folder / "images").glob("002*/*_000[12]_*"):
        image.unlink()
    sentence = refusal(folder)
    assert "2 of the 12 images" in sentence
    assert "images/002.Laysan_Albatross/Laysan_Albatross_0002_" in sentence


def test_a_class_in_test_only(tmp_path):
    folder = replicas.cub(tmp_path)
    text = (folder / "train_test_split.txt").read_text()
    put(folder / "train_test_split.txt", text.replace("\n5 1", "\n5 0").replace("\n7 1", "\n7 0"))
    assert "classes in test that are not in train: '002.Laysan_Albatross'" in refusal(folder)
    put_lines(folder / "train_test_split.txt", [f"{i} 1" for i in range(1, 13)])
    assert "no images in the split test" in refusal(folder)


@pytest.mark.parametrize(
    ("table", "old", "new", "expected"),
    [
        ("variants.txt", "F/A-18\n", "", "line 7: the variant 'F/A-18' is not in variants.txt"),
        ("variants.txt", "F/A-18\n", "F/A-18\nF/A-18\n", "same name: 'F/A-18'"),
        ("variants.txt", "F/A-18\n", "F/A-18\nYak-42\n", "classes without images: 'Yak-42'"),
        (
            "images_variant_test.txt",
            "1025797",
            "../../1025797",
            "line 1: the image '../../1025797.jpg' is outside",
        ),
        ("images_variant_test.txt", "1025797", "1", "1 of the 15 images"),
        ("images_variant_trainval.txt", "1025794 ", "1025794", "line 1: '1025794707-320' should be two fields"),
    ],
)
def test_faults_in_aircraft(tmp_path, table, old, new, expected):
    path = replicas.aircraft(tmp_path) / "data" / table
    text = path.read_text()
    assert old in text
    put(path, text.replace(old, new, 1))
    assert expected in refusal(tmp_path)


def test_faults_in_cars(tmp_path):
    assert "is outside of" in refusal(replicas.cars_single(tmp_path / "a", first="../000001.jpg"))
    assert "label 4 is beyond the 3 classes" in refusal(replicas.cars_devkit(tmp_path / "b", (1, 2, 3, 4))).replace(
        "'", ""
    )
    assert "label 0 is beyond" in refusal(replicas.cars_devkit(tmp_path / "c", (0, 1, 2, 3))).replace("'", "")
    assert "label 'one' is beyond" in refusal(replicas.cars_devkit(tmp_path / "e", ("one", 1, 2, 3)))
    assert "lists the image 'car_ims/000002.jpg' twice" in refusal(
        replicas.cars_single(tmp_path / "f", first="car_ims/000002.jpg")
    )
    assert "test mark '2' should be 0 or 1" in refusal(replicas.cars_single(tmp_path / "g", tested=2))
    folder = replicas.cars_devkit(tmp_path / "d")
    labelled = folder / "cars_test_annos_withlabels.mat"
    put(labelled, (folder / "devkit" / "cars_test_annos.mat").read_bytes())
    assert "no field class" in refusal(folder)
    labelled.unlink()
    assert "cars_test_annos_withlabels.mat is missing" in refusal(folder)
    put(labelled, b"MATLAB 5.0 MAT-file" + bytes(range(256)) * 4)
    assert "is not a MATLAB file" in refusal(folder)
    put(labelled, (folder / "devkit" / "cars_meta.mat").read_bytes())
    assert "has no variable annotations" in refusal(folder)


def plain(value: object) -> object:
    """A MATLAB value as scipy reads it, in lists, dicts and texts."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.names:
        return [{name: plain(struct[name]) for name in value.dtype.names} for struct in value.ravel("F")]
    if value.dtype.kind == "U":
        return "".join(value.ravel())
    return [plain(element) for element in value.ravel("F").tolist()]


MATLAB_FILES = Path(scipy.io.__file__).parent / "matlab" / "tests" / "data"


@pytest.mark.skipif(not MATLAB_FILES.is_dir(), reason="scipy was installed without its tests")
@pytest.mark.parametrize("name", ["structarr", "structnest", "cell", "cellnest", "emptycell", "3dmatrix", "double"])
def test_files_written_by_matlab_are_read_as_by_scipy(name):
    files = sorted(MATLAB_FILES.glob(f"test{name}_[67]*.mat"))
    assert files
    for file in files:
        expected = {key: value for key, value in scipy.io.loadmat(file).items() if not key.startswith("__")}
        assert {variable: matlab.read_variable(file, variable) for variable in expected} == {
            variable: plain(value) for variable, value in expected.items()
        }


def test_faults_in_imagenet(tmp_path):
    folder = replicas.imagenet(tmp_path)
    for image in (folder / "val").glob("*/*"):
        image.rename(folder / "val" / f"{image.parent.name}{image.name}")
    for class_folder in (folder / "val").glob("n*[0-9]"):
        class_folder.rmdir()
    assert "must have one folder per class (n01440764" in refusal(folder)


def test_faults_in_image_folders(tmp_path):
    assert "is empty" in refusal(tmp_path)
    put_image(tmp_path / "1.jpg", 1)
    assert "no folder per class" in refusal(tmp_path)
    (tmp_path / "crow").mkdir()
    put(tmp_path / "crow" / "readme.txt", "")
    message = refusal(tmp_path)
    assert message.startswith("there are no images (")
    assert "bmp gif jfif jpeg" in message
    assert message.endswith("1 file of another type ignored (.txt)")
    put_image(tmp_path / "jay" / "1.jpg", 1)
    assert "classes without images: 'crow'" in refusal(tmp_path)
    (tmp_path / "crow" / "broken.jpg").symlink_to(tmp_path / "nowhere")
    assert "broken.jpg' is not a file" in refusal(tmp_path)


def test_faults_in_splits(tmp_path):
    replicas.image_folder(tmp_path / "a", ("train", "test"))
    replicas.image_folder(tmp_path / "a", ("test",), ("magpie", "rook"))
    assert "classes in test that are not in train: 'magpie', 'rook'" in refusal(tmp_path / "a")
    replicas.image_folder(tmp_path / "e", ("train",), ("caf\u00e9",))
    replicas.image_folder(tmp_path / "e", ("test",), ("cafe\u0301",))
    assert refusal(tmp_path / "e").endswith(r"; 'cafe\u0301' is another name than 'caf\xe9'")
    replicas.image_folder(tmp_path / "b", ("train", "val", "validation"))
    assert "both val and validation" in refusal(tmp_path / "b")
    replicas.image_folder(tmp_path / "c", ("test", "val"))
    assert "needs a folder train" in refusal(tmp_path / "c")
    replicas.image_folder(tmp_path / "d", ("train",))
    put_image(tmp_path / "d" / "test" / "1.jpg", 1)
    assert "test has no folder per class" in refusal(tmp_path / "d")


def test_a_class_absent_from_test_is_no_fault(tmp_path):
    replicas.image_folder(tmp_path, ("train",))
    replicas.image_folder(tmp_path, ("test",), ("jay",))
    assert counts(read_data(str(tmp_path))) == {"train": [3, 3], "test": [0, 3]}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such file names")
def test_file_names_that_are_not_utf8(tmp_path):
    replicas.image_folder(tmp_path, ("",))
    odd = Path(os.fsdecode(bytes(tmp_path / "jay") + b"/\xff.jpg"))
    odd.write_bytes(replicas.picture(1))
    assert "is not UTF-8" in refusal(tmp_path)
    folder = odd.rename(odd.with_name("1.jpg")).with_name("\udcff")
    folder.mkdir()
    (folder / "1.jpg").write_bytes(replicas.picture(2))
    assert "is not UTF-8" in refusal(tmp_path)


@pytest.mark.parametrize("data", ["", "nowhere", "\0", "x" * 5000, "~nobody-of-this-name/x", "Birds"])
def test_no_such_path(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    assert "neither an existing path nor the name of a data set (birds, nabirds, cub" in refusal(data)


def test_other_files_and_folders_that_cannot_be_read(tmp_path, monkeypatch):
    assert "neither a folder nor a table" in refusal(put(tmp_path / "CUB_200_2011.tgz", b""))

    def forbidden(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(layouts.os, "scandir", forbidden)
    assert "Permission denied" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "rows", "expected"),
    [
        ("path,kind", (), "needs a column label or class; its columns are: 'path', 'kind'"),
        ("picture,label", (), "needs a column path or image or file or filename"),
        ("", (), "its columns are: none"),
        ("path,label", (), "no images in the split train"),
        ("path,label", ("pictures/0.png",), "line 2 has 1 fields, and the header has 2"),
        ("path,label", ("pictures/0.png,a", "pictures/1.png,"), "line 3: the image or its label is empty"),
        ("path,label", ("pictures/8.png,a", "pictures/9.png,a"), "none of the 2 images listed in"),
        ("path,label", ("pictures/0.png,a", "pictures/\0.png,a"), "line 3: no file can be called"),
        ("path,label,split", ("pictures/0.png,a,learn",), "line 2: the split 'learn' is not one of train"),
        ("path,label,split", ("pictures/0.png,a,test",), "no images in the split train"),
        ("path,label,split", ("pictures/0.png,a,train", "pictures/1.png,b,test"), "test that are not in train: 'b'"),
        ("path,label", ('pictures/0.png,"a',), "unexpected end of data"),
        ("path,label", ("pictures/0.png,a", 'pictures/1.png, "a"'), "line 3: there is a space before a quotation"),
        ("path,label", ('pictures/0.png,"a', 'pictures/1.png,a"'), "line 3: the label has a line break; perhaps"),
        ("path,label", ("x" * 200_000 + ",a",), "field larger than field limit"),
        ("path,label", ("a\0,a",), ""),
    ],
)
def test_faults_in_tables(tmp_path, header, rows, expected):
    assert expected in refusal(replicas.table(tmp_path / "t.csv", header, rows))


def test_tables_that_are_no_text(tmp_path):
    assert "line 2: this is not UTF-8 text" in refusal(put(tmp_path / "t.csv", b"path,label\n\xff\xfe,a\n"))
    folder = replicas.cub(tmp_path / "cub")
    put(folder / "classes.txt", b"1 a\n2 \xff")
    assert "classes.txt line 2: this is not UTF-8 text" in refusal(folder)


def test_a_table_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(annotations, "MAX_ANNOTATION_BYTES", 20)
    assert "bytes" in refusal(replicas.table(tmp_path / "t.csv"))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "needs pyarrow" in refusal(put(tmp_path / "t.parquet", b"PAR1"))


# --------------------------------------------------------------------------------------------------------- hostile


def fuzzed(original: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, or the original with a piece replaced by one that is likely to do harm."""
    pieces = st.one_of(
        st.binary(max_size=20),
        st.text(max_size=10).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.sampled_from(
            [b"\0", b"\r", b"\n\n", b"../../etc/passwd", b"/etc/passwd", b'"', b"-1", b"1e9", b"\xff" * 9, b" "]
        ),
        st.sampled_from([b"9" * 5000, b"x" * 300_000, "\u2028".encode(), "٣".encode(), b"C:\\x", b"\xef\xbb\xbf"]),
    )
    places = st.integers(0, len(original))
    spliced = st.tuples(places, st.integers(0, 30), pieces).map(
        lambda cut: original[: cut[0]] + cut[2] + original[cut[0] + cut[1] :]
    )
    return st.one_of(st.binary(max_size=200), spliced, spliced, spliced)


def test_names_of_classes_have_a_limit(tmp_path):
    rows = tuple(f"pictures/{i}.png,{name},train" for i, name in enumerate(["crow", "c" * 100_000]))
    assert "have more than 1000 characters: 'cccc" in refusal(replicas.table(tmp_path / "t.csv", rows=rows))


ANNOTATIONS = [
    *((replicas.cub, table) for table in CUB_TABLES),
    *((replicas.nabirds, table) for table in (*CUB_TABLES, "hierarchy.txt")),
    *((replicas.aircraft, f"data/images_variant_{part}.txt") for part in ("trainval", "test")),
    (replicas.aircraft, "data/variants.txt"),
    (lambda folder: replicas.table(folder / "t.csv").parent, "t.csv"),
    (lambda folder: replicas.table(folder / "t.tsv").parent, "t.tsv"),
    (replicas.cars_single, "cars_annos.mat"),
]


@pytest.mark.parametrize(("build", "annotation"), ANNOTATIONS)
@examples(70)
@given(data=st.data())
def test_hostile_annotations_end_in_one_sentence_or_in_images_of_the_set(tmp_path, build, annotation, data):
    folder = tmp_path / "set"
    original = tmp_path / "original"
    if not folder.exists():
        build(folder)
        original.write_bytes((folder / annotation).read_bytes())
    (folder / annotation).write_bytes(data.draw(fuzzed(original.read_bytes())))
    path = str(folder / annotation if annotation.startswith("t.") else folder)
    try:
        result = read_data(path)
    except SemaugError as error:
        one_sentence(error)
        return
    for samples in result.splits.values():
        assert all(0 <= label < len(result.classes) for label in samples.labels)
        assert isinstance(samples, ImageFiles)
        present = [file for file in samples.files if os.path.isfile(file)]  # a table may list files that are missing
        assert all(file.resolve().is_relative_to(folder.resolve()) for file in present)


# ------------------------------------------------------------------------------------------------------ validation


def listed(per_class: list[int]) -> ImageFiles:
    files = [(f"{label}/{i}.jpg", label) for label, count in enumerate(per_class) for i in range(count)]
    root = Path("data")
    return ImageFiles(root, tuple(root / name for name, _ in files), tuple(label for _, label in files))


def labels(samples) -> Counter:
    return Counter(samples.labels)


def test_split_per_class():
    train, validation = split_validation(listed([10, 3, 2, 1]), 2, 0.0, 0)
    assert labels(validation) == {0: 2, 1: 2, 2: 1}
    assert labels(train) == {0: 8, 1: 1, 2: 1, 3: 1}


def test_split_by_fraction():
    train, validation = split_validation(listed([20, 10, 4, 1]), None, 0.1, 0)
    assert labels(validation) == {0: 2, 1: 1, 2: 1}
    assert len(train) == 31
    train, validation = split_validation(listed([20]), None, 0.0, 0)
    assert (len(train), len(validation)) == (20, 0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.floats(0, 0.999), st.integers(0, 5))
def test_split_is_a_partition_in_which_every_class_can_be_trained(per_class, fraction, seed):
    samples = listed(per_class)
    train, validation = split_validation(samples, None, fraction, seed)
    parts = [[part.name(i) for i in range(len(part))] for part in (train, validation)]
    assert sorted(parts[0] + parts[1]) == sorted(samples.name(i) for i in range(len(samples)))
    assert set(train.labels) == set(samples.labels)
    assert all(len(part) == len(set(part)) for part in parts)


def test_split_is_the_same_everywhere_and_depends_on_the_seed():
    chosen = split_validation(listed([20, 20]), 3, 0.0, 7)[1]
    # fixed: every process, machine and version must choose these
    assert [chosen.name(i) for i in range(len(chosen))] == EXPECTED_SPLIT
    assert split_validation(listed([20, 20]), 3, 0.0, 8)[1] != chosen


EXPECTED_SPLIT = ["0/1.jpg", "0/9.jpg", "0/19.jpg", "1/6.jpg", "1/7.jpg", "1/18.jpg"]


@pytest.mark.parametrize(("per_class", "fraction"), [(-1, 0.0), (None, -0.1), (None, 1.0), (None, float("nan"))])
def test_split_refuses_other_numbers(per_class, fraction):
    with pytest.raises(SettingError, match="validation images"):
        split_validation(listed([2]), per_class, fraction, 0)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (("pictures/0.png,crow,train", "pictures/0.png,gull,train"), "listed twice, with the labels 'crow' and 'gull'"),
        (("pictures/0.png,crow,train", "pictures/0.png,crow,test"), "listed twice, in train and in test"),
        (("pictures/0.png,crow,train", "pictures/../pictures/0.png,crow,test"), "listed twice, in train and in test"),
    ],
)
def test_an_image_with_two_labels_or_in_two_splits_is_refused(tmp_path, rows, sentence):
    assert sentence in refusal(replicas.table(tmp_path / "t.csv", rows=rows))


def test_an_image_that_is_listed_twice_counts_once(tmp_path):
    rows = [
        f"{folder}pictures/{i}.png,{'crow' if i < 2 else 'jay'}"
        for folder in ("", "./", f"{tmp_path}/")
        for i in range(4)
    ]
    data = read_data(str(replicas.table(tmp_path / "t.csv", header="path,label", rows=tuple(rows))))
    assert data.splits["train"].labels == (0, 0, 1, 1)
    splits = training_splits(data, val_fraction=0.5)
    names = [splits[split].name(i) for split in ("train", "val") for i in range(len(splits[split]))]
    assert sorted(names) == [f"pictures/{i}.png" for i in range(4)]


@pytest.mark.parametrize("second", ["label", "Label", " label "])
def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path, second):
    rows = ("pictures/0.png,crow,gull", "pictures/1.png,jay,jay")
    file = replicas.table(tmp_path / "t.csv", header=f"path,label,{second}", rows=rows)
    assert refusal(file).endswith("t.csv has two columns 'label'")
