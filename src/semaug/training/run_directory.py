"""The files of a training run; :mod:`semaug.inference.runs` lists and reads them."""

import csv
import io
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

import semaug
from semaug.data.samples import DataSet
from semaug.inference.manifest import NAME as MANIFEST
from semaug.inference.manifest import checksum, damage, is_complete, read_manifest, sign, verify
from semaug.inference.runs import FORMAT, check_not_trained_on, origin_of_weights, split_settings, write_split
from semaug.network.models import weights_file
from semaug.training import checkpoints
from semaug.training.methods import METHODS
from semaug.training.settings import TrainConfig, identifying
from semaug.util import distributed
from semaug.util.errors import DataError, FileError, RunError, SemaugError
from semaug.util.files import leftovers, refuse_foreign, write_atomically, write_json
from semaug.util.locks import LOCK, locked
from semaug.util.names import some
from semaug.util.progress import Progress
from semaug.util.untrusted import read_json

_RESULTS = ("metrics.jsonl", "model.safetensors", "source.safetensors", "evaluation.json", "calibration.json")
_BAD_IMAGES = "bad_images.json"
# The files that a run writes before its first step, and how they begin.
_BEFORE_TRAINING: dict[str, bytes | re.Pattern[bytes]] = {
    "config.json": b'{\n  "format": ',
    "classes.json": b'[\n  "',
    "split.json": re.compile(rb'\{\n  "[^\n]*": \['),
    MANIFEST: b'{\n  "run": ',
    _BAD_IMAGES: b'[\n  {\n    "image": ',
}
_AFTER_TRAINING = ("metrics.csv", "report.html", "samples.json")  # besides `_RESULTS`


def changed_settings(before: Mapping[str, Any], config: TrainConfig) -> dict[str, str]:
    """The settings that identify a run and differ from those of another one: by name, a text with both values.

    Args:
        before: The config.json of the other run.
        config: Resolved settings.
    """
    settings, changed = config.to_json(), dict[str, str]()
    for name, new in settings.items():
        old = before.get(name)
        if name not in identifying() or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):  # a group of settings, such as those of augmentation
            pairs = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
            if texts := [f"{key} {a} → {b}" for key, (a, b) in pairs.items() if a != b]:
                changed[name] = ", ".join(texts)
        else:
            changed[name] = f"{name} {old} → {new}"
    return changed


