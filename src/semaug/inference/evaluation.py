"""Evaluation of a classifier on a split: scores, confused classes and the worst mistakes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from semaug.data.samples import Samples
from semaug.inference.classifier import Classifier
from semaug.inference.loop import decode_samples
from semaug.util import distributed
from semaug.util.errors import DataError, ModelError, SettingError
from semaug.util.names import class_title, counted, percent, printable, shown, some
from semaug.util.progress import ProgressCallback

LISTED = 20  # confused pairs and mistakes in an evaluation
SCORES: dict[str, tuple[str, Callable[[float], str]]] = {
    # label and text of each score that is one number; k is 5, or the number of classes if that is smaller
    "top1": ("top-1 accuracy", partial(percent, digits=2)),
    "top5": ("top-{k} accuracy", partial(percent, digits=2)),
    "mean_class_accuracy": ("mean accuracy of the classes", partial(percent, digits=2)),
    "macro_precision": ("mean precision of the classes", partial(percent, digits=2)),
    "macro_f1": ("mean F1 of the classes", partial(percent, digits=2)),
    "cross_entropy": ("cross-entropy", "{:.4f}".format),
    "calibration_error": ("expected calibration error", "{:.4f}".format),
}
_TABLE_ROWS = 10
_RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of predictions. If classes are equally probable, the first one counts as the more probable."""

    top1: float
    top5: float  # top-C if there are fewer than 5 classes
    mean_class_accuracy: float  # over the classes that have images, as are the next two; also called macro recall
    macro_precision: float
    macro_f1: float
    cross_entropy: float
    calibration_error: float  # expected, L1, over 15 bins of confidence
    class_images: tuple[int, ...]  # number of images of each class
    class_accuracy: tuple[float | None, ...]  # also called recall; None: a class without images
    class_precision: tuple[float | None, ...]  # None: a class that is never predicted, which counts as 0 in the mean
    class_f1: tuple[float | None, ...]  # None: a class without images
    top_k: tuple[float, ...]  # top-1, top-2, … accuracy, up to top-10
    intervals: dict[str, tuple[float, float]]  # of top1, top5 and mean_class_accuracy: 95 %, by bootstrap
    confusion: Tensor  # (K, 3) integers: true class, predicted class and count, for all counts above 0, in order

    def numbers(self) -> dict[str, float]:
        """The scores that are one number each, by name."""
        return {name: getattr(self, name) for name in SCORES}


def score(probabilities: Tensor, labels: Tensor) -> Scores:
    """Score class probabilities against labels.

    Args:
        probabilities: Predictions (N, C), C ≥ 2. Those below 1.2e-38 count as that, so that the cross-entropy is
            finite; :func:`evaluate` has the logits and needs no such limit.
        labels: True classes (N,), from 0 to C - 1.

    Returns:
        The scores.

    Raises:
        ValueError: If the shapes do not match or a label is out of range.
        SemaugError: If there are no images, there is a single class, or a probability is not finite.

    Example:
        >>> score(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])).top1
        0.5
    """
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"{tuple(probabilities.shape)} probabilities do not match {tuple(labels.shape)} labels")
    rows = probabilities.detach().cpu().double()
    logarithms = rows.clamp(torch.finfo(torch.float32).tiny, 1).log().where(rows.isfinite(), math.nan)
    return score_logarithms(logarithms, labels.detach().cpu().long())


def score_logarithms(log_probabilities: Tensor, labels: Tensor) -> Scores:
    """Like :func:`score`, from the logarithms of probabilities, (N, C) in fp64 on the CPU."""
    classes = log_probabilities.shape[1]
    _check_labels(labels, classes)
    return _total_scores(_image_scores(log_probabilities, labels), labels, classes)


def _check_labels(labels: Tensor, classes: int) -> None:
    if len(labels) == 0:
        raise DataError("there are no images to evaluate")
    if classes < 2:
        raise ModelError("a model with a single class cannot be evaluated")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels must be from 0 to {classes - 1}")


