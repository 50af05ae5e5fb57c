"""The cost of a training step on this machine, and the agreement of the two meta-gradient engines.

| module      | subject                                          |
|-------------|--------------------------------------------------|
| `settings`  | settings, and the table of variants              |
| `timing`    | time and memory of a training step               |
| `agreement` | comparison of the engines' meta-gradients        |
| `result`    | results as JSON, tables and a chart              |

**Times.** All variants take turns within every repetition, so that a change of clock or load affects all of them. Each
repetition gives one ratio to plain training. Results are medians, and the spread is half of the interquartile range. A
step is two half steps (for plain training: two updates) on the halves of one batch. A turn is five steps: one whole
cycle of a meta loop that runs every tenth half step. A slow variant takes turns of one step, a very slow one a single
turn. The images are noise and the weights are initial ones: a step costs what it costs in training.

**Memory**, on CUDA only, is the peak above what plain training holds between two steps (model, gradients, optimiser):
activations, and what a variant holds from one step to the next (CovNet; in the pipelined order, the last half batch).
"""

from collections.abc import Iterator

from semaug.studies.bench.agreement import compare_engines
from semaug.studies.bench.result import BenchResult, Timing, device_name, median_and_spread
from semaug.studies.bench.settings import VARIANTS, BenchConfig
from semaug.studies.bench.timing import make_batch, time_variants
from semaug.util.errors import FileError, ModelError
from semaug.util.files import refuse_edited, refuse_foreign, write_json, write_page
from semaug.util.progress import Progress

__all__ = ["VARIANTS", "BenchConfig", "BenchResult", "Timing", "bench", "median_and_spread"]


def bench(config: BenchConfig) -> Iterator[BenchResult]:
    """Time all variants, then compare the meta-gradients; write bench.json and bench.svg after each of the two.

    Args:
        config: Settings; defaults are filled in here.

    Yields:
        The result with the times, then the result with the comparison too.

    Raises:
        SettingError: A setting is out of range.
        ModelError: No variant could be measured.
        FileError: The folder cannot be written, or has files of these names of another kind.

    Example:
        >>> config = BenchConfig(model="small", pixels=32, half=4, seconds=1.0, device="cpu", skip=("isda",))
        >>> times, comparison = bench(config)  # doctest: +SKIP
    """
    try:  # before the measurement, which takes minutes
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write to {config.output}: {error.strerror or error}") from error
    file, chart = config.output / "bench.json", config.output / "bench.svg"
    refuse_foreign(file, b'{\n  "versions": {\n    "semaug"', beside=[chart])
    refuse_edited(chart)
    config = config.resolve()
    images, labels = make_batch(config)
    progress = Progress()
    name = device_name(images.device)
    progress.say(f"{config}, on {name}")
    timings = time_variants(config, images, labels, progress)
    failures = [f"{timing.title}: {timing.failure}" for timing in timings.values() if timing.failure]
    if len(failures) == len(timings):
        raise ModelError(f"no variant could be measured ({'; '.join(failures)})")

    def write(result: BenchResult) -> BenchResult:
        write_json(file, result.to_json())
        write_page(chart, result.chart())
        return result

    yield write(BenchResult(config, name, timings))
    yield write(BenchResult(config, name, timings, *compare_engines(config, timings, images, labels)))
