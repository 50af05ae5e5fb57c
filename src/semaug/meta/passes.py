"""Forward passes of micro-batches, each as often as a half step needs it."""

from contextlib import nullcontext

from torch import Tensor

from semaug.isda.checks import check_features
from semaug.isda.sources import Source
from semaug.meta.precision import MixedPrecision
from semaug.meta.updates import MicroBatch
from semaug.network.network import Network
from semaug.network.randomness import restored_random_state


class Passes:
    """Runs micro-batches through the network.

    Args:
        network: The classifier f.
        source: The source of Σ, whose statistics see every micro-batch once.
        mixed: Precision of the passes.
        check_values: Whether to check features for NaN, for which the host waits.
    """

    def __init__(self, network: Network, source: Source, mixed: MixedPrecision, check_values: bool) -> None:
        self.network, self.source, self.mixed, self.check_values = network, source, mixed, check_values
        self.record = False  # whether passes record their operators, for a tangent pass to follow

    def first(self, part: MicroBatch) -> Tensor:
        """Features with their graph, for the pseudo update and the meta loss.

        The graph of a whole half batch is that of the whole network, and is stored for the real update. The graph of a
        micro-batch is that of the late part; the real update repeats the pass, so that only one graph exists at a time.
        """
        if part.is_whole and part.features is not None:
            return part.features
        with self.mixed.cast():
            if part.is_whole:
                features, part.tape = self.network.forward(part.images, part.labels, record=self.record)
            else:
                features, part.tape = self.network.forward_late(part.images, part.labels)
        part.features = features if part.is_whole else features.detach()
        if self.check_values:
            check_features(features.detach())
        return features

    def real(self, part: MicroBatch) -> Tensor:
        """Features with the graph of the whole network, for the real update.

        They are those of :meth:`first`, or for a micro-batch those of another pass with the same random masks.
        """
        if part.is_whole:
            return self.first(part)
        first = part.tape
        start = nullcontext() if first is None else restored_random_state(part.images.device, first.random_state)
        with self.mixed.cast(), start:
            features, part.tape = self.network.forward(part.images, part.labels)
        if self.check_values and first is None:
            check_features(features.detach())
        return features

    def count(self, part: MicroBatch, features: Tensor) -> None:
        """Add the features to the source's statistics, once."""
        if not part.counted:
            self.source.update(features.detach(), part.labels)
            part.counted = True
