"""Training that is killed, stopped, or breaks down loses nothing: what comes out at last is the same to the bit."""

import io
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soak
from photos import photo_folder
from semaug.cli.main import main
from semaug.inference.runs import read_metrics
from semaug.isda.sources import CovNet
from semaug.meta.learner import LearnableAugmentation, _moved
from semaug.training import checkpoints as checkpoint
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import _copied, _odd_covnet, _Run, train
from semaug.util.errors import SemaugError
from semaug.util.files import read_json
from semaug.util.progress import Progress
from semaug.util.signals import Interrupted

Options = dict[str, Any]
OPTIONS: Options = {"model": "small", "pretrained": False, "epochs": 3, "resize": 40, "crop": 32, "batch_size": 4}
OPTIONS |= {"method": "learnable", "val_per_class": 2, "workers": 0, "cache": None, "lr": 0.02, "device": "cpu"}
KINDS: list[Options] = [
    {},
    {"ema": 0.9, "augmentation": Augmentation(order="pipelined", meta_optimizer="adam")},
    {"method": "randaugment"},
]
STEPS = 3  # of an epoch


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    return train(config(photos, tmp_path_factory.mktemp("whole") / "run"))


def config(photos: Path, output: Path, **options: Any) -> TrainConfig:
    return TrainConfig(data=str(photos), output=output, **{**OPTIONS, **options})


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., None]], None]]:
    """Takes a function that is called before each step of training with the number of steps so far."""
    original = LearnableAugmentation.step

    def install(hook: Callable[..., None]) -> None:
        count = iter(range(1_000_000))

        def step(self: LearnableAugmentation, *batch: Tensor) -> dict[str, Tensor]:
            hook(next(count))
            return original(self, *batch)

        monkeypatch.setattr(LearnableAugmentation, "step", step)

    yield install
    monkeypatch.undo()


def ask_in(wanted: int, number: signal.Signals = signal.SIGTERM) -> Callable[[int], None]:
    return lambda step: os.kill(os.getpid(), number) if step == wanted else None


# ---------------------------------------------------------------------------------------------------------- SIGKILL


def test_killed_at_three_moments_it_ends_as_an_undisturbed_run(photos: Path, tmp_path: Path) -> None:
    kind, epochs, chance, hits = "pipelined, Adam, EMA", 5, random.Random(1), Counter[str]()
    command = soak.arguments(photos, tmp_path / "run", kind, epochs)
    for moment in ("in a write", "after a write", "in a write"):
        hits[soak.kill(command, tmp_path / "run", moment, 0.0, chance, writes=(1, 2)) or "not killed"] += 1
    assert "not killed" not in hits
    soak.finish(command)
    assert main(soak.arguments(photos, tmp_path / "reference", kind, epochs)) == 0
    assert soak.differences(tmp_path / "run", tmp_path / "reference") == [], hits
    assert not list((tmp_path / "run").rglob(".*.part")), "what killed writers left is removed"


def test_the_comparison_of_runs_sees_a_difference(photos: Path, tmp_path: Path) -> None:
    one, other = (train(config(photos, tmp_path / str(seed), seed=seed, **KINDS[1])) for seed in (0, 1))
    found = soak.differences(other, one)
    assert {"model.safetensors", "metrics.jsonl", "metrics.csv", "last.random", "last.model.head.weight"} <= set(found)
    for part in ("last.optimizer.state", "last.average", "last.learner.source", "last.learner.meta_optimizer.state"):
        assert any(name.startswith(part) for name in found), part
    assert all(soak.compared(one).values())


def test_killed_while_it_first_wrote_it_can_start(photos: Path, whole: Path, tmp_path: Path) -> None:
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".config.json.{gone}.part").write_text("{")
    assert soak.differences(train(config(photos, tmp_path / "run")), whole) == []


