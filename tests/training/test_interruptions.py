"""Training that is killed, stopped or fails loses nothing: after resuming, the result is the same to the bit."""

import math
import os
import random
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soak
from forks import Fork
from photos import photo_folder, quick_config
from semaug.cli.main import main
from semaug.inference.runs import read_metrics
from semaug.meta.learner import LearnableAugmentation
from semaug.training import checkpoints, trainer
from semaug.training.methods import Augmentation
from semaug.training.run_directory import RunDirectory
from semaug.training.settings import TrainConfig
from semaug.training.trainer import Trainer, train
from semaug.util.errors import SemaugError
from semaug.util.signals import Interrupted
from semaug.util.untrusted import read_json

Options = dict[str, Any]
Undisturbed = Callable[..., Path]
BeforeStep = Callable[[Callable[[int], None]], None]
KINDS: list[Options] = [
    {},
    {"ema": 0.9, "augmentation": Augmentation(strength=10.0, order="pipelined", meta_optimizer="adam")},
    {"method": "randaugment"},
    {"method": "isda+snapmix"},
    {"method": "manifold-mixup"},
    {"crop_scale": 0.2, "freeze": 1},
    {"model": "test_vit", "recipe": "fine-tune-vit", "lr": 1e-3},
    {"method": "isda", "freeze": "all", "sampler": "balanced", "class_weights": "square-root"},
]
STEPS = 3  # of an epoch


def ask_in(wanted: int, number: signal.Signals = signal.SIGTERM) -> Callable[[int], None]:
    """A hook before steps that sends this process a signal in one of them."""
    return lambda step: os.kill(os.getpid(), number) if step == wanted else None


def _raise(error: BaseException) -> None:
    raise error


# ---------------------------------------------------------------------------------------------------------- SIGKILL


def test_a_run_killed_at_three_moments_ends_like_an_undisturbed_one(photos: Path, tmp_path: Path) -> None:
    epochs, chance, hits = 5, random.Random(1), Counter[str]()
    command = soak.arguments(photos, tmp_path / "run", soak.PIPELINED, epochs)
    for moment in ("in a write", "after a write", "in a write"):
        hits[soak.kill(command, tmp_path / "run", moment, 0.0, chance, writes=(1, 2)) or "not killed"] += 1
    assert "not killed" not in hits
    assert main(command) == 0
    assert main(soak.arguments(photos, tmp_path / "reference", soak.PIPELINED, epochs)) == 0
    assert soak.differences(tmp_path / "run", tmp_path / "reference") == [], hits
    assert not list((tmp_path / "run").rglob(".*.part")), "files of killed writers are removed"


def test_the_comparison_of_runs_sees_a_difference(undisturbed: Undisturbed) -> None:
    one, other = undisturbed(**KINDS[1]), undisturbed(seed=1, **KINDS[1])
    different = set(soak.differences(other, one))
    parts = {"model.safetensors", "metrics.jsonl", "metrics.csv", "last.random_of_ranks.0.0", "last.model.head.weight"}
    assert parts <= different
    for part in ("last.optimizer.state", "last.average", "last.learner.source", "last.learner.meta_optimizer.state"):
        assert any(name.startswith(part) for name in different), part
    assert all(soak.compared(one).values())


def test_a_run_killed_in_its_first_write_can_start(photos: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    reference = undisturbed()
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".config.json.{gone}.part").write_text("{")
    assert soak.differences(train(quick_config(photos, tmp_path / "run")), reference) == []


