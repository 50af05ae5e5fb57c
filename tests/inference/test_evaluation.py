"""Scores against a naive NumPy reference, and the evaluation of a whole split."""

import io
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from scipy.special import log_softmax
from sklearn.metrics import precision_recall_fscore_support
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from semaug.data.images import Preprocessing
from semaug.data.samples import ImageFiles
from semaug.inference import evaluation as module
from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import evaluate, match_classes, score
from semaug.inference.prediction import predict
from semaug.util.errors import DataError, SemaugError

# ------------------------------------------------------------------------------------------------- naive references


def naive_order(row):
    return sorted(range(len(row)), key=lambda c: (-row[c], c))


def naive_scores(probabilities, labels):
    count, classes = probabilities.shape
    orders = [naive_order(row) for row in probabilities]
    confusion = np.zeros((classes, classes), dtype=int)
    for order, label in zip(orders, labels, strict=True):
        confusion[label, order[0]] += 1
    present = [c for c in range(classes) if c in labels]
    class_accuracy = [
        np.mean([orders[i][0] == c for i in range(count) if labels[i] == c]) if c in present else None
        for c in range(classes)
    ]
    answers = [order[0] for order in orders]
    averages = precision_recall_fscore_support(labels, answers, labels=present, average="macro", zero_division=0)
    return {
        "macro_precision": averages[0],
        "macro_f1": averages[2],
        "top1": np.mean([order[0] == label for order, label in zip(orders, labels, strict=True)]),
        "top5": np.mean([label in order[:5] for order, label in zip(orders, labels, strict=True)]),
        "mean_class_accuracy": np.mean([class_accuracy[c] for c in present]),
        "cross_entropy": np.mean([-math.log(max(probabilities[i, labels[i]], 2**-126)) for i in range(count)]),
        "calibration_error": naive_calibration_error(probabilities, labels, orders),
    }, {"class_accuracy": class_accuracy, "confusion": confusion}


def entries(confusion):
    return [[t, p, int(confusion[t, p])] for t, p in np.argwhere(confusion).tolist()]


def naive_calibration_error(probabilities, labels, orders, bins=15):
    total = 0.0
    for b in range(bins):
        upper = (b + 1) / bins if b + 1 < bins else 1.1
        inside = [i for i, order in enumerate(orders) if b / bins <= probabilities[i, order[0]] < upper]
        if inside:
            confidence = np.mean([probabilities[i, orders[i][0]] for i in inside])
            accuracy = np.mean([orders[i][0] == labels[i] for i in inside])
            total += len(inside) / len(labels) * abs(accuracy - confidence)
    return total


