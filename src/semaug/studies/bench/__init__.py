"""What a training step costs on this machine, method by method, and how well the meta-gradient engines agree.

:func:`measure` times all methods in one run. They take turns within every repetition, so that a change of clock or load
meets all of them, and each repetition gives one ratio to plain training; figures are medians, and the spread is half of
the interquartile range. One step is two half steps (for plain training: two updates) on the halves of one batch, and a
turn is five steps: one whole cycle of a meta loop that runs every tenth half step. A slow method takes turns of one
step, a very slow one a single turn.

Memory, on CUDA only, is the peak above what plain training holds between two steps (model, gradients, optimiser):
activations, and what a method holds from one step to the next (CovNet; in the pipelined order, the last half batch).

The images are noise and the weights those of initialisation, so a step costs what it costs in training, but nothing is
learned; as a step should not wait for the host, the check of values is off.

Then the meta-gradient of CovNet's θ_g is compared: that of either engine, in the precision of the run, with the other's
and with a reference in higher precision, at the same parameters, batch and random state, in training mode and not
compiled. Most of it goes through the head, where the engines hardly differ (on a ResNet less than a hundredth goes
through the backbone). So the comparison is made a second time with the head kept out of the pseudo update, which leaves
the backbone's part alone. Double backward is not compared where it was skipped or slow.
"""

from collections.abc import Iterator
from dataclasses import replace

from semaug.studies.bench.agreement import compare
from semaug.studies.bench.result import Result, Timing, device_name, median_and_spread
from semaug.studies.bench.settings import METHODS, BenchConfig
from semaug.studies.bench.timing import make_batch, time_methods
from semaug.util.errors import SemaugError
from semaug.util.progress import Progress

__all__ = ["METHODS", "BenchConfig", "Result", "Timing", "bench", "measure", "median_and_spread"]


def bench(config: BenchConfig) -> Iterator[Result]:
    """What :func:`measure` yields, each time after bench.json and bench.svg are written."""
    from semaug.util.files import write_atomically, write_json

    try:  # a folder that cannot be had is better known before measuring
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SemaugError(f"cannot write to {config.output}: {error.strerror or error}") from error
    for result in measure(config):
        write_json(config.output / "bench.json", result.to_json())
        write_atomically(config.output / "bench.svg", result.chart().encode())
        yield result


def measure(config: BenchConfig) -> Iterator[Result]:
    """Time every method, then compare the meta-gradients; yields the result after each of the two.

    Progress goes to standard error.
    """
    config = config.filled()
    images, labels = make_batch(config)
    progress = Progress()
    name = device_name(images.device)
    progress.say(f"{config}, on {name}")
    timings = time_methods(config, images, labels, progress)
    failures = [f"{timing.title}: {timing.failure}" for timing in timings.values() if timing.failure]
    if len(failures) == len(timings):
        raise SemaugError(f"no method could be measured ({'; '.join(failures)})")
    result = Result(config, name, timings)
    yield result
    reference, agreements, notes = compare(config, timings, images, labels, progress)
    yield replace(result, reference=reference, agreements=agreements, notes=notes)
