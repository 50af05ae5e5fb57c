"""Kills `semaug train` again and again and resumes it: the result must equal that of an undisturbed run.

`python tests/soak.py 50` trains on the embedded birds, prints what each kill hit, and then how long training takes to
end in each of its phases when it is asked to. On a GPU the steps are replayed as CUDA graphs. On a CPU there is a
second round, in which recordings take the place of graphs (recorded.py). Shorter forms are in test_interruptions.py.
"""

import csv
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import recorded
from forks import Fork
from semaug.cli.main import main
from semaug.data.samples import embedded_birds
from semaug.data.shards import write_shards
from semaug.training import checkpoints

OPTIONS = [
    "--keep-checkpoints",
    "--model",
    "small",
    "--pretrained",
    "False",
    "--workers",
    "0",
    "--lr",
    "0.01",
    "--meta-lr",
    "0.1",
]
FEW = ["--resize", "40", "--crop", "32", "--batch-size", "2", "--val-per-class", "2", "--cache", "None"]
BIRDS = ["--resize", "28", "--crop", "24", "--batch-size", "25", "--val-per-class", "30"]
STREAM = ("--images-on", "stream", "--workers", "2")
LEARNABLE = ("--method", "learnable", "--strength", "3")  # so that few epochs train CovNet
AUTO = ("--strength", "auto")
PIPELINED = "pipelined, Adam, EMA"
ON_A_STREAM = "isda on a stream of shards"
KINDS = {
    "paper's order": [*LEARNABLE],
    PIPELINED: [*LEARNABLE, "--order", "pipelined", "--meta-optimizer", "adam", "--ema", "0.9"],
    "isda": ["--method", "isda", *AUTO],
    ON_A_STREAM: ["--method", "isda", *AUTO, *STREAM],
    "learnable, automatic strength": ["--method", "learnable", *AUTO],
}
MOMENTS = ("any", *["in a write", "after a write", "while training"] * 3)
WRITES = (1, 2, 3)  # checkpoints that a process may begin to write before it is killed
TIMED = ("seconds", "validation_seconds", "saving_seconds", "images_per_second")


def arguments(photos: Path, output: Path, kind: str, epochs: int) -> list[str]:
    """The command that trains on a folder of few pictures."""
    return _arguments(str(photos), output, kind, epochs, FEW)


def on_birds(output: Path, kind: str, epochs: int, data: str = "birds") -> list[str]:
    """The command that trains on the embedded birds, with a cache of its own."""
    return _arguments(data, output, kind, epochs, [*BIRDS, "--cache", str(output.with_suffix(".cache"))])


def _arguments(data: str, output: Path, kind: str, epochs: int, sizes: list[str]) -> list[str]:
    where = ["train", "--data", data, "--output", str(output), "--epochs", str(epochs)]
    return [*where, *OPTIONS, *sizes, *KINDS[kind]]


Train = Callable[[list[str]], int]
"""Runs a command, and returns its exit code."""


def train(command: list[str]) -> int:
    """Train, on a GPU with deterministic kernels, so that two undisturbed runs are equal to the bit."""
    torch.backends.cudnn.deterministic = True
    return main(command)


def train_recorded(command: list[str]) -> int:
    """Train on a CPU with recordings in place of CUDA graphs; it is an error if a whole run replays none."""
    recorded.patch(pytest.MonkeyPatch())
    resumes = (Path(command[command.index("--output") + 1]) / "checkpoints").exists()  # few steps may be left
    code = main(command)
    assert code or resumes or recorded.Recording.replays, "no step was replayed"
    return code


def finish(command: list[str], log: Path, train: Train = train) -> None:
    """Run the command to its end."""
    code, said = Fork(log, train, command).wait()
    assert code == 0, said


# ---------------------------------------------------------------------------------------------------------- SIGKILL


