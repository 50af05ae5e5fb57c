"""Figure "frozen blocks": accuracy and time per step against the number of blocks frozen in the pseudo update.

**Settings of the paper.** CUB-200-2011, ResNet-50, as in the table of data sets; the stem and the first n of 16 blocks
are frozen, at n = 0 the stem alone. The paper shows its values of n in the drawing only; ours are the stem, 4, 8, 10,
12, 14 and 16, and nothing frozen, of which the paper states the time.

**The paper's results.** Drawn: much the same accuracy for n up to 12, less time the more is frozen; 86.7 at n = 10. As
numbers, 100 epochs on four V100: basic 1.7 h, meta loop 6.5 h, with ten blocks frozen 4.5 h, that is 3.8 and 2.6 times
plain training.

**Time at full scale.** By the paper from 6.5 h down to less than 4.5 h on four V100 for each of the 8 points:
about a day and a half for one seed. The times per step are measured separately; this needs a GPU and some minutes.
"""

from typing import Any, Literal

from semaug.studies.cells import Cell, Experiment, Extra
from semaug.studies.scales import Setup, train_config
from semaug.util.errors import ModelError

_BLOCKS: dict[str, tuple[int | Literal["stem"], ...]] = {
    "full": (0, "stem", 4, 8, 10, 12, 14, 16),
    "small": (0, "stem", 1, 2, 3),
}
PAPER_HOURS = {"basic": 1.7, "nothing": 6.5, "10": 4.5}


def _cells(scale: str, own: int) -> tuple[Cell, ...]:
    cells = [Cell("basic", paper=84.5)]
    for blocks in _BLOCKS[scale]:
        paper, setting = 86.7 if blocks == own else None, f"frozen = {blocks or 'nothing'}"
        cells.append(Cell("learnable", setting=setting, frozen=blocks, paper=paper))
    return tuple(cells)


def _times(experiment: Experiment, setup: Setup) -> Extra:
    """Time a step relative to plain training, with both engines, for each number of frozen blocks."""
    from semaug.studies.bench import VARIANTS, BenchConfig, BenchResult
    from semaug.studies.bench.settings import ENGINES, PLAIN
    from semaug.studies.bench.timing import make_batch, time_variants
    from semaug.util.progress import Progress

    config, full = train_config(experiment.at(setup.scale)[0], setup).resolve(), setup.scale == "full"
    variants: dict[str, str] = {"plain": PLAIN} | {str(engine): variant for engine, variant in ENGINES.items()}
    rows: list[dict[str, Any]] = []
    lines = [
        f"Time per step: {config.model}, {config.crop} px, {config.batch_size} + {config.batch_size} images, on "
        f"{config.device}; medians over repetitions, ratios to plain training."
    ]
    for blocks in _BLOCKS[setup.scale]:
        settings = BenchConfig(
            model=config.model,
            pixels=config.crop,
            half=config.batch_size,
            classes=200 if full else 12,
            frozen_blocks=blocks,
            skip=tuple(name for name in VARIANTS if name not in variants.values()),
            seconds=60.0 if full else 10.0,
            device=config.device,
        ).resolve()
        timed = BenchResult(settings, "", time_variants(settings, *make_batch(settings), Progress())).to_json()[
            "methods"
        ]
        if timed[PLAIN]["failure"]:
            raise ModelError(f"plain training could not be timed: {timed[PLAIN]['failure']}")
        frozen = str(blocks or "nothing")
        rows.append({"frozen": frozen} | {name: timed[variant] for name, variant in variants.items()})
        texts = (
            f"{row['title']} {row['failure'] or '{:.1f} ms (× {:.2f})'.format(row['ms_per_step'], row['ratio'])}"
            for row in timed.values()
        )
        lines.append(f"{frozen} frozen: {'; '.join(texts)}")
    return {"times": rows, "lines": lines}


EXPERIMENT = Experiment(
    name="figure-frozen-blocks",
    order=90,
    title="Frozen blocks",
    line="accuracy and time per step against frozen blocks, with both meta-gradient engines",
    shows="Accuracy is much the same while at most 12 of 16 blocks are frozen; training takes 6.5 h with none frozen, "
    "4.5 h with ten, and 1.7 h without a meta loop.",
    caption="Both engines give the same gradient, so accuracy is measured with one (jvp) and time with both. At small "
    "scale the network has three blocks, and the paper's ten of sixteen stands beside two of three.",
    cells=_cells("full", 10),
    small_cells=_cells("small", 2),
    kind="lines",
    axis="frozen blocks",
    measure=_times,
    needs_gpu=True,
)
