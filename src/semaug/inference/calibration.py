"""Calibration: probabilities that match the share of right answers, and the rejection of uncertain answers.

A network that fits its training images is overconfident. One number, the temperature T, corrects this: the
probabilities become ``softmax(logits / T)``, with T such that the cross-entropy on the validation images is smallest
(Guo et al., ICML 2017). The order of the classes, and so the accuracy, stays the same.

calibration.json also holds the confidence of every answer on these images. For any permitted share of wrong answers
they give the confidence below which an answer is rejected.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest
from torch import Tensor
from torch.nn import functional as F

from semaug.data.samples import Samples
from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import match_classes, score_logarithms
from semaug.inference.loop import decode_samples
from semaug.inference.manifest import add, read_manifest
from semaug.inference.runs import Calibration, Reliability
from semaug.util.errors import DataError, ModelError, RunError, SettingError
from semaug.util.files import write_json
from semaug.util.locks import locked
from semaug.util.names import percent
from semaug.util.progress import ProgressCallback

BINS = 15
LIMITS = 0.01, 100.0  # of the temperature


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Find the temperature with the smallest cross-entropy, which is convex in 1/T.

    Args:
        logits: Logits (N, C).
        labels: True classes (N,).

    Returns:
        T, from 0.01 to 100. 1 if every answer is right: the smaller T, the smaller is the cross-entropy then, and every
        probability would become 1.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 2)  # a probability of 3/4
        1.82
    """
    wide = logits.double()
    if bool((wide.argmax(1) == labels).all()):
        return 1.0

    def loss(log_temperature: float) -> float:
        return float(F.cross_entropy(wide / np.exp(log_temperature), labels))

    best = minimize_scalar(loss, bounds=np.log(LIMITS), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(best.x))


def calibrate(
    classifier: Classifier,
    samples: Samples,
    batch_size: int = 64,
    progress: ProgressCallback | None = None,
    *,
    data_classes: Sequence[str] | None = None,
) -> Calibration:
    """Fit the temperature of a run, set it in the classifier and write calibration.json.

    Args:
        classifier: The classifier of a run directory.
        samples: The validation images of the run.
        batch_size: Images per batch, ≥ 1.
        progress: Called after each batch with the number of images done and their total.
        data_classes: The classes that the labels index, matched with the classifier's by name; None: its own.

    Returns:
        What calibration.json holds.

    Raises:
        RunError: If the classifier is not that of a run directory.
        DataError: If there are no images, or one cannot be read.
        ModelError: If the network's outputs are not finite.
    """
    folder = classifier.folder
    if folder is None or "run" not in read_manifest(folder):
        raise RunError(f"{folder or classifier.name} is not a run directory; calibrate the run, and export it again")
    if len(samples) == 0:
        raise DataError(f"{folder} held out no validation images to calibrate with")
    parts: list[Tensor] = []
    for pixels in decode_samples(samples, range(len(samples)), classifier.preprocessing, batch_size):
        parts.append(classifier.logits(pixels))
        if progress is not None:
            progress(sum(map(len, parts)), len(samples))
    logits, classes = torch.cat(parts), classifier.classes
    labels = torch.tensor(match_classes(classes, data_classes or classes))[list(samples.labels)]
    if not logits.isfinite().all():
        raise ModelError("the network's outputs are not finite numbers: its training has diverged")
    temperature = fit_temperature(logits, labels)
    before, after = ((logits.double() / divisor).log_softmax(1) for divisor in (1.0, temperature))
    confidence, predicted = after.exp().float().amax(1), logits.argmax(1)
    content: Calibration = {
        "temperature": temperature,
        "images": len(samples),
        "before": _reliability(before, labels),
        "after": _reliability(after, labels),
        "right": _rounded(confidence[predicted == labels]),
        "wrong": _rounded(confidence[predicted != labels]),
    }
    with locked(folder):
        write_json(folder / "calibration.json", content)
        add(folder, "calibration.json")
    classifier.temperature = temperature
    return content


def _rounded(confidences: Tensor) -> list[float]:
    """The confidences in descending order, with six digits; rounded down, so that each reaches itself as threshold."""
    return [math.floor(value * 1e6) / 1e6 for value in confidences.clamp(0, 1).sort(descending=True).values.tolist()]


def _reliability(log_probabilities: Tensor, labels: Tensor) -> Reliability:
    confidence, predicted = (column.numpy() for column in log_probabilities.exp().float().max(1))
    places = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins: list[tuple[int, float, float]] = []
    for inside in (places == place for place in range(BINS)):
        count, right = int(inside.sum()), (predicted == labels.numpy())[inside]
        bins.append((count, float(confidence[inside].mean()), float(right.mean())) if count else (0, 0.0, 0.0))
    scores = score_logarithms(log_probabilities, labels)
    return {"cross_entropy": scores.cross_entropy, "calibration_error": scores.calibration_error, "bins": bins}


@dataclass(frozen=True)
class Rejection:
    """The confidence from which answers are accepted, and its effect on the validation images."""

    threshold: float
    images: int
    accepted: int
    wrong: int  # of the accepted ones

    def __str__(self) -> str:
        low, high = binomtest(self.wrong, self.accepted).proportion_ci()
        return (
            f"answers are accepted from a confidence of {self.threshold:.3f}: of the {self.images} validation images "
            f"{percent(self.accepted / self.images)} are, and {percent(self.wrong / self.accepted)} of those are wrong "
            f"(95 % interval {percent(low)} to {percent(high)})"
        )


def choose_threshold(calibration: Calibration, error: float) -> Rejection:
    """Choose the lowest threshold of confidence at which few of the accepted answers are wrong.

    Args:
        calibration: Calibration of a run.
        error: Largest share of wrong answers among the accepted ones, on the validation images; from 0, below 1.

    Returns:
        The threshold, and its effect on the validation images.

    Raises:
        SettingError: If the error is out of range, or no threshold reaches it.

    Example:
        >>> choose_threshold({"temperature": 1.0, "images": 4, "right": [0.9, 0.8, 0.4], "wrong": [0.5]}, 0.1).threshold
        0.8
    """
    if not 0 <= error < 1:
        raise SettingError(f"`reject` is a share of wrong answers, from 0 and below 1, not {error:g}")
    confidence = np.array([*calibration["right"], *calibration["wrong"]])
    order = np.argsort(-confidence, kind="stable")
    confidence, is_wrong = confidence[order], order >= len(calibration["right"])
    wrong = np.cumsum(is_wrong)
    is_last = np.append(confidence[1:] < confidence[:-1], True)  # of equal confidences, which are accepted together
    reached = np.flatnonzero(is_last & (wrong <= error * np.arange(1, len(wrong) + 1) + 1e-9))
    if len(reached) == 0:
        raise SettingError(f"of the validation answers even the most confident are wrong in more than {percent(error)}")
    last = int(reached[-1])
    return Rejection(float(confidence[last]), len(confidence), last + 1, int(wrong[last]))
