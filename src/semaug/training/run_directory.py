"""The files of a training run; :mod:`semaug.inference.runs` lists and reads them."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

import semaug
from semaug.inference.runs import FORMAT
from semaug.training import checkpoints
from semaug.training.methods import METHODS
from semaug.training.settings import TrainConfig, identifying
from semaug.util import distributed
from semaug.util.errors import RunError
from semaug.util.files import leftovers, write_atomically, write_json
from semaug.util.untrusted import read_json


class RunDirectory:
    """The directory of one run. All ranks call its methods; rank 0 alone (`writes`) accesses files.

    Checkpoints are written in the background, one after the other; at the end of the context all are complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.writes = folder, distributed.rank() == 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._writer.shutdown()
        if error is None:  # else that is the one to report
            self.wait()

    def claim(self, config: TrainConfig) -> bool:
        """Create the directory with its config.json, or check that it holds the same run; returns if that is complete.

        Raises:
            RunError: If the directory holds something else, a run with other settings, or one not to be resumed.
        """
        complete = distributed.raise_on_all_ranks(lambda: self.writes and self._claim(config))
        return distributed.broadcast_object(complete)

    def _claim(self, config: TrainConfig) -> bool:
        folder, file, settings = self.folder, self.folder / "config.json", config.to_json()
        for leftover in (*leftovers(folder), *leftovers(folder / "checkpoints")):
            leftover.unlink(missing_ok=True)
        if not file.exists() and any(other.suffix != ".part" for other in folder.glob("*")):
            raise RunError(f"{folder} is not empty and holds no run; choose another `output`")
        if not (folder / "checkpoints").exists():  # new, or it failed before its first checkpoint
            header = {"format": FORMAT, "version": semaug.__version__}
            header["started"] = datetime.now(UTC).isoformat(timespec="seconds")
            header["composite"] = METHODS[config.method].composite
            write_json(file, {**header, "preprocessing": asdict(config.preprocessing), **settings})
            return False
        before = read_json(file)
        if before.get("format") != FORMAT:
            raise RunError(f"{folder} has format {before.get('format')}, and this version of semaug reads {FORMAT}")
        changed = [name for name, value in settings.items() if name in identifying() and before.get(name) != value]
        if changed:
            changes = ", ".join(f"{name} {before.get(name)} → {settings[name]}" for name in changed)
            raise RunError(f"{folder} holds a run with other settings ({changes}); choose another `output`")
        if not config.resume:
            raise RunError(f"{folder} holds a run already; choose another `output`, or allow it to `resume`")
        return (folder / "model.safetensors").is_file() and (folder / "evaluation.json").is_file()

    def load(self, name: str) -> dict[str, Any] | None:
        """Read the checkpoint "last" or "best", for all ranks; None if there is none."""

        def read() -> dict[str, Any] | None:
            self.wait()
            return checkpoints.load(self.folder / "checkpoints" / name) if self.writes else None

        return distributed.broadcast_object(distributed.raise_on_all_ranks(read))

    def wait(self) -> None:
        """Wait for the checkpoints that are being written.

        Raises:
            FileError: If one could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, last: dict[str, Any], best: dict[str, Any] | None = None) -> None:
        """Write the checkpoint "last", before it "best" if given, and then the metrics, in the background.

        Args:
            last: A state that nothing changes any more, with the ``metrics`` of all epochs.
            best: Likewise, the model of the best epoch.

        Raises:
            FileError: If an earlier checkpoint could not be written.
        """
        self.wait()
        if self.writes:
            self._pending = self._writer.submit(self._save, last, best)

    def _save(self, last: dict[str, Any], best: dict[str, Any] | None) -> None:
        # In this order: a process that is killed repeats the epoch, and then writes the same "best" again.
        if best is not None:
            checkpoints.save(self.folder / "checkpoints" / "best", best)
        checkpoints.save(self.folder / "checkpoints" / "last", last)
        self.write_metrics(last["metrics"])

    def write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics of all epochs to metrics.jsonl and metrics.csv."""
        if not self.writes:
            return
        write_atomically(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.folder / "metrics.csv", table.getvalue().encode())

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file."""
        if self.writes:
            content = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            write_atomically(self.folder / name, safetensors_bytes(content))