def kill(
    command: list[str],
    run: Path,
    moment: str,
    longest: float,
    chance: random.Random,
    writes: Sequence[int] = WRITES,
    train: Train = train,
) -> str | None:
    """Start the command and kill it at such a moment; returns what was hit, or None if it had ended before."""
    process = Fork(run.with_suffix(".log"), train, command)
    if moment == "any":
        _wait_long(process, chance.uniform(0, longest / 2))
    else:
        _wait_for_writes(process, run / "checkpoints", chance.choice(writes), moment)
    if moment == "while training":
        time.sleep(chance.uniform(0, 0.3))
    if process.is_running():
        process.process.kill()
    code, said = process.wait()
    assert code in (0, -signal.SIGKILL), said
    if code == 0:
        return None
    if any(run.rglob(f".*.{process.pid}.part")):
        return "inside a write"
    if any(run.with_suffix(".cache").glob(f"*.{process.pid}.part")):
        return "while decoding"
    if (run / "checkpoints" / "last.previous").exists() and not (run / "checkpoints" / "last").exists():
        return "between the two renames"
    return "while training" if (run / "checkpoints").exists() else "before the first checkpoint"


def _wait_long(process: Fork, seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.is_running() and time.monotonic() < end:
        time.sleep(0.001)


def _wait_for_writes(process: Fork, folder: Path, writes: int, moment: str) -> None:
    """Wait until a process has begun so many writes of checkpoints, or has ended the last of them."""
    for left in reversed(range(writes)):
        while process.is_running() and not _writing(folder):
            time.sleep(1e-4)
        while (left or moment != "in a write") and process.is_running() and _writing(folder):
            time.sleep(1e-4)


def _writing(folder: Path) -> bool:
    try:
        return any(name.endswith(".part") for name in os.listdir(folder))
    except FileNotFoundError:
        return False


def differences(run: Path, reference: Path) -> list[str]:
    """What differs between the results of two runs, except for times."""
    different = [
        name
        for name in ("model.safetensors", "source.safetensors", "evaluation.json", "samples.json", "classes.json")
        if (reference / name).exists() and (run / name).read_bytes() != (reference / name).read_bytes()
    ]
    for name in ("last", "best"):
        ours, theirs = checkpoints.load(run / "checkpoints" / name), checkpoints.load(reference / "checkpoints" / name)
        assert ours is not None
        assert theirs is not None
        different += _unequal(name, {**ours, "metrics": []}, {**theirs, "metrics": []})
    if _rows(run) != _rows(reference):
        different.append("metrics.jsonl")
    if _table(run) != _table(reference):
        different.append("metrics.csv")
    return different


def _unequal(name: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b) else [name]
    if isinstance(a, dict) and isinstance(b, dict) and set(a) == set(b):
        return [part for key in a for part in _unequal(f"{name}.{key}", a[key], b[key])]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [part for i, (x, y) in enumerate(zip(a, b, strict=True)) for part in _unequal(f"{name}.{i}", x, y)]
    return [] if type(a) is type(b) and a == b else [name]


def _rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


def _table(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMED} for row in csv.DictReader(file)]


def compared(run: Path) -> dict[str, int]:
    """How many numbers of each part of a run's last state :func:`differences` compares."""
    state = checkpoints.load(run / "checkpoints" / "last")
    assert state is not None
    parts = {"network": state["model"], "its optimiser": state["optimizer"], "moving average": state["average"]}
    parts |= {"source of Σ": state["learner"]["source"], "the optimiser of that": state["learner"]["meta_optimizer"]}
    return {name: _numbers(part) for name, part in parts.items()}


def _numbers(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(_numbers, value.values()))
    return sum(map(_numbers, value)) if isinstance(value, list | tuple) else 0


def soak(folder: Path, kills: int, train: Train = train, epochs: int = 24, seed: int = 0) -> tuple[Counter[str], int]:
    """Kill so many times, over all kinds of runs, and compare each; returns what was hit and the number of runs."""
    folder.mkdir()
    chance, hits, rounds = random.Random(seed), Counter[str](), 0
    references: dict[str, tuple[Path, float]] = {}
    write_shards(embedded_birds(), folder / "shards", per_shard=100)
    while hits.total() < kills:
        kind = list(KINDS)[rounds % len(KINDS)]
        data = str(folder / "shards") if kind == ON_A_STREAM else "birds"
        if kind not in references:
            started, reference = time.monotonic(), folder / f"reference-{len(references)}"
            finish(on_birds(reference, kind, epochs, data), reference.with_suffix(".log"), train)
            references[kind] = reference, time.monotonic() - started
            print(f"{kind}, undisturbed: {references[kind][1]:.0f} s; numbers: {compared(reference)}", flush=True)
        reference, longest = references[kind]
        run = folder / f"run-{rounds}"
        command = on_birds(run, kind, epochs, data)
        while hits.total() < min(kills, kills * (rounds + 1) / len(KINDS)):
            hit = kill(command, run, chance.choice(MOMENTS), longest, chance, train=train)
            if hit is None:
                break
            hits[hit] += 1
        finish(command, run.with_suffix(".log"), train)
        different = differences(run, reference)
        assert not different, f"{kind}: {run} differs from {reference} in {', '.join(different)}"
        rounds += 1
        print(f"{hits.total()} kills in {rounds} runs, all equal to undisturbed ones: {dict(hits)}", flush=True)
    return hits, rounds


