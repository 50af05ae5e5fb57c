"""Files that inputs stand for, their predictions in order, and the tables with the results."""

import csv
import io
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from replicas import put
from semaug.data import birds
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import load_image
from semaug.inference.classifier import load_classifier
from semaug.inference.manifest import sign
from semaug.inference.prediction import Prediction, expand, predict, write
from semaug.inference.runs import FORMAT
from semaug.util.errors import SemaugError

CLASSES = ["=cmd|' /C calc'!A0", *(kind.name for kind in birds.species(5))]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    run = tmp_path_factory.mktemp("run")
    config = {"format": FORMAT, "model": "test_resnet", "preprocessing": asdict(Preprocessing(40, 32))}
    (run / "config.json").write_text(json.dumps(config))
    (run / "classes.json").write_text(json.dumps(CLASSES))
    model = timm.create_model("test_resnet", num_classes=len(CLASSES))
    torch.nn.init.normal_(model.get_classifier().weight)  # different images, different classes
    save_file(model.state_dict(), run / "model.safetensors")
    sign(run)
    return load_classifier(run)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve birds: six in the folder and six in its subfolder."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "deep").mkdir()
    for i, kind in enumerate(birds.species(12)):
        Image.fromarray(birds.draw(kind, 0, size=48).image).save(folder / ("deep" if i % 2 else "") / f"{i:02}.png")
    return folder


def alone(classifier, path):
    """The classes of a single image and their probabilities, best first."""
    pixels = classifier.preprocessing.pixels(load_image(path))
    probabilities = classifier.probabilities(torch.tensor(pixels)[None])[0].tolist()
    order = sorted(range(len(probabilities)), key=lambda c: -probabilities[c])
    return [classifier.classes[c] for c in order], [probabilities[c] for c in order]


