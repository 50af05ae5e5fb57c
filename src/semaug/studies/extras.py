"""What experiments measure besides training runs: times, sizes, pictures, the theorem.

Results are cached in `OUTPUT/extras`, under a digest of the runs that they depend on.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from semaug.studies.cells import DATASETS, Experiment, Extra
from semaug.studies.results import finished_runs
from semaug.studies.scales import Setup
from semaug.training.settings import required
from semaug.util.errors import RunError
from semaug.util.files import write_json
from semaug.util.untrusted import read_json


def known_extra(experiment: Experiment, setup: Setup) -> Extra:
    """Read what an earlier call measured at the scale of `setup`; empty if there is nothing."""
    file = _file(experiment, setup)
    return dict(read_json(file)) if experiment.has_extra and file.is_file() else {}


def measure_extra(experiment: Experiment, setup: Setup) -> None:
    """Measure at the scale of `setup`, and store the result for :func:`known_extra`.

    Raises:
        RunError: The experiment has pictures and their runs are not finished.
    """
    before = torch.get_num_threads()
    if setup.scale == "small" or not experiment.cells:
        torch.set_num_threads(1)  # small tensors are not faster on several threads, and much slower on busy cores
    try:
        extra = experiment.measure(experiment, setup) if experiment.measure else _pictures(experiment, setup)
    finally:
        torch.set_num_threads(before)
    write_json(_file(experiment, setup), extra)


def _file(experiment: Experiment, setup: Setup) -> Path:
    parts: list[Any] = [experiment.name, setup.scale]
    if experiment.picture is not None:
        runs = [run for cell in experiment.at(setup.scale) for run in finished_runs(cell, setup)]
        parts += [[run.run.name, run.top1] for run in runs]
        parts.append(experiment.picture_options.get(setup.scale))
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
    return setup.output / "extras" / f"{setup.scale}-{experiment.name}-{digest}.json"


def _pictures(experiment: Experiment, setup: Setup) -> Extra:
    """Draw one picture for each data set whose runs are finished."""
    from semaug.report.figures import FIGURES

    kind, pictures, missing = FIGURES[required(experiment.picture)], [], []
    options = experiment.picture_options.get(setup.scale, {})
    for dataset in dict.fromkeys(cell.dataset for cell in experiment.cells):
        cells = [cell for cell in experiment.at(setup.scale) if cell.dataset == dataset]
        runs = {cell.method: finished[0].run for cell in cells if (finished := finished_runs(cell, setup))}
        if len(runs) < len(cells):
            missing.append(DATASETS[dataset])
            continue
        figure = kind.draw(runs, **options)
        pictures.append(
            {
                "title": f"{DATASETS[dataset]}: {figure.title}" if len(experiment.cells) > 3 else figure.title,
                "caption": figure.caption,
                "html": figure.html,
                "png": "data:image/png;base64," + base64.b64encode(figure.png).decode() if figure.png else "",
                "numbers": json.loads(json.dumps(figure.numbers, default=str)),
            }
        )
    if not pictures:
        raise RunError("its runs have not finished")
    lines = [f"No picture of {', '.join(missing)}: the runs are missing."] if missing else []
    return {"pictures": pictures, "lines": lines}