def _image_scores(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """The per-image values from which all scores are computed, (N, 4) in fp64, for any number of classes.

    The most probable class, its probability (NaN if an output is not finite), the rank of the true class (0 for the
    most probable), and the logarithm of the probability of the true class, in which nothing underflows.
    """
    rows = log_probabilities
    predicted, own = rows.argmax(1), rows.gather(1, labels[:, None])
    confidence = rows.gather(1, predicted[:, None])[:, 0].exp().float()
    confidence = confidence.where(rows.isfinite().all(1), math.nan)
    # of equally probable classes the first comes first, which torch.topk does not guarantee
    earlier = torch.arange(rows.shape[1]) < labels[:, None]
    rank = ((rows > own) | ((rows == own) & earlier)).sum(1)
    return torch.stack([column.double() for column in (predicted, confidence, rank, own[:, 0])], 1)


def _calibration_error(confidence: Tensor, right: Tensor) -> float:
    """The expected calibration error, ``Σ_b |Σ_{i in b} (right_i − confidence_i)| / N`` over 15 bins of confidence."""
    confidence = confidence.contiguous()
    bins = torch.bucketize(confidence, torch.linspace(0, 1, 16, dtype=confidence.dtype)[1:-1], right=True)
    gaps = torch.bincount(bins, right.to(confidence.dtype) - confidence, minlength=15)
    return float(gaps.abs().sum()) / len(confidence)


def _total_scores(image_scores: Tensor, labels: Tensor, classes: int) -> Scores:
    if image_scores.isnan().any():
        raise ModelError("the network's outputs are not finite numbers: its training has diverged")
    count = len(image_scores)
    predicted, confidence, rank, own = image_scores[:, 0].long(), *image_scores[:, 1:].T
    right = predicted == labels
    places, counts = torch.unique(labels * classes + predicted, return_counts=True)
    images = torch.bincount(labels, minlength=classes).tolist()
    correct = torch.bincount(labels[right], minlength=classes).tolist()
    class_accuracy = tuple(c / n if n else None for c, n in zip(correct, images, strict=True))
    answers = torch.bincount(predicted, minlength=classes).tolist()
    precision = tuple(c / n if n else None for c, n in zip(correct, answers, strict=True))
    f1 = tuple(2 * c / (n + a) if n else None for c, n, a in zip(correct, images, answers, strict=True))
    present = [i for i, number in enumerate(images) if number]

    def mean(values: Sequence[float | None]) -> float:
        return sum(values[i] or 0.0 for i in present) / len(present)

    return Scores(
        top1=sum(correct) / count,
        top5=int((rank < 5).sum()) / count,
        mean_class_accuracy=mean(class_accuracy),
        macro_precision=mean(precision),
        macro_f1=mean(f1),
        cross_entropy=(0.0 - float(own.sum())) / count,
        calibration_error=_calibration_error(confidence, right),
        class_images=tuple(images),
        class_accuracy=class_accuracy,
        class_precision=precision,
        class_f1=f1,
        top_k=tuple(int((rank < k).sum()) / count for k in range(1, min(10, classes) + 1)),
        intervals=_intervals(labels, rank),
        confusion=torch.stack([places // classes, places % classes, counts], 1),
    )


def _intervals(labels: Tensor, rank: Tensor) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap over the images, with 1,000 resamples or a few more.

    To resample images is to draw how many of each class are right, among the first five, or neither, from a multinomial
    distribution, however many images there are.
    """
    own = labels.unique(return_inverse=True)[1]
    cells = torch.bincount(3 * own + (rank > 0).long() + (rank >= 5).long(), minlength=3 * (int(own.max()) + 1)).numpy()
    random, count, rows = np.random.default_rng(0), len(labels), []
    at_once = max(1, min(_RESAMPLES, 2_000_000 // len(cells)))  # so that memory stays small with many classes
    for size in [at_once] * -(-_RESAMPLES // at_once):
        drawn = random.multinomial(count, cells / count, size).reshape(size, -1, 3)
        total = drawn.sum(2)
        of_classes = (drawn[:, :, 0] / total.clip(1)).sum(1) / (total > 0).sum(1)
        rows.append(np.stack([drawn[:, :, 0].sum(1) / count, drawn[:, :, :2].sum((1, 2)) / count, of_classes], 1))
    low, high = np.percentile(np.concatenate(rows), (2.5, 97.5), axis=0).tolist()
    return dict(zip(("top1", "top5", "mean_class_accuracy"), zip(low, high, strict=True), strict=True))


@dataclass(frozen=True)
class ConfusedPair:
    """Images of one class that were classified as another."""

    true: str
    predicted: str
    count: int
    share: float  # of the images of the true class


@dataclass(frozen=True)
class Mistake:
    """An image that was classified wrongly, and the probability of the wrong class."""

    name: str
    true: str
    predicted: str
    probability: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of :func:`evaluate`; classes are those of the classifier."""

    count: int  # of images
    classes: tuple[str, ...]
    scores: Scores
    confused: tuple[ConfusedPair, ...]  # the most frequent first
    mistakes: tuple[Mistake, ...]  # the most confident first

    def to_json(self) -> dict[str, Any]:
        """Everything in plain types; the confusion matrix as a list of [true, predicted, count] without zeros."""
        scores, columns = self.scores, ("name", "images", "accuracy", "precision", "f1")
        values = self.classes, scores.class_images, scores.class_accuracy, scores.class_precision, scores.class_f1
        return {
            "count": self.count,
            **scores.numbers(),
            "top_k": list(scores.top_k),
            "intervals": {name: list(ends) for name, ends in scores.intervals.items()},
            "classes": [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)],
            "confusion": self.scores.confusion.tolist(),
            "most_confused": [vars(pair) for pair in self.confused],
            "worst_mistakes": [vars(mistake) for mistake in self.mistakes],
        }

    def table(self) -> Group:
        """Tables for the terminal: the scores, the worst classes, and the most confused pairs."""
        title, k = f"{self.count} images, {len(self.classes)} classes", min(5, len(self.classes))
        own, numbers = self.scores, self.scores.numbers()
        scores = []
        for name, (label, write) in SCORES.items():
            ends = " to ".join(map(write, own.intervals.get(name, ())))
            scores.append((label.format(k=k), write(numbers[name]), ends))
        accuracies = sorted((share, i) for i, share in enumerate(own.class_accuracy) if share is not None)
        worst = []
        for recall, i in accuracies[:_TABLE_ROWS]:
            shares = (recall, own.class_precision[i], own.class_f1[i])
            texts = ["–" if share is None else percent(share) for share in shares]
            worst.append((self.classes[i], str(own.class_images[i]), *texts))
        missing = [name for name, images in zip(self.classes, own.class_images, strict=True) if not images]
        pairs = [(p.true, p.predicted, str(p.count), percent(p.share)) for p in self.confused[:_TABLE_ROWS]]
        tables: list[Table | Text] = [_table(title, ["score"], ["value", "95 % interval"], scores)]
        if missing:
            verb = "has" if len(missing) == 1 else "have"
            tables.append(Text(f"{counted(len(missing), 'class')} {verb} no images: {some(missing)}"))
        tables.append(_table("worst classes", ["class"], ["images", "recall", "precision", "F1"], worst))
        if pairs:
            tables.append(_table("most confused", ["class", "classified as"], ["images", "of the class"], pairs))
        return Group(*tables)


def _table(title: str, names: list[str], numbers: list[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*names, title=title)
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # as Text: brackets in a class name are not markup
    return table


def match_classes(model_classes: Sequence[str], data_classes: Sequence[str]) -> tuple[int, ...]:
    """Find for each class of the data, by name, the index of the model's output.

    Args:
        model_classes: Names of the model's classes, in the order of its outputs.
        data_classes: Names of the data's classes, in the order of its labels; some of the model's may be missing.

    Returns:
        The index of the output for each class of the data.

    Raises:
        DataError: If the model does not have a class of the data, or has several that it could be.
    """
    index = {name: i for i, name in enumerate(model_classes)}
    unknown = [name for name in data_classes if name not in index]
    if unknown:
        known = set(data_classes)
        others = [name for name in model_classes if name not in known]
        instead = f"; it knows {some(others)} instead" if others else ""
        raise DataError(f"the model does not know {len(unknown)} of the data's classes: {some(unknown)}{instead}")
    titles, own = Counter(map(class_title, model_classes)), Counter(map(class_title, data_classes))
    unclear = next((name for name in data_classes if titles[class_title(name)] > own[class_title(name)]), None)
    if unclear is not None:  # as "a b", which may stand for a folder a_b, if the model knows "a b" and "a_b"
        alike = [name for name in model_classes if class_title(name) == class_title(unclear)]
        raise DataError(f"the data's class {shown(unclear)} could be any of these of the model: {some(alike)}")
    return tuple(index[name] for name in data_classes)


def evaluate(
    classifier: Classifier,
    samples: Samples,
    batch_size: int = 64,
    progress: ProgressCallback | None = None,
    *,
    data_classes: Sequence[str] | None = None,
    workers: int | None = None,
) -> Evaluation:
    """Classify all images of a split and score the result.

    Memory holds two batches of images and four numbers per image. Under torch.distributed each rank classifies its
    share of the images, and all ranks have the result.

    Args:
        classifier: The classifier.
        samples: The split; its ``load`` must be thread-safe.
        batch_size: Images per batch, ≥ 1.
        progress: Called after each batch with the number of images done and their total.
        data_classes: The classes that the labels index, matched with the classifier's by name; None: its own.
        workers: Threads that decode images; None: one for each core, at most 8.

    Returns:
        Scores, confused classes and the worst mistakes.

    Raises:
        SettingError: If the batch size is below 1.
        DataError: If there are no images, one cannot be read, or the classifier does not know a class.
        ModelError: If the classifier has a single class, or its outputs are not finite.

    Example:
        >>> evaluate(classifier, read_data("photos").splits["test"]).scores.top1  # doctest: +SKIP
    """
    if batch_size < 1:
        raise SettingError(f"`batch_size` must be at least 1, not {batch_size}")
    classes = classifier.classes
    labels = torch.from_numpy(np.array(samples.labels, dtype=np.int64))
    if data_classes is not None:
        labels = torch.tensor(match_classes(classes, data_classes), dtype=torch.long)[labels]
    _check_labels(labels, len(classes))
    own = distributed.rank_slice(len(samples))
    done, image_scores = own.start, torch.zeros(len(samples), 4, dtype=torch.float64)
    for pixels in decode_samples(samples, range(own.start, own.stop), classifier.preprocessing, batch_size, workers):
        rows = slice(done, done + len(pixels))
        image_scores[rows] = _image_scores(classifier.log_probabilities(pixels), labels[rows])
        done += len(pixels)
        if progress is not None:
            progress(done - own.start, own.stop - own.start)
    [image_scores] = distributed.sum_over_ranks([image_scores])
    scores = _total_scores(image_scores, labels, len(classes))
    errors = scores.confusion[scores.confusion[:, 0] != scores.confusion[:, 1]]
    frequent = errors[errors[:, 2].argsort(descending=True, stable=True)][:LISTED].tolist()
    predicted, confidence = image_scores[:, 0].long(), image_scores[:, 1]
    wrong = (predicted != labels).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:LISTED].tolist()
    return Evaluation(
        count=len(samples),
        classes=classes,
        scores=scores,
        confused=tuple(ConfusedPair(classes[t], classes[p], n, n / scores.class_images[t]) for t, p, n in frequent),
        mistakes=tuple(
            Mistake(samples.name(i), classes[int(labels[i])], classes[int(predicted[i])], float(confidence[i]))
            for i in worst
        ),
    )