def stdin(monkeypatch, content: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


# ---------------------------------------------------------------------------------------------------------- inputs


def test_a_folder_stands_for_its_images_in_sorted_order(tmp_path):
    names = ["b.JPG", "a/z.png", "a/b/y.webp", "c.txt", ".hidden.png", "._c.jpg", ".cache/x.png", "a.jpeg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = list(expand([tmp_path]))
    assert files == sorted(files)
    assert [str(path.relative_to(tmp_path)) for path in files] == ["a/b/y.webp", "a/z.png", "a.jpeg", "b.JPG"]


def test_linked_folders_are_followed_without_loops(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x.png").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    (tmp_path / "here" / "loop").symlink_to(tmp_path / "here")
    assert list(expand([tmp_path / "here"])) == [tmp_path / "here" / "link" / "x.png"]


def test_a_folder_that_many_links_lead_to_is_searched_once(tmp_path):
    for level in range(28):  # 2^28 paths
        (tmp_path / str(level)).mkdir()
        for name in ("a", "b"):
            (tmp_path / str(level) / name).symlink_to(tmp_path / str(level + 1))
    (tmp_path / "28").mkdir()
    (tmp_path / "28" / "x.png").touch()
    assert list(expand([tmp_path / "0"])) == [tmp_path / "0" / Path(*["a"] * 28) / "x.png"]


def test_deep_folders_are_searched_as_far_as_paths_reach(tmp_path):
    deep = tmp_path
    for _ in range(700):
        deep = deep / "abc"
    deep.mkdir(parents=True)
    (deep / "x.png").touch()
    assert list(expand([tmp_path])) == [deep / "x.png"]
    here = os.open(deep, os.O_RDONLY)
    for _ in range(400):  # beyond the length that a path may have
        os.mkdir("abc", dir_fd=here)
        inner = os.open("abc", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with pytest.raises(SemaugError, match="name too long"):
        list(expand([tmp_path]))
    subprocess.run(["rm", "-rf", tmp_path / "abc"], check=True)  # pytest cannot


def test_files_are_in_the_order_of_the_inputs(photos):
    second = photos / "02.png"
    assert list(expand([str(second), photos / "deep", second]))[0::7] == [second, second]


def test_patterns_match_images_and_folders(photos):
    assert list(expand([f"{photos}/0[24].png"])) == [photos / "02.png", photos / "04.png"]
    assert len(list(expand([f"{photos}/*"]))) == 12
    assert len(list(expand([f"{photos}/**/*.png"]))) == 12
    assert sorted(expand([f"{photos}/**"])) == sorted(expand([photos]))


def test_an_empty_name_is_not_the_working_directory(photos, monkeypatch):
    monkeypatch.chdir(photos)
    with pytest.raises(SemaugError, match="the name of an image is empty"):
        expand(["00.png", ""])
    assert len(list(expand(["."]))) == len(list(expand([photos])))


def test_patterns_below_links_that_lead_back_end(tmp_path):
    put(tmp_path / "photos" / "one.png", b"")
    for name in ("again", "once more"):
        (tmp_path / "photos" / name).symlink_to(".", target_is_directory=True)
    assert list(expand([f"{tmp_path}/**/*.png"])) == [tmp_path / "photos" / "one.png"]
    assert list(expand([f"{tmp_path}/**/photos"])) == [tmp_path / "photos" / "one.png"]
    with pytest.raises(SemaugError, match="no image matches"):
        expand([f"{tmp_path}/**/*.jpg"])


def test_a_file_whose_name_is_a_pattern_is_a_file(tmp_path):
    (tmp_path / "bird[1].png").touch()
    (tmp_path / "bird1.png").touch()
    assert list(expand([tmp_path / "bird[1].png"])) == [tmp_path / "bird[1].png"]


def test_an_explicit_file_may_have_any_suffix(tmp_path):
    (tmp_path / "photo").touch()
    assert list(expand([tmp_path / "photo"])) == [tmp_path / "photo"]


@pytest.mark.skipif(os.name == "nt", reason="names of files are text there")
def test_standard_input_lists_files_and_folders(monkeypatch, photos):
    stdin(monkeypatch, f"{photos}/deep\r\n\nnot there.png\n".encode() + b"by\xfftes.png")
    files = list(expand(["-"]))
    assert files == [*sorted((photos / "deep").iterdir()), Path("not there.png"), Path("by\udcfftes.png")]


def test_standard_input_is_read_line_by_line(monkeypatch):
    lines = (f"{i}.png\n".encode() for i in itertools.count())
    endless = SimpleNamespace(readline=lambda limit: next(lines))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=endless))
    assert [str(path) for path in itertools.islice(expand(["-"]), 2)] == ["0.png", "1.png"]


def test_a_pattern_without_files_is_an_error_before_any_work(photos):
    with pytest.raises(SemaugError, match=r"no image matches .*no\*\.png"):
        expand([photos, photos / "no*.png"])


def test_a_missing_file_becomes_a_failed_prediction(photos):
    assert next(expand(["nowhere.png", photos])) == Path("nowhere.png")


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000 + "b"])
def test_a_name_that_no_file_can_have_becomes_a_failed_prediction(photos, monkeypatch, name):
    """A list of thousands of files still gives the predictions of the others."""
    assert list(expand([photos / "00.png", name])) == [photos / "00.png", Path(name)]
    stdin(monkeypatch, f"{photos / '00.png'}\n{name}\n{photos / '02.png'}\n".encode())
    assert list(expand(["-"])) == [photos / "00.png", Path(name), photos / "02.png"]


def test_a_folder_without_images_and_no_inputs_are_errors(tmp_path):
    with pytest.raises(SemaugError, match="no images in the folder"):
        expand([tmp_path])
    with pytest.raises(SemaugError, match="nothing to classify"):
        expand([])


def test_the_error_for_an_unreadable_folder_names_it(tmp_path, monkeypatch):
    def forbidden(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(SemaugError, match=rf"{tmp_path.name}': Permission denied"):
        expand([tmp_path])


# ------------------------------------------------------------------------------------------------------ prediction


@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("workers", [1, 3])
def test_batched_predictions_equal_those_of_single_images(classifier, photos, batch_size, workers):
    files = list(expand([photos]))
    predictions = list(predict(classifier, files, 3, batch_size, workers))
    assert [prediction.path for prediction in predictions] == [str(file) for file in files]
    for prediction in predictions:
        labels, probabilities = alone(classifier, prediction.path)
        assert prediction.labels == tuple(labels[:3])
        assert prediction.probabilities == pytest.approx(probabilities[:3], abs=1e-5)
        assert prediction.error is None
    assert len({prediction.labels[0] for prediction in predictions}) > 1


def test_top_k_is_limited_by_the_number_of_classes(classifier, photos):
    [prediction] = predict(classifier, [photos / "00.png"], top_k=100)
    assert prediction.top_k == len(prediction.labels) == len(CLASSES)
    assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-5)