class RunDirectory:
    """The directory of one run. All ranks call its methods; rank 0 alone (`writes`) accesses files, and locks it.

    Checkpoints are written in the background, one after the other; at the end of the context all are complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.writes = folder, distributed.rank() == 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._lock = ExitStack()
        self._begins = False  # whether the run began with this process
        self._made: list[Path] = []  # the folder and those above it, as far as this process has created them
        self._run, self._data = "", ""  # the run's name and the fingerprint of its data, as in manifest.json
        self._weights: str | None = None  # likewise, the checksum of the weights that it started from

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._writer.shutdown()
        withdrawn = False
        if self._begins and error is not None:
            with suppress(OSError, SemaugError):  # the error that ended the run is the one to report
                withdrawn = self._withdraw()
        self._lock.close()
        if withdrawn:
            with suppress(OSError):  # something else is in it
                for made in self._made:
                    made.rmdir()
        if error is None:  # else that is the one to report
            self.wait()

    def _withdraw(self) -> bool:
        """Remove the description of a run that failed before it wrote anything else, as for a misspelled setting."""
        description = ("classes.json", "split.json", MANIFEST, "config.json")
        # If there are other files, such as a log of TensorBoard, it stays, and the same command can begin again.
        known = (*description, _BAD_IMAGES, LOCK)
        if not self._is_in_place() or any(file.name not in known for file in self.folder.iterdir()):
            return False
        for name in description:
            (self.folder / name).unlink(missing_ok=True)
        return True

    def claim(self, config: TrainConfig, progress: Progress) -> bool:
        """Create the directory with its config.json, or check that it holds the same run; returns if that is complete.

        Args:
            config: Resolved settings of the run.
            progress: Prints a message if results are damaged, which the checkpoints can restore.

        Raises:
            RunError: If the directory holds something else, a run with other settings, or one not to be resumed.
            FileError: If another process writes to it.
        """
        complete = distributed.raise_on_all_ranks(lambda: self.writes and self._claim(config, progress))
        return distributed.broadcast_object(complete)

    def _claim(self, config: TrainConfig, progress: Progress) -> bool:
        folder = self.folder
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        self._lock.enter_context(locked(folder))
        before = self.previous(config)
        for leftover in (*leftovers(folder), *leftovers(folder / "checkpoints")):
            leftover.unlink(missing_ok=True)
        if before is None:
            self._run, self._begins = secrets.token_hex(8), True
            header = {"format": FORMAT, "version": semaug.__version__, "run": self._run}
            header["started"] = datetime.now(UTC).isoformat(timespec="seconds")
            header["composite"] = METHODS[config.method].composite
            header["base"] = os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(folder))
            settings = {"preprocessing": asdict(config.preprocessing), **config.to_json()}
            write_json(folder / "config.json", {**header, **settings})
            return False
        manifest = read_manifest(folder)
        others = [name for name in manifest["files"] if name == "split.json"]
        others += ["calibration.json"] * (folder / "calibration.json").exists()  # which training would sign unread
        verify(folder, "config.json", "classes.json", *others)
        self._run, self._data, self._weights = before["run"], manifest.get("data", ""), manifest.get("weights")
        if manifest.get("run") != self._run:
            raise RunError(f"the manifest.json of {folder} is that of another run; choose another `output`")
        if is_complete(folder):
            return True
        last = folder / "checkpoints" / "last"
        fault = damage(folder) if "evaluation.json" in manifest["files"] else None
        results = [name for name in _RESULTS if (folder / name).exists()]
        if results and not last.exists() and not checkpoints.previous(last).exists():
            reason = f" ({fault})" if fault else ""
            raise RunError(
                f"{folder} holds a run without its checkpoints{reason}; delete it, or choose another `output`"
            )
        if fault is not None:
            progress.say(f"{fault}; writing the results again from the checkpoints")
        return False

    def previous(self, config: TrainConfig) -> dict[str, Any] | None:
        """Read the config.json of the run that the folder holds and that these settings resume.

        Args:
            config: Resolved settings of the run.

        Returns:
            The content; None if the run begins here, because the folder holds nothing that the run would replace,
            except for what a run wrote before its first step.

        Raises:
            RunError: If the folder holds something else, a run with other settings, or one not to be resumed.
            FileError: If it holds a file of the user's that the run would replace.
        """
        folder, file = self.folder, self.folder / "config.json"
        names = {each.name for each in folder.iterdir() if each.suffix != ".part"} if folder.is_dir() else set()
        if names <= {LOCK, _BAD_IMAGES}:
            refuse_foreign(folder / _BAD_IMAGES, _BEFORE_TRAINING[_BAD_IMAGES])
            return None
        before: dict[str, Any] = read_json(file, dict[str, Any]) if file.exists() else {}
        if not isinstance(before.get("run"), str):
            content = "an exported model" if "format" in before else "no run"
            raise RunError(f"{folder} is not empty and holds {content}; choose another `output`")
        if before.get("format") != FORMAT:
            raise RunError(f"{folder} has format {before.get('format')}, and this version of semaug reads {FORMAT}")
        is_begun = MANIFEST in names and names.isdisjoint({"checkpoints", *_RESULTS})
        if is_begun and set(_RESULTS).isdisjoint(read_manifest(folder)["files"]):
            changed = dict[str, str]()  # it was not trained: other settings may follow
        else:
            changed = changed_settings(before, config)
        if changed:
            changes = ", ".join(changed.values())
            further = f", and {folder} as `weights` to train its model further" if is_complete(folder) else ""
            raise RunError(f"{folder} holds a run with other settings ({changes}); choose another `output`{further}")
        if names.isdisjoint({"checkpoints", *_RESULTS}):
            if others := sorted(names & set(_AFTER_TRAINING)):
                raise RunError(
                    f"{folder} holds {some(others)} of an earlier run; delete it, or choose another `output`"
                )
            for name, beginning in _BEFORE_TRAINING.items():
                refuse_foreign(folder / name, beginning)
            return None
        if not config.resume:
            raise RunError(f"{folder} holds a run already; choose another `output`, or allow it to `resume`")
        return before

    def identify(self, config: TrainConfig, data: DataSet, progress: Progress) -> None:
        """Write down classes, validation images and fingerprints of data and weights, or check that all are the same.

        Args:
            config: Resolved settings of the run.
            data: Its data set.
            progress: Prints a warning if the weights may have been trained on the validation images.

        Raises:
            DataError: If the data is not that which the run began with.
            RunError: If the weights are not, or come from a run that was trained on the validation images of this one.
        """
        distributed.raise_on_all_ranks(lambda: self._identify(config, data, progress))

    def _identify(self, config: TrainConfig, data: DataSet, progress: Progress) -> None:
        if not self.writes:
            return
        fingerprint, weights = data.fingerprint(), None
        if config.weights is not None:
            weights = checksum(weights_file(config.weights))
            if (origin := origin_of_weights(config.weights)) is not None:
                verify(origin, "model.safetensors")
                warning = None if self._data else check_not_trained_on(origin, vars(config), data, fingerprint)
                if warning is not None:
                    progress.say(f"warning: {warning}")
        if not self._data:
            self._data, self._weights = fingerprint, weights
            write_json(self.folder / "classes.json", list(data.classes))
            write_split(self.folder, data, split_settings(vars(config)))
            self.sign()
        elif self._data != fingerprint:
            same = read_json(self.folder / "classes.json") == list(data.classes)
            changed = "images (names, sizes or labels)" if same else "classes"
            raise DataError(
                f"the {changed} of {data.name} are not those that the run in {self.folder} began with; restore them, "
                "or choose another `output`"
            )
        elif self._weights != weights:
            raise RunError(
                f"{config.weights} does not hold the weights that the run in {self.folder} began with; restore them, "
                "or choose another `output`"
            )

    def sign(self) -> None:
        """Write the checksums of all files to manifest.json."""
        if self.writes:
            sign(self.folder, run=self._run, data=self._data, weights=self._weights)

    def delete_checkpoints(self) -> None:
        """Delete the checkpoints of a complete run, which are several times as large as its model."""
        if not self.writes:
            return
        for name in ("last", "best"):
            checkpoints.delete(self.folder / "checkpoints" / name)
        with suppress(OSError):  # a file of the user's is in it
            (self.folder / "checkpoints").rmdir()

    @property
    def _identity(self) -> str:
        """The mark in the checkpoints of this run on these data."""
        return f"{self._run}-{self._data[:16]}"

    def _is_in_place(self) -> bool:
        """Whether the folder is still that of this run."""
        file = self.folder / "config.json"
        return file.is_file() and read_json(file, dict[str, Any]).get("run") == self._run

    def _check_place(self) -> None:
        """Raise a FileError if the folder is no longer that of this run; writing would create it again."""
        if self._run and not self._is_in_place():
            raise FileError(f"{self.folder} was deleted, moved or replaced during training; nothing can be saved there")

    def load(self, name: str) -> dict[str, Any] | None:
        """Read the checkpoint "last" or "best", for all ranks; None if there is none."""

        def read() -> dict[str, Any] | None:
            self.wait()
            return checkpoints.load(self.folder / "checkpoints" / name, self._identity) if self.writes else None

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
        self._check_place()
        # In this order: a process that is killed repeats the epoch, and then writes the same "best" again.
        if best is not None:
            checkpoints.save(self.folder / "checkpoints" / "best", best, self._identity)
        checkpoints.save(self.folder / "checkpoints" / "last", last, self._identity)
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
