"""Several classifiers whose probabilities are averaged."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor

from semaug.inference.classifier import Classifier, log_mean
from semaug.util.errors import ModelError


@dataclass
class _Ensemble(Classifier):
    members: tuple[Classifier, ...] = ()

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Logarithms of the mean of the members' probabilities; each crops and normalises the pixels in its own way."""
        return log_mean([replace(own, tta=self.tta).log_probabilities(pixels) for own in self.members])


def ensemble(classifiers: Sequence[Classifier]) -> Classifier:
    """Average the probabilities of classifiers.

    Args:
        classifiers: At least one. They have the same classes and resize images alike; networks may differ.

    Returns:
        The classifier itself if there is one; otherwise one with the settings and the folder of the first.

    Raises:
        ModelError: If classes differ, or images are resized differently.

    Example:
        >>> both = ensemble([load_classifier(Path("runs/a")), load_classifier(Path("runs/b"))])  # doctest: +SKIP
    """
    first, *others = classifiers
    for other in others:
        names = f"{other.folder or other.name} and {first.folder or first.name}"
        if other.classes != first.classes:
            raise ModelError(f"{names} do not have the same classes, so their answers cannot be averaged")
        sizes = [(each.preprocessing.resize, each.preprocessing.shape) for each in (first, other)]
        if sizes[0] != sizes[1]:
            raise ModelError(f"{names} do not resize images alike ({sizes[1][0]} and {sizes[0][0]} px)")
    if not others:
        return first
    return _Ensemble(**{each.name: getattr(first, each.name) for each in fields(first)}, members=tuple(classifiers))