def test_killed_after_the_last_checkpoint_it_still_writes_the_metrics(
    photos: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "semaug.training.trainer._write_metrics"
    with monkeypatch.context() as patch:
        patch.setattr(written, lambda folder, rows: _raise(KeyboardInterrupt()) if len(rows) == 3 else None)
        with pytest.raises(KeyboardInterrupt):
            train(config(photos, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert soak.differences(train(config(photos, tmp_path / "run")), whole) == []


def test_broken_off_after_patience_ran_out_it_does_not_train_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(photos, tmp_path / "run", epochs=30, patience=1, lr=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_finish", lambda *_: _raise(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    epochs = len(read_metrics(tmp_path / "run"))
    assert len(read_metrics(train(settings))) == epochs < 30


def _raise(error: BaseException) -> None:
    raise error


# ------------------------------------------------------------------------------------------------ SIGINT and SIGTERM


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("step", [0, STEPS + 1])
def test_stopped_within_an_epoch_it_goes_on_to_the_same_end(
    photos: Path, tmp_path: Path, before_step: Any, options: Options, step: int
) -> None:
    reference = train(config(photos, tmp_path / "whole", **options))
    broken = config(photos, tmp_path / "broken", **options)
    before_step(ask_in(step))
    with pytest.raises(Interrupted, match=f"SIGTERM in epoch {1 + step // STEPS} after step {1 + step % STEPS} of 3"):
        train(broken)
    saved = checkpoint.load(tmp_path / "broken" / "checkpoints" / "last")
    assert saved is not None
    assert (saved["epoch"], saved["within"]["step"]) == (step // STEPS, 1 + step % STEPS)
    assert soak.differences(train(broken), reference) == []


def test_stopped_in_validation_it_goes_on_to_the_same_end(
    photos: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _Run._validate

    def validate(self: _Run, state: dict[str, Any], *held_out: Tensor) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return original(self, state, *held_out)

    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_validate", validate)
        with pytest.raises(Interrupted, match="SIGINT in epoch 1 after step 3 of 3"):
            train(config(photos, tmp_path / "run"))
    assert soak.differences(train(config(photos, tmp_path / "run")), whole) == []


def test_how_often_numbers_are_looked_at_changes_nothing(
    photos: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semaug.training.trainer.LOOK_EVERY", 2)
    assert soak.differences(train(config(photos, tmp_path / "run")), whole) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_with_one_sentence(
    photos: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = soak.start(soak.arguments(photos, tmp_path / "run", "isda", 100_000))
    soak.wait_for(process, (tmp_path / "run" / "metrics.jsonl").exists)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"semaug: stopped by {number.name} in epoch ")
    assert last.endswith("which is saved; run the same command again to resume")
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def more_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many that there are several chunks to decode, batches to validate, and batches in the last evaluation."""
    return photo_folder(tmp_path_factory.mktemp("more"), train=20, test=50)


@pytest.fixture(scope="module")
def more_whole(more_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
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
def test_in_each_phase_a_signal_is_heard_before_anything_else_is_begun(
    more_photos: Path, more_whole: Path, tmp_path: Path, name: str
) -> None:
    """A real process waits in the midst of a step, batch, image or chart until it has heard the signal."""
    command = on_more(more_photos, tmp_path / "run")
    process = soak.watch(command, soak.PHASES[name], tmp_path / "watched", holds=True)
    process.send_signal(signal.SIGTERM)
    before = (tmp_path / "watched" / "begun").stat().st_size
    _, said = process.communicate(timeout=soak.SLOWEST)
    begun = (tmp_path / "watched" / "begun").stat().st_size - before
    # each worker may end its image and begin another before it is told; a chunk of images has 16
    assert begun <= (6 if "processes" in name else 0)
    assert process.returncode == 143
    sentence = f"semaug: stopped by SIGTERM{WHERE.get(name, '')}; run the same command again to resume"
    assert said.strip().splitlines()[-1] == sentence
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "evaluation.json").exists() == (name == "writing the report")
    assert not list((tmp_path / "run").rglob(".*.part"))
    assert main(command) == 0
    assert soak.differences(tmp_path / "run", more_whole) == []
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("phase", ["decoding in two processes", "training on a stream"])
def test_workers_do_not_outlive_training_that_is_killed(more_photos: Path, tmp_path: Path, phase: str) -> None:
    command = on_more(more_photos, tmp_path / "run")
    process = soak.watch(command, soak.PHASES[phase], tmp_path / "watched", holds=phase == "training on a stream")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SLOW = """
import pathlib, sys, time
from semaug.data.images import Preprocessing
from semaug.meta.learner import LearnableAugmentation
from semaug.training.methods import Augmentation
from semaug.cli.main import main
def slow(*_):
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(120)
{place} = slow
sys.exit(main(sys.argv[2:]))
"""


def start_slow(place: str, marker: Path, command: list[str]) -> "subprocess.Popen[str]":
    script = SLOW.format(place=place)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(marker), *command], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    soak.wait_for(process, marker.exists)
    return process


def test_a_second_signal_ends_at_once(photos: Path, tmp_path: Path) -> None:
    command = soak.arguments(photos, tmp_path / "run", "isda", 3)
    process = start_slow("LearnableAugmentation.step", tmp_path / "marker", command)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == -signal.SIGTERM
    process.communicate()


def test_a_signal_to_all_while_workers_decode_gives_one_sentence(photos: Path, tmp_path: Path) -> None:
    command = [*soak.arguments(photos, tmp_path / "run", "isda", 3), "--workers", "2"]
    process = start_slow("Preprocessing.pixels", tmp_path / "marker", command)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "semaug: stopped by SIGINT; run the same command again to resume"
    assert "Traceback" not in said


def test_a_signal_to_all_while_workers_stream_is_saved(more_photos: Path, more_whole: Path, tmp_path: Path) -> None:
    command = on_more(more_photos, tmp_path / "run")
    process = soak.watch(command, soak.PHASES["training on a stream"], tmp_path / "watched", holds=True)
    os.killpg(process.pid, signal.SIGTERM)  # as Slurm does; the workers hear it too
    _, said = process.communicate(timeout=60)
    sentence = f"semaug: stopped by SIGTERM{WHERE['training']}; run the same command again to resume"
    assert said.strip().splitlines()[-1] == sentence
    assert "Traceback" not in said
    assert main(command) == 0
    assert soak.differences(tmp_path / "run", more_whole) == []


def test_an_ignored_signal_stays_ignored_and_handlers_come_back(
    photos: Path, whole: Path, tmp_path: Path, before_step: Any
) -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before_step(ask_in(1, signal.SIGINT))
        assert soak.differences(train(config(photos, tmp_path / "run")), whole) == []
    finally:
        signal.signal(signal.SIGINT, handler)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ------------------------------------------------------------------------------------------------------ checkpoints


def stopped(photos: Path, output: Path, before_step: Any, step: int = STEPS + 1) -> TrainConfig:
    """The settings of a run that was stopped in a step."""
    settings = config(photos, output)
    before_step(ask_in(step))
    with pytest.raises(Interrupted):
        train(settings)
    before_step(lambda step: None)
    return settings


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_damaged_checkpoint_falls_back_and_training_goes_on(
    photos: Path, whole: Path, tmp_path: Path, before_step: Any, name: str
) -> None:
    settings = stopped(photos, tmp_path / "run", before_step, 2 * STEPS + 1)
    file = tmp_path / "run" / "checkpoints" / name
    if name == "best":
        checkpoint.previous(file).unlink(missing_ok=True)
        file.replace(checkpoint.previous(file))
    file.write_bytes(file.read_bytes()[:-100] if name == "last" else b"")
    with pytest.warns(UserWarning, match=f"{name} is damaged"):
        run = train(settings)
    assert soak.differences(run, whole) == []


def test_a_full_disk_ends_with_one_sentence_and_the_old_checkpoint(photos: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle, as it would there."""
    run = tmp_path / "run"
    command = soak.arguments(photos, run, "isda", 3)
    process = soak.start(command)
    soak.wait_for(process, (run / "checkpoints" / "last").exists)
    process.kill()
    process.communicate()
    before = (run / "checkpoints" / "last").read_bytes()
    limit = len(before) // 2
    full = soak.start(command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, said = full.communicate(timeout=120)
    assert full.returncode == 2, said
    assert said.strip().splitlines()[-1] == f"semaug: cannot write {run / 'checkpoints' / 'last'}: File too large"
    assert "Traceback" not in said
    assert (run / "checkpoints" / "last").read_bytes() == before
    assert not list(run.rglob(".*.part"))
    assert main(command) == 0
    assert main(soak.arguments(photos, tmp_path / "whole", "isda", 3)) == 0
    assert soak.differences(run, tmp_path / "whole") == []


def test_a_checkpoint_of_version_1_is_gone_on_from(
    photos: Path, whole: Path, tmp_path: Path, before_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "epoch", lambda self, row, epochs: _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(config(photos, tmp_path / "run"))
    monkeypatch.undo()
    for name, added in (("last", {"within", "warned"}), ("best", {"epoch"})):
        file = tmp_path / "run" / "checkpoints" / name
        state = checkpoint.load(file)
        assert state is not None
        assert added <= set(state)
        write_version_1(file, {key: value for key, value in state.items() if key not in added})
    assert set(soak.differences(train(config(photos, tmp_path / "run")), whole)) <= {"best"}, "which has no epoch"


def write_version_1(file: Path, state: dict[str, Any]) -> None:
    import hashlib

    buffer = io.BytesIO()
    torch.save(state, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest().encode()
    file.write_bytes(b"semaug checkpoint 1\n" + digest + b"\n" + buffer.getvalue())


def test_a_checkpoint_of_another_network_is_told_in_one_sentence(
    photos: Path, tmp_path: Path, before_step: Any
) -> None:
    settings = stopped(photos, tmp_path / "run", before_step)
    file = tmp_path / "run" / "checkpoints" / "last"
    state = checkpoint.load(file)
    assert state is not None
    del state["model"]["head.weight"]
    checkpoint.save(file, state)
    with pytest.raises(SemaugError, match="does not fit this run"):
        train(settings)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_code_in_weights_or_a_checkpoint_is_refused_and_not_run(photos: Path, tmp_path: Path, before_step: Any) -> None:
    evil = {"model": Malicious(tmp_path / "owned"), "head.weight": torch.zeros(3)}
    torch.save(evil, tmp_path / "evil.pth")
    with pytest.raises(SemaugError, match="code in it is never run"):
        train(config(photos, tmp_path / "other", weights=tmp_path / "evil.pth"))
    settings = stopped(photos, tmp_path / "run", before_step, 1)
    checkpoint.save(tmp_path / "run" / "checkpoints" / "last", evil)
    checkpoint.previous(tmp_path / "run" / "checkpoints" / "last").unlink()
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(SemaugError, match="no checkpoint in .* can be read"),
    ):
        train(settings)
    assert not (tmp_path / "owned").exists()
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert (tmp_path / "owned").exists(), "it was a real one"


# ---------------------------------------------------------------------------------------------------------- numbers


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], what: str) -> None:
    """Let the loss or the gradient of these steps, counted from 0 over the run, be no number."""
    original, count = LearnableAugmentation.step, iter(range(1_000_000))

    def step(self: LearnableAugmentation, *batch: Tensor) -> dict[str, Tensor]:
        found = original(self, *batch)
        if next(count) in steps:
            for parameter in self.network.model.parameters():
                parameter.data.mul_(math.nan)
                if parameter.grad is not None:
                    parameter.grad.mul_(math.inf)
            if what == "loss":
                found["train_loss"] = torch.tensor(math.nan)
        return found

    monkeypatch.setattr(LearnableAugmentation, "step", step)


@pytest.mark.parametrize(("what", "named"), [("loss", "train loss nan"), ("gradient", "gradient norm (inf|nan)")])
@pytest.mark.parametrize("options", KINDS[:2])
def test_a_broken_step_is_named_and_the_state_before_it_saved(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Options, what: str, named: str
) -> None:
    reference = train(config(photos, tmp_path / "whole", **options))
    settings = config(photos, tmp_path / "run", **options)
    with monkeypatch.context() as patch:
        poison(patch, {STEPS + 1}, what)
        with pytest.raises(SemaugError, match=rf"epoch 2, step 2 of 3 \({named}\); the state before .* smaller --lr"):
            train(settings)
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "last")
    assert saved is not None
    assert (saved["epoch"], saved["within"]["step"]) == (1, 1)
    assert soak.differences(train(settings), reference) == []


def test_in_fp16_a_step_that_overflows_is_left_out_and_many_in_a_row_are_told(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = LearnableAugmentation.step, iter(range(1_000_000))
    lost: set[int] = {1}

    def step(self: LearnableAugmentation, *batch: Tensor) -> dict[str, Tensor]:
        found = original(self, *batch)
        return {**found, "train_loss": torch.tensor(math.inf)} if next(count) in lost else found

    monkeypatch.setattr(LearnableAugmentation, "step", step)
    run = train(config(photos, tmp_path / "run", precision="fp16", method="isda"))
    assert all(math.isfinite(value) for row in read_metrics(run) for value in row.values())
    lost |= set(range(1_000_000))
    with pytest.raises(SemaugError, match="epoch 1, step 3 of 3 .train loss inf"):
        train(config(photos, tmp_path / "other", precision="fp16", method="isda"))
    monkeypatch.setattr("semaug.training.trainer.OVERFLOWS_ALLOWED", 4)
    with pytest.raises(SemaugError, match="epoch 1, step 5 of 9"):
        train(config(photos, tmp_path / "many", precision="fp16", method="isda", batch_size=1))


@pytest.mark.parametrize(("bias", "what"), [(-20.0, "collapsed"), (20.0, "saturated")])
def test_a_covnet_at_an_end_of_its_range_is_warned_of_once(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before_step: Any,
    capsys: pytest.CaptureFixture[str],
    bias: float,
    what: str,
) -> None:
    original = CovNet.__init__

    def at_the_end(self: CovNet, *arguments: Any) -> None:
        original(self, *arguments)
        torch.nn.init.constant_(self.layers.output.bias, bias)

    monkeypatch.setattr(CovNet, "__init__", at_the_end)
    settings = stopped(photos, tmp_path / "run", before_step)
    train(settings)
    said = capsys.readouterr().err
    assert said.count(f"CovNet {'has' if bias < 0 else 'is'} {what}") == said.count("warning:") == 1


def odd(source: torch.nn.Module, mean: float = 0.5, drift: float = 0.1, spread: float = 0.05, epochs: int = 3) -> str:
    row = {"variance_mean": mean, "variance_std_samples": spread, "drift": drift}
    return str(_odd_covnet(source, [{**row, "strength": float(epoch)} for epoch in range(epochs)]))


def test_only_an_odd_covnet_is_warned_of() -> None:
    plain, shaped = CovNet(8), CovNet(8, fixed_trace=0.001)
    assert odd(plain) == odd(shaped, mean=0.001) == odd(torch.nn.Linear(2, 2), mean=0.0, drift=0.0) == "None"
    assert "collapsed" in odd(plain, mean=0.005)
    assert "saturated" in odd(plain, mean=0.995, epochs=1)
    assert odd(CovNet(8, rank=2), mean=0.995) == "None"
    assert "saturated" in odd(CovNet(8, rank=2), mean=1.99)
    for source in (plain, shaped):
        assert "does not learn: it has moved by 2e-06 of its size" in odd(source, drift=2e-6)
        assert "the same Σ to all images" in odd(source, spread=1e-5 if source is plain else 1e-8)
        assert odd(source, drift=2e-6, spread=1e-9, epochs=2) == "None"  # only one of them with augmentation


def test_a_covnet_as_the_paper_trains_it_is_said_not_to_learn(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(photos, tmp_path / "paper", method="learnable", epochs=4))
    said = capsys.readouterr().err
    assert said.count("warning: after epoch 3 CovNet does not learn") == said.count("warning:") == 1
    quick = Augmentation(meta_optimizer="adam", meta_lr=0.01)
    train(config(photos, tmp_path / "adam", method="learnable", epochs=4, augmentation=quick))
    assert "does not learn" not in capsys.readouterr().err


def test_copies_are_copies_and_states_go_to_a_device_but_for_random_ones() -> None:
    value = {"a": [torch.zeros(2), torch.get_rng_state()], "b": (1, "x", None)}
    copy = _copied(value)
    value["a"][0] += 1
    assert torch.equal(copy["a"][0], torch.zeros(2))
    assert torch.equal(copy["a"][1], value["a"][1])
    assert copy["b"] == (1, "x", None)
    assert _moved(torch.zeros(2), torch.device("meta")).device.type == "meta"
    assert _moved(torch.get_rng_state(), torch.device("meta")).device.type == "cpu"


def test_evaluation_names_the_epoch_of_the_weights(whole: Path) -> None:
    best = checkpoint.load(whole / "checkpoints" / "best")
    assert best is not None
    assert read_json(whole / "evaluation.json")["best_epoch"] == best["epoch"]
