"""How good a classifier is on a split: scores, the classes that it confuses, and its worst mistakes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.inference.predict import default_workers, in_order
from semaug.inference.runs import Classifier
from semaug.util import distributed
from semaug.util.errors import SemaugError

CALIBRATION_BINS = 15
LISTED = 20  # confused pairs and mistakes that an evaluation keeps
_TABLE_ROWS = 10
_CHUNK = 2**24  # probabilities that are looked at at a time, as that needs several times their memory
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of predictions. Of equally probable classes, the first one counts as the more probable."""

    top1: float
    top5: float  # top-C where there are fewer classes than 5
    mean_class_accuracy: float  # over the classes that have images
    cross_entropy: float
    calibration_error: float  # expected, L1, over 15 bins of confidence
    class_accuracy: tuple[float | None, ...]  # None: a class without images
    confusion: Tensor  # (K, 3) whole numbers: true class, predicted class and how often, where that is not 0, in order

    def numbers(self) -> dict[str, float]:
        """The scores that are one number each."""
        return {
            "top1": self.top1,
            "top5": self.top5,
            "mean_class_accuracy": self.mean_class_accuracy,
            "cross_entropy": self.cross_entropy,
            "calibration_error": self.calibration_error,
        }


def score(probabilities: Tensor, labels: Tensor) -> Scores:
    """Scores of class probabilities (N, C) against labels (N,)."""
    _check(probabilities, labels)
    rows = max(1, _CHUNK // probabilities.shape[1])
    chunks = zip(probabilities.split(rows), labels.split(rows), strict=True)
    return _scores(torch.cat([_looked_at(*chunk) for chunk in chunks]), labels, probabilities.shape[1])


def _looked_at(probabilities: Tensor, labels: Tensor) -> Tensor:
    """All that scores are made of, (N, 4) in fp64, which does not grow with the number of classes.

    The class that is most probable, its probability (NaN where the network's output is no number), the place of the
    true class, 0 for the most probable, and its probability.
    """
    rows, truth = probabilities.detach().cpu().float().clamp(0, 1), labels.detach().cpu().long()
    predicted = rows.argmax(1)
    confidence = rows.gather(1, predicted[:, None])[:, 0].where(
        probabilities.detach().cpu().isfinite().all(1), math.nan
    )
    columns = [predicted, confidence, _rank(rows, truth), rows.gather(1, truth[:, None])[:, 0]]
    return torch.stack([column.double() for column in columns], 1)


def _scores(seen: Tensor, labels: Tensor, classes: int) -> Scores:
    """Scores of what :func:`_looked_at` saw of all images."""
    from torchmetrics.classification import BinaryCalibrationError

    if seen.isnan().any():
        raise SemaugError("the network's outputs are not finite numbers: its training has diverged")
    count, labels = len(seen), labels.cpu().long()
    predicted, confidence, rank, true_probability = seen[:, 0].long(), *seen[:, 1:].T
    right = predicted == labels
    # under torch.distributed it would add up what every rank has in full
    calibration = BinaryCalibrationError(n_bins=CALIBRATION_BINS, norm="l1", sync_on_compute=False)
    # torchmetrics takes values above 1 for logits, and has an extra bin for 1: the last one is for numbers below
    calibration.update(confidence.float().clamp(max=_BELOW_ONE), right)
    places, counts = torch.unique(labels * classes + predicted, return_counts=True)
    images = torch.bincount(labels, minlength=classes).tolist()
    correct = torch.bincount(labels[right], minlength=classes).tolist()
    class_accuracy = tuple(c / n if n else None for c, n in zip(correct, images, strict=True))
    present = [accuracy for accuracy in class_accuracy if accuracy is not None]
    return Scores(
        top1=sum(correct) / count,
        top5=int((rank < 5).sum()) / count,
        mean_class_accuracy=sum(present) / len(present),
        cross_entropy=-float(true_probability.clamp(min=torch.finfo(torch.float32).tiny).log().sum()) / count,
        calibration_error=float(calibration.compute()),
        class_accuracy=class_accuracy,
        confusion=torch.stack([places // classes, places % classes, counts], 1),
    )


def _check(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"{tuple(probabilities.shape)} probabilities do not go with {tuple(labels.shape)} labels")
    count, classes = probabilities.shape
    if count == 0:
        raise SemaugError("there are no images to evaluate")
    if classes < 2:
        raise SemaugError("there is nothing to evaluate with a single class")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels must be from 0 to {classes - 1}")


def _rank(rows: Tensor, truth: Tensor) -> Tensor:
    """The place of the true class, 0 for the most probable; of equals the first wins, which torch.topk leaves open."""
    own = rows.gather(1, truth[:, None])
    earlier = torch.arange(rows.shape[1]) < truth[:, None]
    return ((rows > own) | ((rows == own) & earlier)).sum(1)


@dataclass(frozen=True)
class ConfusedPair:
    """Images of one class that were taken for another."""

    true: str
    predicted: str
    count: int
    share: float  # of the images of the true class


@dataclass(frozen=True)
class Mistake:
    """An image that was classified wrongly, and how sure the classifier was."""

    name: str
    true: str
    predicted: str
    probability: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What :func:`evaluate` found; classes are those of the classifier."""

    count: int
    classes: tuple[str, ...]
    scores: Scores
    confused: tuple[ConfusedPair, ...]  # the most frequent first
    mistakes: tuple[Mistake, ...]  # the most confident first

    def to_json(self) -> dict[str, Any]:
        """All of it in plain types; of the confusion matrix the entries that are not 0: [true, predicted, count]."""
        images = self._images()
        return {
            "count": self.count,
            **self.scores.numbers(),
            "classes": [
                {"name": name, "images": n, "accuracy": accuracy}
                for name, n, accuracy in zip(self.classes, images, self.scores.class_accuracy, strict=True)
            ],
            "confusion": self.scores.confusion.tolist(),
            "most_confused": [vars(pair) for pair in self.confused],
            "worst_mistakes": [vars(mistake) for mistake in self.mistakes],
        }

    def _images(self) -> list[int]:
        """How many images each class has."""
        true, _, counts = self.scores.confusion.T
        return torch.zeros(len(self.classes), dtype=torch.long).index_add(0, true, counts).tolist()

    def table(self) -> Group:
        """Tables for a person: the scores, the worst classes, and the most confused pairs."""
        return Group(self._headline(), self._worst_classes(), *([self._confused()] if self.confused else []))

    def _headline(self) -> Table:
        scores = self.scores
        tops = min(5, len(self.classes))
        table = Table(title=f"{self.count} images, {len(self.classes)} classes")
        table.add_column("score")
        table.add_column("value", justify="right")
        table.add_row("top-1 accuracy", f"{scores.top1:.2%}")
        table.add_row(f"top-{tops} accuracy", f"{scores.top5:.2%}")
        table.add_row("mean accuracy of the classes", f"{scores.mean_class_accuracy:.2%}")
        table.add_row("cross-entropy", f"{scores.cross_entropy:.4f}")
        table.add_row("calibration error", f"{scores.calibration_error:.4f}")
        return table

    def _worst_classes(self) -> Table:
        images = self._images()
        known = [(accuracy, i) for i, accuracy in enumerate(self.scores.class_accuracy) if accuracy is not None]
        table = Table(title="worst classes")
        table.add_column("class")
        table.add_column("images", justify="right")
        table.add_column("accuracy", justify="right")
        for accuracy, i in sorted(known)[:_TABLE_ROWS]:
            # as Text: a name in brackets is not markup
            table.add_row(Text(self.classes[i]), str(images[i]), f"{accuracy:.1%}")
        return table

    def _confused(self) -> Table:
        table = Table(title="most confused")
        table.add_column("class")
        table.add_column("taken for")
        table.add_column("images", justify="right")
        table.add_column("of the class", justify="right")
        for pair in self.confused[:_TABLE_ROWS]:
            table.add_row(Text(pair.true), Text(pair.predicted), str(pair.count), f"{pair.share:.1%}")
        return table


def match_classes(model_classes: Sequence[str], data_classes: Sequence[str]) -> tuple[int, ...]:
    """For each class of the data the index of the model's output; the data may lack classes, but not have others."""
    index = {name: i for i, name in enumerate(model_classes)}
    unknown = [name for name in data_classes if name not in index]
    if unknown:
        listed = ", ".join(unknown[:5]) + (" …" if len(unknown) > 5 else "")
        known = set(data_classes)
        missing = [name for name in model_classes if name not in known]
        others = f"; it knows {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''} instead" if missing else ""
        raise SemaugError(f"the model does not know {len(unknown)} of the data's classes: {listed}{others}")
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

    The labels are indices of `data_classes`, which are matched with the classifier's by name; None: of the
    classifier's own. Images are decoded in threads (`samples.load` must bear that) while the network computes. In
    memory are two batches of images, and four numbers for each image, however many classes there are. Where there are
    several ranks, each looks at its share of the images, and all have the result.
    """
    if batch_size < 1:
        raise SemaugError(f"the batch size must be at least 1, not {batch_size}")
    if len(samples) == 0:
        raise SemaugError("there are no images to evaluate")
    labels = torch.from_numpy(np.array(samples.labels, dtype=np.int64))
    if data_classes is not None:
        labels = torch.tensor(match_classes(classifier.classes, data_classes))[labels]
    if len(classifier.classes) < 2:
        raise SemaugError("there is nothing to evaluate with a single class")
    seen = _seen(classifier, samples, labels, batch_size, progress, workers)
    scores = _scores(seen, labels, len(classifier.classes))
    return Evaluation(
        count=len(samples),
        classes=classifier.classes,
        scores=scores,
        confused=_confused_pairs(scores.confusion, classifier.classes),
        mistakes=_worst_mistakes(seen, labels, samples, classifier.classes),
    )


def _seen(
    classifier: Classifier,
    samples: Samples,
    labels: Tensor,
    batch_size: int,
    progress: ProgressCallback | None,
    workers: int | None,
) -> Tensor:
    """What :func:`_looked_at` sees of all images."""

    def decode(i: int) -> npt.NDArray[np.uint8]:
        try:
            return classifier.preprocessing.pixels(samples.load(i))
        except (OSError, ValueError, SyntaxError) as error:  # of kinds of samples that do not report it themselves
            raise SemaugError(f"cannot read the image {samples.name(i)}: {error}") from error

    workers = default_workers() if workers is None else max(1, workers)
    own = distributed.rank_slice(len(samples))
    images = in_order(decode, range(own.start, own.stop), workers, ahead=2 * batch_size)
    seen = torch.zeros(len(samples), 4, dtype=torch.float64)
    done = own.start
    while batch := list(islice(images, batch_size)):
        rows = slice(done, done + len(batch))
        seen[rows] = _looked_at(classifier.probabilities(torch.from_numpy(np.stack(batch))), labels[rows])
        done += len(batch)
        if progress is not None:
            progress(done - own.start, own.stop - own.start)
    return distributed.sum_over_ranks([seen])[0]


def _confused_pairs(confusion: Tensor, classes: tuple[str, ...]) -> tuple[ConfusedPair, ...]:
    true, predicted, counts = confusion.T
    images = torch.zeros(len(classes), dtype=torch.long).index_add(0, true, counts)
    errors = confusion[true != predicted]
    first = errors[errors[:, 2].argsort(descending=True, stable=True)][:LISTED]  # of equals the first by class
    return tuple(ConfusedPair(classes[t], classes[p], n, n / int(images[t])) for t, p, n in first.tolist())


def _worst_mistakes(seen: Tensor, labels: Tensor, samples: Samples, classes: tuple[str, ...]) -> tuple[Mistake, ...]:
    predicted, confidence = seen[:, 0].long(), seen[:, 1]
    wrong = (predicted != labels).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:LISTED]
    return tuple(
        Mistake(samples.name(i), classes[int(labels[i])], classes[int(predicted[i])], float(confidence[i]))
        for i in worst.tolist()
    )
