"""Memory does not grow with the number of images or steps. load.py is the long form, by the command line."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import load
from semaug.data.cache import decoded
from semaug.data.check import check_data
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import DataSet
from semaug.inference.classifier import Classifier
from semaug.inference.prediction import expand, predict, write
from semaug.inference.runs import MAX_CLASSES
from semaug.meta.learner import Order
from semaug.network.models import build_model
from semaug.report.canvas import to_svg
from semaug.report.charts import confusion_matrix

SIZE = load.Size(classes=50, train=16, test=4)
SETTINGS = Preprocessing(load.RESIZE, load.CROP)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load.image_folder(tmp_path_factory.mktemp("load") / "images", SIZE)


@pytest.fixture(scope="module")
def data(images: Path) -> DataSet:
    return read_data(str(images))


def peak(function: Callable[[], object]) -> int:
    """Most bytes that Python and NumPy allocated during a call."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_predictions_of_many_files_need_no_more_memory_than_those_of_few(images: Path, tmp_path: Path) -> None:
    classes = tuple(f"class_{label:04}" for label in range(SIZE.classes))
    classifier = Classifier(build_model("small", SIZE.classes, SETTINGS.crop).eval(), classes, SETTINGS, "small", {})

    def used(count: int, calls: int = 2) -> int:
        """The least of several calls: how many images are decoded ahead is random, and only adds to it."""
        folder = load.flat_folder(tmp_path / str(count), images, count)
        table = tmp_path / f"{count}.csv"

        def once() -> int:
            most = peak(lambda: write(predict(classifier, expand([folder]), batch_size=16, workers=1), table))
            assert len(table.read_text().splitlines()) == 1 + count
            return most

        return min(once() for _ in range(calls))

    used(50, calls=1)  # imports and the like
    some = used(150)
    assert used(750) - some < 200_000, "the decoded images have 2 300 000 bytes, and the rows 370 000"


def test_a_check_keeps_no_images(data: DataSet) -> None:
    assert peak(lambda: check_data(data)) < load.names_bound(SIZE), "the images have 3 900 000 bytes"


def test_images_decoded_into_the_cache_are_not_kept_in_memory(data: DataSet, tmp_path: Path) -> None:
    train = data.splits["train"]
    assert peak(lambda: decoded(train, SETTINGS, tmp_path)) < load.names_bound(SIZE)
    assert len(decoded(train, SETTINGS, tmp_path)) == SIZE.classes * SIZE.train


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_half_steps_leave_no_tensors_behind(order: Order) -> None:
    (before, _), (after, _) = load.half_steps(order, (6, 16))
    assert after == before


@pytest.mark.parametrize("classes", [2000, 10_000, MAX_CLASSES])
def test_a_confusion_matrix_of_many_classes_stays_small(classes: int) -> None:
    predicted = torch.randint(classes, (10_000,)).tolist()
    entries = [(i % classes, answer, 1) for i, answer in enumerate(predicted)]
    figure = confusion_matrix([f"class {i}" for i in range(classes)], entries)
    assert len(to_svg(figure, "matrix")) < 500_000