def test_unreadable_files_are_reported_between_the_others(classifier, photos, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((photos / "00.png").read_bytes()[:900])
    good = photos / "02.png"
    files = [tmp_path / "text.png", good, tmp_path / "cut.png", tmp_path / "gone.png", tmp_path, good]
    predictions = list(predict(classifier, files, batch_size=2))
    assert [prediction.error is None for prediction in predictions] == [False, True, False, False, False, True]
    assert [prediction.path for prediction in predictions] == [str(file) for file in files]
    assert predictions[1].labels == predictions[5].labels
    for prediction in predictions:
        assert prediction.error is None or prediction.path in prediction.error


def test_any_exception_of_a_decoder_is_reported(classifier, photos, monkeypatch):
    monkeypatch.setattr("semaug.inference.prediction.load_image", lambda path: 1 // 0)
    [prediction] = predict(classifier, [photos / "00.png"])
    assert prediction.error is not None
    assert "ZeroDivisionError" in prediction.error


def test_endless_inputs_are_read_at_most_two_batches_ahead(classifier, photos):
    taken = []

    def inputs():
        for i in itertools.count():
            taken.append(i)
            yield photos / "00.png"

    assert len(list(itertools.islice(predict(classifier, inputs(), batch_size=2), 10))) == 10
    assert len(taken) <= 10 + 2 * 2


def test_bad_numbers_are_errors_before_any_work(classifier):
    for options in ({"top_k": 0}, {"batch_size": 0}):
        with pytest.raises(SemaugError, match="at least 1"):
            predict(classifier, [], **options)


def test_outputs_that_are_not_finite_are_an_error(classifier, photos, monkeypatch):
    monkeypatch.setattr(classifier, "logits", lambda pixels: torch.full((len(pixels), 6), torch.nan))
    with pytest.raises(SemaugError, match="not finite"):
        list(predict(classifier, [photos / "00.png"]))


# ---------------------------------------------------------------------------------------------------------- output

PREDICTIONS = [
    Prediction("broken.png", 2, error='cannot read "it",\nreally'),
    Prediction("=1+1.png", 2, ("@home", "b,c"), (0.75, 1e-9)),
    Prediction("-x.png", 2, ("\tTab", 'quo"te'), (1 / 3, 0.25)),
    Prediction("süß\udcff\nline.png", 2, ("+plus", "\rreturn"), (0.5, 0.5)),
]


def read_csv(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_columns_for_each_rank_and_no_formulas(tmp_path):
    summary = write(PREDICTIONS, tmp_path / "new" / "out.csv", "csv")
    rows = read_csv(tmp_path / "new" / "out.csv")
    assert list(rows[0]) == ["path", "label", "probability", "label_2", "probability_2", "error"]
    assert rows[0]["error"] == 'cannot read "it",\nreally'
    assert rows[0]["label"] == rows[0]["probability_2"] == ""
    assert [row["path"] for row in rows] == ["broken.png", "'=1+1.png", "'-x.png", "süß\udcff\nline.png"]
    assert [row["label"] for row in rows[1:]] == ["'@home", "'\tTab", "'+plus"]
    assert [row["label_2"] for row in rows[1:]] == ["b,c", 'quo"te', "'\rreturn"]
    assert [float(row["probability"]) for row in rows[1:]] == pytest.approx([0.75, 1 / 3, 0.5], abs=1e-6)
    assert rows[1]["probability_2"] == "1e-09"
    assert (summary.count, summary.failed) == (4, 1)
    assert summary.rate == pytest.approx(summary.count / summary.seconds)


def test_the_table_reader_restores_the_names(tmp_path):
    names = [
        "=1+1.png",
        "-x.png",
        "@home.png",
        "\ttab.png",
        "'=quoted.png",
        "'plain.png",
        " space .png",
        "two\nlines.png",
    ]
    labels = ["=cmd|' /C calc'!A0", "+plus", "'-quoted", "'plain"] * 2
    for name in names:
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    predictions = [Prediction(name, 1, (label,), (1.0,)) for name, label in zip(names, labels, strict=True)]
    write(predictions, tmp_path / "out.csv")
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in cells)
    data = read_data(str(tmp_path / "out.csv"))
    train = data.splits["train"]
    assert [train.name(i) for i in range(len(train))] == names
    assert [data.classes[label] for label in train.labels] == labels


def test_json_lines_are_exact(tmp_path):
    summary = write(PREDICTIONS, tmp_path / "out.jsonl", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("ascii").splitlines()]
    for line, prediction in zip(lines, PREDICTIONS, strict=True):
        assert line["path"] == prediction.path
        assert line["error"] == prediction.error
        assert tuple(entry["label"] for entry in line["predictions"]) == prediction.labels
        assert tuple(entry["probability"] for entry in line["predictions"]) == prediction.probabilities
    assert (summary.count, summary.failed) == (4, 1)


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_standard_output_and_a_file_get_the_same_bytes(tmp_path, monkeypatch, format):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", newline=""))
    write(PREDICTIONS, None, format)
    write(PREDICTIONS, tmp_path / "file", format)
    assert out.getvalue() == (tmp_path / "file").read_bytes()


def test_names_cannot_control_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    hostile = [Prediction("\x1b[2J.png", 1, ("\x9b31m",), (0.5,))]
    for output, expected in ((Terminal(), "\\x1b[2J.png,\\x9b31m,0.5,"), (io.StringIO(), "\x1b[2J.png,\x9b31m,0.5,")):
        monkeypatch.setattr(sys, "stdout", output)
        write(hostile, None)
        assert output.getvalue().split("\r\n")[1] == expected


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "out.csv"
    old = "path,label,probability,error\n"
    target.write_text(old)

    def interrupted():
        yield PREDICTIONS[1]
        assert target.read_text() == old
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(interrupted(), target)
    assert target.read_text() == old
    assert list(tmp_path.iterdir()) == [target]


def test_without_predictions_the_table_has_only_a_header(tmp_path):
    assert write([], tmp_path / "out.csv").count == 0
    assert (tmp_path / "out.csv").read_bytes() == b"path,label,probability,error\r\n"


def test_an_unwritable_destination_is_an_error_before_any_work(tmp_path):
    def untouched():
        raise AssertionError("work was done")
        yield

    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "file" / "out.csv"):
        with pytest.raises(SemaugError, match="cannot write"):
            write(untouched(), target)
    with pytest.raises(SemaugError, match="csv or jsonl"):
        write(untouched(), tmp_path / "x", "xml")


def test_from_folder_to_table(classifier, photos, tmp_path):
    write(predict(classifier, expand([photos]), top_k=2), tmp_path / "out.csv")
    rows = read_csv(tmp_path / "out.csv")
    assert [row["path"] for row in rows] == [str(path) for path in expand([photos])]
    for row in rows:
        labels, probabilities = alone(classifier, row["path"])
        assert row["label"].removeprefix("'") == labels[0]
        assert float(row["probability_2"]) == pytest.approx(probabilities[1], abs=1e-4)


def test_a_list_with_a_name_that_is_too_long_is_predicted_and_one_without_lines_refused(
    classifier, photos, monkeypatch
):
    stdin(monkeypatch, b"x" * 5000 + b"\n" + os.fsencode(photos) + b"\n")
    first, *others = predict(classifier, expand(["-"]), 1)
    assert "File name too long" in first.error
    assert others
    assert all(prediction.error is None for prediction in others)
    stdin(monkeypatch, b"\0" * 10**6)
    with pytest.raises(SemaugError, match="a line on standard input has more than 65536 bytes"):
        list(expand(["-"]))