# ------------------------------------------------------------------------------------------------ SIGINT and SIGTERM


@dataclass(frozen=True)
class Phase:
    """A phase of training: a function that is called again and again in it, and which of its calls to wait for."""

    module: str
    function: str
    call: int
    options: tuple[str, ...] = ()


PHASES = {
    "decoding": Phase("semaug.data.images", "Preprocessing.pixels", 20),
    "decoding in two processes": Phase("semaug.data.images", "Preprocessing.pixels", 20, ("--workers", "2")),
    "training": Phase("semaug.meta.learner", "LearnableAugmentation.step", 3),
    "training on a stream": Phase("semaug.meta.learner", "LearnableAugmentation.step", 3, STREAM),
    "validation": Phase("semaug.data.images", "Preprocessing.evaluation_input", 2),
    "the last evaluation": Phase("semaug.inference.classifier", "Classifier.log_probabilities", 2),
    "choosing pictures": Phase("semaug.inference.pictures", "data_uri", 2),
    "writing the report": Phase("semaug.report.canvas", "to_svg", 2),
}


def watch(command: list[str], phase: Phase, folder: Path, *, holds: bool = False) -> Fork:
    """Start the command; returns when it is in the phase.

    In the folder the file "begun" grows by a byte with every call of the phase's function. With `holds`, the call that
    is waited for continues when a signal has arrived. Calls in worker processes take 0.2 s from then on.
    """
    folder.mkdir(parents=True)
    process = Fork(folder / "log", _watched, phase, folder, holds, [*command, *phase.options], own_group=True)
    process.wait_until((folder / "reached").exists)
    return process


def replace_function(module: str, function: str, make: Callable[[Any], Any]) -> None:
    """Replace a function, named by its path in a module, by what `make` makes of it."""
    owner, (*outer, name) = importlib.import_module(module), function.split(".")
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, name, make(getattr(owner, name)))


def _watched(phase: Phase, folder: Path, holds: bool, command: list[str]) -> int:
    begun, process = folder / "begun", os.getpid()

    def watched(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with open(begun, "ab", buffering=0) as file:
                file.write(b".")
            if begun.stat().st_size >= phase.call:
                (folder / "reached").touch()
                while holds and os.getpid() == process and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                    time.sleep(0.01)
                if os.getpid() != process:
                    time.sleep(0.2)
            return original(*arguments, **options)

        return call

    replace_function(phase.module, phase.function, watched)
    return main(command)


def stops(folder: Path) -> None:
    """Ask training on the birds to end, in each phase, and print how long it took to say so and to be gone."""
    for place, (name, phase) in enumerate(PHASES.items()):
        number, run = (signal.SIGTERM, signal.SIGINT)[place % 2], folder / f"stopped-{place}"
        process = watch(on_birds(run, "paper's order", 2), phase, folder / f"watched-{place}")
        asked = time.monotonic()
        process.send(number)
        while "\nsemaug: " not in "\n" + process.log.read_text():
            assert process.is_running() or "semaug: " in process.log.read_text(), f"no message while {name}"
            time.sleep(0.005)
        answered = time.monotonic() - asked
        code, said = process.wait()
        ended = time.monotonic() - asked
        assert code == 128 + number
        sentence = said.strip().splitlines()[-1]
        print(f"{number.name}, {name}: message after {answered:.2f} s, end after {ended:.2f} s: {sentence}", flush=True)


if __name__ == "__main__":
    # A shell ignores it for what it runs in the background; the processes that are started here inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as name:
        soak(Path(name) / "runs", kills)
        if not torch.cuda.is_available():
            print("the same with recorded steps")
            soak(Path(name) / "recorded", kills, train_recorded)
        stops(Path(name))