@st.composite
def predictions(draw):
    """Probabilities, with many ties where they are eighths, and labels that leave classes out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, classes = draw(st.integers(1, 30)), draw(st.integers(2, 9))
    if draw(st.booleans()):
        probabilities = rng.multinomial(8, np.full(classes, 1 / classes), size=count) / 8
    else:
        probabilities = rng.dirichlet(np.full(classes, 0.3), size=count)
    labels = rng.integers(draw(st.integers(1, classes)), size=count)
    return probabilities.astype(np.float32), labels


def check_against_naive(probabilities, labels):
    scores = score(torch.tensor(probabilities), torch.tensor(labels))
    numbers, arrays = naive_scores(probabilities.astype(np.float64), labels)
    assert scores.numbers() == pytest.approx(numbers, abs=1e-5)
    assert scores.confusion.tolist() == entries(arrays["confusion"])
    assert list(scores.class_accuracy) == pytest.approx(arrays["class_accuracy"])


# ---------------------------------------------------------------------------------------------------------- scores


def test_intervals_are_those_of_resampled_images():
    random = np.random.default_rng(0)
    labels = np.sort(random.integers(4, size=60) ** 2 % 5)  # classes of different sizes
    probabilities = random.dirichlet(np.full(5, 0.4), size=60) + 0.4 * np.eye(5)[labels]
    scores = score(torch.tensor(probabilities / 1.4, dtype=torch.float32), torch.tensor(labels))
    right = probabilities.argmax(1) == labels

    def mean_of_classes(rows):
        return np.mean([right[rows][labels[rows] == c].mean() for c in np.unique(labels[rows])])

    drawn = [random.integers(60, size=60) for _ in range(4000)]
    for name, function in (("top1", lambda rows: right[rows].mean()), ("mean_class_accuracy", mean_of_classes)):
        expected = np.percentile([function(rows) for rows in drawn], (2.5, 97.5))
        np.testing.assert_allclose(scores.intervals[name], expected, atol=0.025)
    assert scores.intervals["top5"] == (1.0, 1.0)


@given(predictions())
def test_scores_equal_a_naive_numpy_reference(case):
    check_against_naive(*case)


def test_the_first_of_equally_probable_classes_is_predicted():
    probabilities = torch.full((8, 8), 1 / 8)
    scores = score(probabilities, torch.arange(8))
    assert scores.top1 == 1 / 8
    assert scores.top5 == 5 / 8
    assert scores.confusion.tolist() == [[label, 0, 1] for label in range(8)]


def test_classes_without_images_are_left_out_of_the_mean_accuracy():
    probabilities = torch.eye(4)[[0, 3, 1, 1]]
    scores = score(probabilities, torch.tensor([0, 0, 1, 1]))
    assert scores.class_accuracy == (0.5, 1.0, None, None)
    assert scores.mean_class_accuracy == 0.75


def test_top_5_of_two_classes_is_top_2():
    scores = score(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    assert (scores.top1, scores.top5) == (0.5, 1.0)
    assert scores.calibration_error == pytest.approx(0.5 * abs(1 - 0.9) + 0.5 * 0.8)


def test_a_confidence_of_1_is_in_the_last_bin():
    probabilities = np.array([[1.0, 0.0]] * 3 + [[0.95, 0.05]], dtype=np.float32)
    labels = np.array([0, 0, 1, 1])
    scores = score(torch.tensor(probabilities), torch.tensor(labels))
    assert scores.calibration_error == pytest.approx(abs(2 / 4 - (3 + 0.95) / 4), abs=1e-6)


def test_probabilities_rounded_above_1_are_not_treated_as_logits():
    probabilities = torch.eye(3)[[0, 1, 2]]
    assert score(probabilities * (1 + 1e-6), torch.arange(3)).calibration_error == pytest.approx(0, abs=1e-6)


def test_the_cross_entropy_of_probability_0_is_large_and_finite():
    assert 80 < score(torch.eye(2), torch.tensor([1, 0])).cross_entropy < 100


def test_the_cross_entropy_of_right_answers_is_0_without_a_sign():
    assert math.copysign(1, score(torch.eye(2), torch.arange(2)).cross_entropy) == 1


def test_scoring_allocates_no_tensor_of_classes_by_classes():
    class LargestTensor(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.numbers = max(self.numbers, *made, 0)
            return result

    probabilities, labels = torch.rand(30, 5000).softmax(1), torch.arange(30) * 100
    with LargestTensor() as largest:
        scores = score(probabilities, labels)
    assert largest.numbers <= probabilities.numel()
    assert int(scores.confusion[:, 2].sum()) == 30


@pytest.mark.parametrize(
    ("probabilities", "labels", "error", "match"),
    [
        (torch.ones(0, 3), torch.ones(0, dtype=torch.long), SemaugError, "no images"),
        (torch.ones(2, 1), torch.zeros(2, dtype=torch.long), SemaugError, "single class"),
        (torch.tensor([[math.nan, 1.0]]), torch.tensor([0]), SemaugError, "not finite"),
        (torch.eye(2), torch.tensor([0, 2]), ValueError, "from 0 to 1"),
        (torch.eye(2), torch.tensor([0, -1]), ValueError, "from 0 to 1"),
        (torch.eye(2), torch.tensor([0, 1, 1]), ValueError, "do not match"),
    ],
)
def test_invalid_probabilities_and_labels_are_errors(probabilities, labels, error, match):
    with pytest.raises(error, match=match):
        score(probabilities, labels)


# --------------------------------------------------------------------------------------------------------- classes


def test_classes_are_matched_by_name():
    assert match_classes(["a", "b", "c"], ["c", "a", "b"]) == (2, 0, 1)
    assert match_classes(["a", "b", "c"], ["b"]) == (1,)
    assert match_classes(["a_b", "a b"], ["a b", "a_b"]) == (1, 0)
    with pytest.raises(DataError, match="class 'a b' could be any of these of the model: 'a_b', 'a b'"):
        match_classes(["a_b", "a b", "c"], ["a b", "c"])


def test_unknown_classes_are_named():
    with pytest.raises(SemaugError, match=r"know 2 of the data's classes: 'X', 'Y'; it knows 'b', 'c' instead"):
        match_classes(["a", "b", "c"], ["X", "a", "Y"])
    with pytest.raises(SemaugError, match=r"7 of the data's classes: '0', '1', '2', '3', '4' and 2 more$"):
        match_classes(["a"], ["a", *map(str, range(7))])


# ------------------------------------------------------------------------------------------------------ evaluation

CLASSES = ("red", "green", "[bold]blue[/bold]")


class BrightestChannel(nn.Module):
    """Logits: the mean of each channel."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, images):
        return self.scale * images.mean((2, 3))