def test_a_run_killed_after_the_last_checkpoint_still_writes_the_metrics(
    photos: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = undisturbed()
    with monkeypatch.context() as patch:
        patch.setattr(
            RunDirectory, "write_metrics", lambda self, rows: _raise(KeyboardInterrupt()) if len(rows) == 3 else None
        )
        with pytest.raises(KeyboardInterrupt):
            train(quick_config(photos, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert soak.differences(train(quick_config(photos, tmp_path / "run")), reference) == []


def test_a_run_interrupted_after_its_patience_ran_out_does_not_train_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick_config(photos, tmp_path / "run", epochs=30, patience=1, lr=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "evaluate_best", lambda *_: _raise(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    epochs = len(read_metrics(tmp_path / "run"))
    assert len(read_metrics(train(settings))) == epochs < 30


# ------------------------------------------------------------------------------------------------ SIGINT and SIGTERM


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("step", [0, STEPS + 1])
def test_a_run_stopped_within_an_epoch_ends_like_an_undisturbed_one(
    photos: Path, undisturbed: Undisturbed, tmp_path: Path, before_step: BeforeStep, options: Options, step: int
) -> None:
    reference, settings = undisturbed(**options), quick_config(photos, tmp_path / "run", **options)
    before_step(ask_in(step))
    with pytest.raises(Interrupted, match=f"SIGTERM in epoch {1 + step // STEPS} after step {1 + step % STEPS} of 3"):
        train(settings)
    saved = checkpoints.load(tmp_path / "run" / "checkpoints" / "last")
    assert saved is not None
    assert (saved["epoch"], saved["within"]["step"]) == (step // STEPS, 1 + step % STEPS)
    assert soak.differences(train(settings), reference) == []


def test_a_run_stopped_in_validation_ends_like_an_undisturbed_one(
    photos: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, original = undisturbed(), Trainer._validate

    def validate(self: Trainer) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", validate)
        with pytest.raises(Interrupted, match="SIGINT in epoch 1 after step 3 of 3"):
            train(quick_config(photos, tmp_path / "run"))
    assert soak.differences(train(quick_config(photos, tmp_path / "run")), reference) == []


def test_how_often_numbers_are_checked_changes_nothing(
    photos: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = undisturbed()
    monkeypatch.setattr(trainer, "CHECK_EVERY", 2)
    assert soak.differences(train(quick_config(photos, tmp_path / "run")), reference) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_with_one_sentence(
    photos: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = Fork(tmp_path / "log", soak.train, soak.arguments(photos, tmp_path / "run", "isda", 100_000))
    process.wait_until((tmp_path / "run" / "metrics.jsonl").exists)
    process.send(number)
    assert process.wait()[0] == code
    said = process.log.read_text()
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"semaug: stopped by {number.name} in epoch ")
    assert ", which is saved" in last
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def more_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for several chunks to decode, batches to validate, and batches in the last evaluation."""
    return photo_folder(tmp_path_factory.mktemp("more"), train=20, test=50)


@pytest.fixture(scope="module")
def more_undisturbed(more_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(on_more(more_photos, run)) == 0
    return run


def on_more(photos: Path, run: Path) -> list[str]:
    return [*soak.arguments(photos, run, "isda", 1), "--batch-size", "5", "--val-per-class", "9"]


WHERE = {  # what the sentence says besides the signal
    "training": " in epoch 1 after step 3 of 4, which is saved",
    "training on a stream": " in epoch 1 after step 3 of 4, which is saved",
    "validation": " in epoch 1 after step 4 of 4, which is saved",
}


@pytest.mark.parametrize("name", soak.PHASES)
def test_in_each_phase_a_signal_is_answered_before_anything_else_begins(
    more_photos: Path, more_undisturbed: Path, tmp_path: Path, name: str
) -> None:
    """A real process waits in the middle of a step, batch, image or chart until the signal has arrived."""
    command = on_more(more_photos, tmp_path / "run")
    process = soak.watch(command, soak.PHASES[name], tmp_path / "watched", holds=True)
    process.send(signal.SIGTERM)
    before = (tmp_path / "watched" / "begun").stat().st_size
    code, said = process.wait()
    begun = (tmp_path / "watched" / "begun").stat().st_size - before
    # each worker may end its image and begin another before it is stopped; a chunk of images has 16
    assert begun <= (6 if "processes" in name else 0)
    assert code == 143
    assert said.strip().splitlines()[-1].startswith(f"semaug: stopped by SIGTERM{WHERE.get(name, '')}; ")
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "evaluation.json").exists() == (name == "writing the report")
    assert not list((tmp_path / "run").rglob(".*.part"))
    assert main(command) == 0
    assert soak.differences(tmp_path / "run", more_undisturbed) == []
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("phase", ["decoding in two processes", "training on a stream"])
def test_workers_do_not_outlive_training_that_is_killed(more_photos: Path, tmp_path: Path, phase: str) -> None:
    command = on_more(more_photos, tmp_path / "run")
    process = soak.watch(command, soak.PHASES[phase], tmp_path / "watched", holds=phase == "training on a stream")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    process.send(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def slow_main(module: str, function: str, marker: Path, command: list[str]) -> int:
    """The command, in which one function takes two minutes."""

    def slow(*_: Any) -> None:
        marker.touch()
        time.sleep(120)

    soak.replace_function(module, function, lambda original: slow)
    return main(command)


def test_a_second_signal_ends_the_process_immediately(photos: Path, tmp_path: Path) -> None:
    marker, command = tmp_path / "marker", soak.arguments(photos, tmp_path / "run", "isda", 3)
    where = "semaug.meta.learner", "LearnableAugmentation.step"
    process = Fork(tmp_path / "log", slow_main, *where, marker, command)
    process.wait_until(marker.exists)
    process.send(signal.SIGINT)
    time.sleep(0.5)
    assert process.is_running()
    process.send(signal.SIGTERM)
    assert process.wait()[0] == -signal.SIGTERM


def test_a_signal_to_all_processes_while_workers_decode_gives_one_sentence(photos: Path, tmp_path: Path) -> None:
    marker, command = tmp_path / "marker", soak.arguments(photos, tmp_path / "run", "isda", 3)
    where = "semaug.data.images", "Preprocessing.pixels"
    process = Fork(tmp_path / "log", slow_main, *where, marker, [*command, "--workers", "2"], own_group=True)
    process.wait_until(marker.exists)
    process.send(signal.SIGINT, to_group=True)
    code, said = process.wait()
    assert code == 130
    assert said.strip().splitlines()[-1].startswith("semaug: stopped by SIGINT; ")
    assert "Traceback" not in said


def test_a_signal_to_all_processes_while_workers_stream_is_saved(
    more_photos: Path, more_undisturbed: Path, tmp_path: Path
) -> None:
    command = on_more(more_photos, tmp_path / "run")
    process = soak.watch(command, soak.PHASES["training on a stream"], tmp_path / "watched", holds=True)
    process.send(signal.SIGTERM, to_group=True)  # as Slurm does: the workers receive it too
    code, said = process.wait()
    assert code == 143
    assert said.strip().splitlines()[-1].startswith(f"semaug: stopped by SIGTERM{WHERE['training on a stream']}; ")
    assert "Traceback" not in said
    assert main(command) == 0
    assert soak.differences(tmp_path / "run", more_undisturbed) == []


def test_an_ignored_signal_stays_ignored_and_handlers_are_restored(
    photos: Path, undisturbed: Undisturbed, tmp_path: Path, before_step: BeforeStep
) -> None:
    reference, handler = undisturbed(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before_step(ask_in(1, signal.SIGINT))
        assert soak.differences(train(quick_config(photos, tmp_path / "run")), reference) == []
    finally:
        signal.signal(signal.SIGINT, handler)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ------------------------------------------------------------------------------------------------------ checkpoints


def stopped(photos: Path, output: Path, before_step: BeforeStep, step: int = STEPS + 1) -> TrainConfig:
    """The settings of a run that was stopped in a step."""
    settings = quick_config(photos, output)
    before_step(ask_in(step))
    with pytest.raises(Interrupted):
        train(settings)
    before_step(lambda step: None)
    return settings


@pytest.mark.parametrize("name", ["last", "best"])
def test_with_a_damaged_checkpoint_training_resumes_from_the_one_before(
    photos: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
    before_step: BeforeStep,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = undisturbed()
    settings = stopped(photos, tmp_path / "run", before_step, 2 * STEPS + 1)
    file = tmp_path / "run" / "checkpoints" / name
    if name == "best":
        checkpoints.previous(file).unlink(missing_ok=True)
        file.replace(checkpoints.previous(file))
    file.write_bytes(file.read_bytes()[:-100] if name == "last" else b"")
    run = train(settings)
    assert f"{name} is damaged; trying the one before it" in capsys.readouterr().err
    assert soak.differences(run, reference) == []


def limited_main(limit: int, command: list[str]) -> int:
    """The command, which can write no file larger than the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return main(command)


def test_a_full_disk_ends_training_with_one_sentence_and_leaves_the_old_checkpoint(
    photos: Path, tmp_path: Path, before_step: BeforeStep
) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle, as it would there."""
    run, command = tmp_path / "run", soak.arguments(photos, tmp_path / "run", "isda", 2)
    assert main(soak.arguments(photos, tmp_path / "undisturbed", "isda", 2)) == 0
    before_step(ask_in(6))
    assert main(command) == 143
    before_step(lambda step: None)
    before = (run / "checkpoints" / "last").read_bytes()
    code, said = Fork(tmp_path / "log", limited_main, len(before) // 2, command).wait()
    assert code == 2, said
    assert said.strip().splitlines()[-1] == f"semaug: cannot write {run / 'checkpoints' / 'last'}: File too large"
    assert "Traceback" not in said
    assert (run / "checkpoints" / "last").read_bytes() == before
    assert not list(run.rglob(".*.part"))
    assert main(command) == 0
    assert soak.differences(run, tmp_path / "undisturbed") == []


def run_of(checkpoint: Path) -> str:
    """The run that a checkpoint is marked with."""
    title, _ = checkpoint.read_bytes().split(b"\n", 1)
    return title.split()[-1].decode()


def test_a_checkpoint_of_another_network_is_refused_in_one_sentence(
    photos: Path, tmp_path: Path, before_step: BeforeStep
) -> None:
    settings = stopped(photos, tmp_path / "run", before_step)
    file = tmp_path / "run" / "checkpoints" / "last"
    state = checkpoints.load(file)
    assert state is not None
    del state["model"]["head.weight"]
    checkpoints.save(file, state, run_of(file))
    with pytest.raises(SemaugError, match="does not fit this run"):
        train(settings)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_code_in_weights_or_in_a_checkpoint_is_refused_and_not_run(
    photos: Path, tmp_path: Path, before_step: BeforeStep
) -> None:
    evil = {"model": Malicious(tmp_path / "owned"), "head.weight": torch.zeros(3)}
    torch.save(evil, tmp_path / "evil.pth")
    with pytest.raises(SemaugError, match="other formats can hold code"):
        train(quick_config(photos, tmp_path / "other", weights=tmp_path / "evil.pth"))
    settings = stopped(photos, tmp_path / "run", before_step, 1)
    file = tmp_path / "run" / "checkpoints" / "last"
    checkpoints.save(file, evil, run_of(file))
    checkpoints.previous(file).unlink()
    with pytest.raises(SemaugError, match="no checkpoint in .* can be read"):
        train(settings)
    assert not (tmp_path / "owned").exists()
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert (tmp_path / "owned").exists(), "it was a real one"


def test_the_evaluation_names_the_epoch_of_the_weights(undisturbed: Undisturbed) -> None:
    run = undisturbed()
    best = checkpoints.load(run / "checkpoints" / "best")
    assert best is not None
    assert read_json(run / "evaluation.json")["best_epoch"] == best["epoch"]


# ------------------------------------------------------------------------------------------------------- divergence


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], what: str) -> None:
    """Make the loss or the gradient of these steps, counted from 0 over the run, not a number."""
    original, count = LearnableAugmentation.step, iter(range(1_000_000))

    def step(self: LearnableAugmentation, *batch: Tensor) -> dict[str, Tensor]:
        metrics = original(self, *batch)
        if next(count) in steps:
            for parameter in self.network.model.parameters():
                parameter.data.mul_(math.nan)
            metrics[{"loss": "train_loss", "gradient": "gradient_norm"}[what]] = torch.tensor(math.nan)
        return metrics

    monkeypatch.setattr(LearnableAugmentation, "step", step)


@pytest.mark.parametrize(
    ("options", "failing", "what", "named"),
    [
        (KINDS[0], STEPS + 1, "loss", "train loss nan"),
        (KINDS[1], STEPS + 1, "gradient", "gradient norm nan"),
        (KINDS[1], 0, "loss", "train loss nan"),
        (KINDS[0], STEPS, "gradient", "gradient norm nan"),
    ],
)
def test_a_failed_step_is_named_and_the_state_before_it_saved(
    photos: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Options,
    failing: int,
    what: str,
    named: str,
) -> None:
    reference, settings = undisturbed(**options), quick_config(photos, tmp_path / "run", **options)
    epoch, step = divmod(failing, STEPS)
    with monkeypatch.context() as patch:
        poison(patch, {failing}, what)
        message = rf"epoch {epoch + 1}, step {step + 1} of 3 \({named}\); the state before .* smaller `lr`"
        with pytest.raises(SemaugError, match=message):
            train(settings)
    saved = checkpoints.load(tmp_path / "run" / "checkpoints" / "last")
    assert saved is not None
    assert (saved["epoch"], saved["within"]["step"]) == (epoch, step)
    assert soak.differences(train(settings), reference) == []


def test_in_fp16_a_step_that_overflows_is_skipped_and_many_in_a_row_are_a_failure(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = LearnableAugmentation.step, iter(range(1_000_000))
    overflowing: set[int] = {1}

    def step(self: LearnableAugmentation, *batch: Tensor) -> dict[str, Tensor]:
        metrics = original(self, *batch)
        return {**metrics, "train_loss": torch.tensor(math.inf)} if next(count) in overflowing else metrics

    monkeypatch.setattr(LearnableAugmentation, "step", step)
    run = train(quick_config(photos, tmp_path / "run", precision="fp16", method="isda"))
    assert all(math.isfinite(value) for row in read_metrics(run) for value in row.values())
    overflowing |= set(range(1_000_000))
    with pytest.raises(SemaugError, match="epoch 1, step 3 of 3 .train loss inf"):
        train(quick_config(photos, tmp_path / "other", precision="fp16", method="isda"))
    monkeypatch.setattr("semaug.training.checks.OVERFLOWS_ALLOWED", 4)
    with pytest.raises(SemaugError, match="epoch 1, step 5 of 9"):
        train(quick_config(photos, tmp_path / "many", precision="fp16", method="isda", batch_size=1))
