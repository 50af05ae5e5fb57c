"""Images, weights and settings of finished runs: a table must not mix different ones."""

from collections.abc import Sequence
from typing import Any

from semaug.data.samples import DataSet
from semaug.inference.manifest import checksum, read_manifest
from semaug.network.models import weights_file
from semaug.training.run_directory import changed_settings
from semaug.training.settings import TrainConfig, required
from semaug.util.errors import DataError, RunError
from semaug.util.untrusted import read_json


def refuse_other_inputs(finished: Sequence[TrainConfig], data: DataSet | None) -> None:
    """Refuse finished runs on other images or from other weights than there are now, or with other settings.

    Args:
        finished: Runs on the same data set.
        data: The data set; None if it is not there, and the runs need only agree with each other.

    Raises:
        DataError: If a run was trained on other images or weights.
        RunError: If a folder holds another run, as after it was copied or renamed.
    """
    if not finished:
        return
    first = required(finished[0].output)
    images = data.fingerprint() if data is not None else read_manifest(first).get("data")
    weights = {run.weights: None if run.weights is None else checksum(weights_file(run.weights)) for run in finished}
    for run in finished:
        folder = required(run.output)
        manifest, stored = read_manifest(folder), read_json(folder / "config.json", dict[str, Any])
        # Paths may be others, since their content is compared. Settings of later versions are not stored. The machine
        # may have chosen the precision.
        comparable = stored.keys() - {"data", "weights", "" if run.precision else "precision"}
        changes = [text for name, text in changed_settings(stored, run.resolve()).items() if name in comparable]
        if changes:
            raise RunError(f"{folder} holds a run with other settings ({', '.join(changes)}); choose another `output`")
        if manifest.get("data") != images:
            changed = "" if data is None else f"the classes or images of {data.name} changed since {folder} was trained"
            different = f"{folder} and {first} were trained on different classes or images"
            raise DataError(f"{changed or different}; restore them, or choose another `output`")
        if manifest.get("weights") != weights[run.weights]:
            raise DataError(f"{run.weights} changed since {folder} was trained; restore it, or choose another `output`")
