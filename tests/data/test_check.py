"""The report on a data set."""

import json
from pathlib import Path

import pytest
from PIL import Image

import replicas
from replicas import picture, put, put_image
from semaug.data.check import Spread, check_data
from semaug.data.readers import read_data
from semaug.data.samples import DataSet, embedded_birds


def test_a_sound_data_set_has_no_problems(tmp_path):
    data = read_data(str(replicas.image_folder(tmp_path, ("train", "test"), count=6)))
    seen = []
    report = check_data(data, progress=lambda done, total: seen.append((done, total)))
    assert report.problems == []
    assert (report.name, report.classes) == (tmp_path.name, 2)
    assert report.splits["train"].images == 12
    assert report.splits["test"].per_class == Spread(6, 6, 6)
    assert report.splits["train"].widths == Spread(10, 10, 10)
    assert report.splits["train"].heights == Spread(8, 9, 10)
    assert seen == [(i, 24) for i in range(1, 25)]


def faulty(folder: Path) -> DataSet:
    replicas.image_folder(folder, ("train",), ("crow", "jay", "rook"), count=6)
    replicas.image_folder(folder, ("test",), ("crow",), count=0)
    put_image(folder / "train" / "tiny" / "1.jpg", 100)
    put_image(folder / "test" / "crow" / "copy.jpg", 1)
    put_image(folder / "test" / "crow" / "other.jpg", 101)
    put_image(folder / "train" / "jay" / "again.jpg", 8)
    put_image(folder / "train" / "rook" / "really a jay.jpg", 9)
    put(folder / "train" / "rook" / "broken.jpg", picture(102)[:200])
    put(folder / "train" / "rook" / "text.jpg", "hello")
    put(folder / "train" / "rook" / "empty.jpg", "")
    return read_data(str(folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_problem_is_reported(tmp_path, workers):
    report = check_data(faulty(tmp_path), workers)
    assert [[image.name for image in group] for group in report.duplicates_across] == [
        ["train/crow/0.jpg", "test/crow/copy.jpg"]
    ]
    assert [[image.name for image in group] for group in report.duplicates_within] == [
        ["train/jay/1.jpg", "train/jay/again.jpg"],
        ["train/jay/2.jpg", "train/rook/really a jay.jpg"],
    ]
    unreadable = {item.image.name: item.reason for item in report.unreadable}
    assert set(unreadable) == {f"train/rook/{name}.jpg" for name in ("broken", "text", "empty")}
    assert all(unreadable.values())
    assert report.missing_classes == {"test": ("jay", "rook", "tiny")}
    assert report.tiny_classes == {"tiny": 1}
    problems = report.problems
    assert len(problems) == 6 + 1
    assert problems[6].startswith("The classes have 1 to 10 training images: train with a square-root sampler")
    assert problems[0].startswith("1 image is in more than one split")
    assert problems[1].startswith("3 images are unreadable: train: train/rook/")
    assert "train: train/jay/2.jpg (jay) = train: train/rook/really a jay.jpg (rook)" in problems[2]
    assert problems[3] == "3 classes are without images in test: jay, rook, tiny."
    assert problems[4].startswith("2 images are more than once in a split")
    assert problems[5] == "1 class has fewer than 5 training images: tiny (1)."


def test_classes_that_differ_only_in_case_spaces_zeros_or_unicode_form_are_reported(tmp_path):
    names = ("Jay", "jay", "caf\u00e9", "cafe\u0301", "rook", "Blue_Jay", "blue jay", "1", "01", "1.0", "10", "C", "C+")
    names += ("tern", "tern ", "tern\u200b", "0", "00")
    report = check_data(read_data(str(replicas.image_folder(tmp_path, ("train",), names, 6))))
    assert set(report.same_names) == {
        ("Jay", "jay"), ("cafe\u0301", "caf\u00e9"), ("Blue_Jay", "blue jay"), ("01", "1", "1.0"), ("0", "00"),
        ("tern", "tern ", "tern\u200b"),
    }  # fmt: skip
    (problem,) = (sentence for sentence in report.problems if "Unicode" in sentence)
    assert problem.startswith("6 groups of classes have names that differ only in case")
    problem = check_data(read_data(str(replicas.image_folder(tmp_path / "x", ("train",), names[2:5], 6)))).problems[0]
    assert r"'cafe\u0301' = 'caf\xe9'" in problem


def test_sentences_stay_short(tmp_path):
    for i in range(50):
        put_image(tmp_path / "crow" / f"{i}.jpg", 1)
    single, problem = check_data(read_data(str(tmp_path))).problems
    assert single == "There is a single class; training needs at least two."
    assert problem.endswith("train: crow/0.jpg = train: crow/1.jpg = train: crow/10.jpg and 47 more.")


def test_a_report_as_json(tmp_path):
    report = check_data(faulty(tmp_path))
    content = json.loads(report.to_json())
    assert content["problems"] == report.problems
    assert content["splits"]["test"]["images"] == 2
    assert content["duplicates_across"][0][1] == {"split": "test", "name": "test/crow/copy.jpg", "class_name": "crow"}


def test_the_same_pixels_in_another_file_format_are_the_same_image(tmp_path):
    replicas.image_folder(tmp_path, ("",), count=5)
    Image.open(tmp_path / "jay" / "0.jpg").save(tmp_path / "jay" / "same.png")
    assert len(check_data(read_data(str(tmp_path))).duplicates_within) == 1


def test_images_of_other_shape_with_the_same_bytes_differ(tmp_path):
    for name, size in (("wide", (4, 2)), ("high", (2, 4))):
        (tmp_path / "grey").mkdir(exist_ok=True)
        Image.new("RGB", size, (9, 9, 9)).save(tmp_path / "grey" / f"{name}.png")
    assert check_data(read_data(str(tmp_path))).duplicates_within == ()


def test_an_exception_in_a_decoder_does_not_end_the_check(tmp_path, monkeypatch):
    data = read_data(str(replicas.image_folder(tmp_path, ("",))))

    def fails(samples, i):
        raise ZeroDivisionError("in the decoder\nof a library")

    monkeypatch.setattr(type(data.splits["train"]), "load", fails)
    report = check_data(data)
    assert {item.reason for item in report.unreadable} == {"in the decoder of a library"}
    assert report.splits["train"].widths is None


def test_the_embedded_birds_are_sound():
    assert check_data(embedded_birds(2, 6, 3, size=32)).problems == []