class Colours:
    """Images of one colour each; later ones load faster, so that threads finish out of order."""

    def __init__(self, colours, labels):
        self.colours, self.labels = colours, labels
        self.loaded, self.lock = 0, threading.Lock()

    def __len__(self):
        return len(self.colours)

    def load(self, i):
        time.sleep(0.002 * (i % 3 == 0))
        with self.lock:
            self.loaded += 1
        return Image.new("RGB", (20, 10), tuple(self.colours[i]))

    def name(self, i):
        return f"colour {i}"

    def fingerprint(self):
        return ""


@pytest.fixture
def classifier():
    preprocessing = Preprocessing(8, 6, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return Classifier(BrightestChannel().eval(), CLASSES, preprocessing, "brightest", {})


def colours(count=50, seed=0):
    rng = np.random.default_rng(seed)
    return Colours(rng.integers(256, size=(count, 3)).tolist(), rng.integers(3, size=count).tolist())


def expected_probabilities(samples):
    logits = 4 * (np.array(samples.colours) / 255 - 0.5) / 0.5
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.mark.parametrize("batch_size", [1, 7, 25, 64])
def test_an_evaluation_is_correct_for_every_batch_size(classifier, batch_size):
    samples, steps = colours(), []
    result = evaluate(classifier, samples, batch_size, lambda done, total: steps.append((done, total)))
    numbers, arrays = naive_scores(expected_probabilities(samples), np.array(samples.labels))
    assert result.count == 50
    assert result.scores.numbers() == pytest.approx(numbers, abs=1e-5)
    assert result.scores.confusion.tolist() == entries(arrays["confusion"])
    assert steps == [(min(50, done), 50) for done in range(batch_size, 50 + batch_size, batch_size)]


@pytest.mark.parametrize("tta", [None, "flip"])
def test_scores_and_predictions_do_not_underflow(classifier, tta, tmp_path):
    """Large logits, as of a temperature of 0.01: fp32 probabilities of all other classes are 0, and say nothing."""
    colours, files = ((0, 130, 255), (140, 0, 255)), (tmp_path / "one.png", tmp_path / "two.png")
    for colour, file in zip(colours, files, strict=True):
        Image.new("RGB", (20, 10), colour).save(file)
    samples = ImageFiles(tmp_path, files, (1, 1))
    classifier = replace(classifier, temperature=0.01, tta=tta)
    pixels = torch.from_numpy(np.stack([classifier.preprocessing.pixels(samples.load(i)) for i in range(2)]))
    assert (classifier.probabilities(pixels)[:, :2] == 0).all()
    expected = log_softmax(100 * 4 * 2 * np.array(colours) / 255, axis=1)
    result = evaluate(classifier, samples).scores
    assert result.cross_entropy == pytest.approx(-expected[:, 1].mean(), rel=1e-5)
    assert result.top_k == (0.0, 0.5, 1.0)
    answers = predict(classifier, files)
    assert [answer.labels for answer in answers] == [(CLASSES[2], "green", "red"), (CLASSES[2], "red", "green")]


def test_mistakes_and_confused_pairs_are_sorted_worst_first(classifier):
    samples = colours(200)
    result = evaluate(classifier, samples)
    probabilities = expected_probabilities(samples)
    wrong = [i for i in range(200) if probabilities[i].argmax() != samples.labels[i]]
    wrong.sort(key=lambda i: -probabilities[i].max())
    assert [mistake.name for mistake in result.mistakes] == [f"colour {i}" for i in wrong[: module.LISTED]]
    assert result.mistakes[0].true == CLASSES[samples.labels[wrong[0]]]
    assert result.mistakes[0].probability == pytest.approx(probabilities[wrong[0]].max(), abs=1e-5)
    counts = [pair.count for pair in result.confused]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == len(wrong)
    pair = result.confused[0]
    assert pair.share == pair.count / samples.labels.count(CLASSES.index(pair.true))


def test_labels_are_translated_to_the_classes_of_the_model(classifier):
    samples = Colours([(0, 0, 255), (0, 255, 0)], [0, 1])
    result = evaluate(classifier, samples, data_classes=(CLASSES[2], "green"))
    assert result.scores.top1 == 1
    assert result.scores.class_accuracy == (None, 1.0, 1.0)
    with pytest.raises(SemaugError, match="yellow"):
        evaluate(classifier, samples, data_classes=("green", "yellow"))


def test_at_most_two_batches_of_images_are_in_memory(classifier):
    samples, ahead = colours(100), []
    evaluate(classifier, samples, 4, lambda done, total: ahead.append(samples.loaded - done))
    assert max(ahead) <= 2 * 4


def test_the_error_for_an_unreadable_file_names_it(classifier, tmp_path: Path):
    Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    samples = ImageFiles(tmp_path, (tmp_path / "good.png", tmp_path / "bad.png"), (0, 1))
    with pytest.raises(SemaugError, match=r"bad\.png"):
        evaluate(classifier, samples)


def test_the_error_of_other_kinds_of_samples_names_the_image(classifier, monkeypatch):
    samples = colours(3)
    monkeypatch.setattr(samples, "load", lambda i: (_ for _ in ()).throw(OSError("disk on fire")))
    with pytest.raises(SemaugError, match="colour 0: disk on fire"):
        evaluate(classifier, samples)


def test_no_images_and_a_bad_batch_size_are_errors(classifier):
    with pytest.raises(SemaugError, match="no images"):
        evaluate(classifier, Colours([], []))
    with pytest.raises(SemaugError, match="`batch_size`"):
        evaluate(classifier, colours(3), 0)


def test_json_has_plain_types_and_the_whole_confusion_matrix(classifier):
    result = evaluate(classifier, Colours([(255, 0, 0), (255, 0, 0), (0, 255, 0)], [0, 1, 1]))
    content = result.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["count"] == 3
    assert content["top1"] == pytest.approx(2 / 3)
    assert content["confusion"] == [[0, 0, 1], [1, 0, 1], [1, 1, 1]]
    assert content["classes"][1] == {"name": "green", "images": 2, "accuracy": 0.5, "precision": 1.0, "f1": 2 / 3}
    assert content["classes"][2] == {"name": CLASSES[2], "images": 0, "accuracy": None, "precision": None, "f1": None}
    assert content["top_k"][1:] == [1.0, 1.0]
    assert content["most_confused"] == [{"true": "green", "predicted": "red", "count": 1, "share": 0.5}]
    assert content["worst_mistakes"][0]["name"] == "colour 1"


def test_the_tables_show_class_names_without_markup(classifier):
    result = evaluate(classifier, Colours([(255, 0, 0), (0, 255, 0)], [0, 2]))
    console = Console(file=io.StringIO(), width=100)
    console.print(result.table())
    text = console.file.getvalue()
    assert "50.00 %" in text
    assert "top-3 accuracy" in text
    assert text.count("[bold]blue[/bold]") == 2
    assert "1 class has no images: 'green'" in text


def test_without_mistakes_there_is_no_table_of_confused_classes(classifier):
    result = evaluate(classifier, Colours([(255, 0, 0)], [0]))
    console = Console(file=io.StringIO(), width=100)
    console.print(result.table())
    assert "most confused" not in console.file.getvalue()
    assert result.mistakes == ()


def test_the_calibration_error_is_that_of_torchmetrics():
    from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities = torch.randn(200, 7, generator=torch.Generator().manual_seed(0)).softmax(1)
    labels = torch.arange(200) % 7
    expected = multiclass_calibration_error(probabilities, labels, num_classes=7, n_bins=15, norm="l1")
    assert score(probabilities, labels).calibration_error == pytest.approx(float(expected), abs=1e-6)
