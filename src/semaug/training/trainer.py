"""Training: one loop for all methods."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import evaluate
from semaug.inference.loop import predict_logits
from semaug.inference.pictures import sample_pictures
from semaug.training.batches import Batches, PixelLoader
from semaug.training.checks import FiniteCheck, covnet_warning
from semaug.training.methods import METHODS
from semaug.training.optimization import Optimization, build_network
from semaug.training.run_data import RunData, load_run_data
from semaug.training.run_directory import RunDirectory
from semaug.training.settings import TrainConfig, required
from semaug.training.state import EpochState, TrainingState
from semaug.training.tracking import Tracker, check_installed, make_tracker
from semaug.util import distributed
from semaug.util.errors import RunError, TrainingError
from semaug.util.files import write_json
from semaug.util.progress import Progress
from semaug.util.signals import Interrupted, Stop
from semaug.util.untrusted import read_json

CHECK_EVERY = 50  # steps between two checks of their numbers, for which the host waits for the device
MUCH_WAITING = 0.1  # share of the first epoch spent waiting for images that causes a hint


def train(config: TrainConfig) -> Path:
    """Train a network as configured, or resume the run in the output directory.

    Under torchrun all processes train one network together, and rank 0 writes the files.

    Args:
        config: The settings.

    Returns:
        The run directory, with the trained model, metrics and evaluation.

    Raises:
        SemaugError: If a setting, the data, the network or the run directory is at fault, or training diverges.
        Interrupted: If SIGINT or SIGTERM arrives; the message says what is saved.
    """
    config = config.resolve()
    if not distributed.is_launched():
        return _run(config, torch.device(required(config.device)))
    initialized = distributed.is_running()
    device = distributed.initialize(required(config.device))
    try:
        return _run(config, torch.device(device))
    except distributed.PeerLostError as error:
        message = f"another process has ended; run the same command again to resume the run in {config.output}"
        raise TrainingError(message, on_all_ranks=True) from error
    finally:
        if not initialized:
            distributed.shut_down()


def _run(config: TrainConfig, device: torch.device) -> Path:
    run, progress = RunDirectory(required(config.output)), Progress(quiet=distributed.rank() > 0)
    with Stop() as stop:
        distributed.raise_on_all_ranks(lambda: check_installed(config.track))
        if run.claim(config):
            progress.say(f"{run.folder} is complete; choose another output directory to train again")
            return run.folder
        listing = run.folder / "bad_images.json" if run.writes else None
        data = distributed.raise_on_all_ranks(lambda: load_run_data(config, device, progress, listing))
        if run.writes:
            write_json(run.folder / "classes.json", list(data.classes))
        torch.manual_seed(config.seed)
        model = distributed.raise_on_all_ranks(lambda: build_network(config, len(data.classes), device, progress))
        trainer = Trainer(config, run, data, Optimization(model, config, device), progress, stop)
        trainer.resume()
        track = config.track if run.writes else None
        with closing(make_tracker(track, run.folder, config.to_json(), trainer.state.epoch)) as tracker:
            with stop.deferred():
                while not trainer.is_finished():
                    trainer.run_epoch(tracker)
            run.write_metrics(trainer.state.metrics)  # again, if the process was killed after the last checkpoint
            progress.say(_evaluate_best(config, run, data, trainer.optimization.evaluated, tracker))
    return run.folder


def _evaluate_best(config: TrainConfig, run: RunDirectory, data: RunData, model: nn.Module, tracker: Tracker) -> str:
    """Write the model of the best epoch and evaluate it on the test split, or else on the validation split."""
    best = run.load("best")
    assert best is not None
    model.load_state_dict(best["model"])
    if METHODS[config.method].augments:
        run.write_tensors("source.safetensors", best["source"])  # Σ, as it was for this model
    run.write_tensors("model.safetensors", model.state_dict())
    split = "test" if "test" in data.splits else "val"
    samples, epoch = data.splits[split], best["epoch"]
    settings = read_json(run.folder / "config.json") if run.writes else {}
    classifier = Classifier(model.eval(), data.classes, config.preprocessing, required(config.model), settings)
    with Progress(quiet=not run.writes).task(f"evaluating on {split}", len(samples)) as advance:
        result = evaluate(classifier, samples, progress=advance)
    if run.writes:
        write_json(run.folder / "samples.json", sample_pictures(classifier, samples, config.seed))
        tracker.log(epoch, {f"{split}_{name}": value for name, value in result.scores.numbers().items()}, final=True)
        write_json(run.folder / "evaluation.json", {"split": split, "best_epoch": epoch, **result.to_json()})
    return f"{split}: top-1 {100 * result.scores.top1:.2f} % (epoch {epoch}, the best on validation)"


@dataclass
class Trainer:
    """Trains a network epoch by epoch."""

    config: TrainConfig  # resolved
    run: RunDirectory
    data: RunData
    optimization: Optimization
    progress: Progress
    stop: Stop  # says whether the process was asked to stop
    state: TrainingState = field(default_factory=TrainingState)

    def __post_init__(self) -> None:
        config, data = self.config, self.data
        self._epochs, self._batch_size = required(config.epochs), required(config.batch_size)
        self._auto = config.augmentation.strength == "auto"
        self._loader = PixelLoader(config.preprocessing, self.optimization.device, config.workers)
        transforms = METHODS[config.method].images(len(data.classes))
        self._batches = Batches(data.train, data.splits["train"], transforms, config, self._loader)
        self._finite_check = FiniteCheck(self._batches.steps, config.precision == "fp16")
        self._beginning: dict[str, Any] | None = None  # the initial state, until there is a checkpoint

    # -- the loop -----------------------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Whether all epochs are done, or validation has not improved for `patience` epochs."""
        state, patience = self.state, self.config.patience
        if patience is not None and state.epoch > 0 and state.epoch - state.best_epoch >= patience:
            self.progress.say(f"no better validation accuracy for {patience} epochs: stopping")
            return True
        return state.epoch == self._epochs

    def run_epoch(self, tracker: Tracker) -> None:
        """Take the remaining steps of an epoch, validate, save and report."""
        state, epoch, learner = self.state, self.state.epoch + 1, self.optimization.learner
        self._loader.waited = 0.0
        within = self._train_epoch()
        started = time.perf_counter()
        row = {"epoch": epoch, "lr": within.lr, "strength": learner.strength, **within.means(), **self._validate()}
        row["seconds"] = round(within.seconds + time.perf_counter() - started, 3)
        row["images_per_second"] = round(self._batches.images / max(row["seconds"], 1e-3), 1)

        if state.complete_epoch(row):
            best = {"model": self.optimization.evaluated.state_dict(), "source": learner.source.state_dict()}
            self.run.save("best", {**best, "epoch": epoch})
        warning = None if state.warned else covnet_warning(learner.source, state.metrics)
        state.warned = state.warned or warning is not None
        # Logged before the epoch is saved: an epoch that has to be repeated is logged again.
        tracker.log(epoch, {name: value for name, value in row.items() if name != "epoch"})
        self._save()

        self.progress.epoch(row, self._epochs)
        if warning is not None:
            self.progress.say(f"warning: after epoch {epoch} {warning}")
        if epoch == 1 and self._loader.waited > MUCH_WAITING * row["seconds"]:
            share = self._loader.waited / row["seconds"]
            self.progress.say(f"{share:.0%} of epoch 1 was spent waiting for images; try more worker processes")

    def _train_epoch(self) -> EpochState:
        """Take the remaining steps of an epoch; at a number that is not finite, save the state before that step."""
        state, total = self.state, self._batches.steps
        within = state.within = state.within or EpochState(self._batches.images)
        name = f"epoch {state.epoch + 1}/{self._epochs}"
        with self.progress.task(name, total) as advance, self._batches.remaining(state.epoch, within) as inputs:
            while within.step < total:
                first = within.step
                steps = self._take_steps(within, inputs, min(total, first + CHECK_EVERY))
                failure = self._finite_check.first_failure(steps)
                if failure is not None:
                    self._fail(first + failure, steps[failure])
                within.add(steps)
                advance(within.step, total)
                self._stop_if_asked()
        return within

    def _take_steps(
        self, within: EpochState, inputs: Iterator[tuple[Tensor, Tensor, Tensor]], end: int
    ) -> list[dict[str, float]]:
        """Take the steps up to `end`, or until asked to stop; returns their metrics."""
        epoch, started, metrics = self.state.epoch, time.perf_counter(), []
        learner, steps = self.optimization.learner, self._batches.steps
        self.optimization.model.train()
        for step in range(within.step, end):
            # The paper's λ is constant within an epoch.
            learner.set_progress((epoch + (step / steps if self._auto else 0)) / self._epochs)
            within.lr = self.optimization.set_learning_rates(epoch + step / steps)
            images, labels, within.generator = next(inputs)
            metrics.append(self.optimization.step(images, labels))
            if self._signal() is not None:
                break
        numbers = _to_host(metrics)
        within.step += len(metrics)
        within.seconds += time.perf_counter() - started
        return numbers

    def _validate(self) -> dict[str, float]:
        """Accuracy and loss on the validation split, of which each rank takes its share."""
        self.optimization.average_buffers()
        self._stop_if_asked()
        labels = torch.from_numpy(np.array(self.data.splits["val"].labels, dtype=np.int64))
        own = torch.arange(len(labels))[distributed.rank_slice(len(labels))]
        batches = own.split(2 * self._batch_size) if len(own) else ()
        right = loss = torch.zeros((), dtype=torch.float64)
        with closing(self._loader.load(self.data.val, batches)) as pixels:
            model, autocast = self.optimization.evaluated, self.config.autocast
            logits_of_batches = predict_logits(model, pixels, self.config.preprocessing, autocast=autocast)
            for indices, logits in zip(batches, logits_of_batches, strict=True):
                truth = labels[indices]
                right = right + (logits.argmax(1) == truth).double().sum()
                loss = loss + nn.functional.cross_entropy(logits, truth, reduction="none").double().sum()
                if not distributed.is_running():  # ranks would have to agree, and may have different numbers of batches
                    self._stop_if_asked()
        right, loss = distributed.sum_over_ranks([right, loss])
        return {"val_top1": round(float(right) / len(labels), 6), "val_loss": round(float(loss) / len(labels), 6)}

    # -- saving and resuming ------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Restore the state of the last checkpoint, if there is one."""
        content, folder = self.run.load("last"), self.run.folder
        if content is None:
            self._beginning = pytree.tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), self._content())
            return
        try:
            self._restore(content)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(f"the checkpoint in {folder} does not fit this run ({reason})", on_all_ranks=True) from error
        epoch, within = self.state.epoch, self.state.within
        if within is not None and within.images != self._batches.images:
            raise RunError(
                f"{folder} was interrupted within an epoch of {within.images} training images, and now there are "
                f"{self._batches.images}; restore the images that it had, or choose another `output`",
                on_all_ranks=True,
            )
        step = "" if within is None else f", step {within.step} of epoch {epoch + 1}"
        self.progress.say(f"resuming after epoch {epoch} of {self._epochs}{step}")

    def _content(self) -> dict[str, Any]:
        return self.state.to_checkpoint() | self.optimization.state_dict()

    def _restore(self, content: dict[str, Any]) -> None:
        self.optimization.load_state_dict(content)
        self.state = TrainingState.from_checkpoint(content)

    def _save(self) -> None:
        self.optimization.average_buffers()
        self.run.save("last", self._content())
        self.run.write_metrics(self.state.metrics)
        self._beginning = None

    def _signal(self) -> int | None:
        """The signal that this process, or another one of the run, has received."""
        return max(number for (number,) in distributed.gather_numbers([self.stop.asked or 0])) or None

    def _stop_if_asked(self) -> None:
        number, within = self._signal(), self.state.within
        if number is None or within is None:
            return
        self._save()
        where = f"in epoch {self.state.epoch + 1} after step {within.step} of {self._batches.steps}"
        raise Interrupted(number, f"stopped by {signal.Signals(number).name} {where}, which is saved")

    def _fail(self, step: int, numbers: dict[str, float]) -> None:
        """Repeat the steps since the last checkpoint up to the one that failed, and save the state before that one."""
        content = self.run.load("last") if self._beginning is None else distributed.broadcast_object(self._beginning)
        assert content is not None
        self._restore(content)
        within = self.state.within = self.state.within or EpochState(self._batches.images)
        with self._batches.remaining(self.state.epoch, within) as inputs:
            within.add(self._take_steps(within, inputs, step))
        self._save()
        name = next(name for name, value in numbers.items() if not math.isfinite(value))
        raise TrainingError(
            f"training broke down in epoch {self.state.epoch + 1}, step {step + 1} of {self._batches.steps} "
            f"({name.replace('_', ' ')} {numbers[name]}); the state before that step is saved in {self.run.folder}; "
            "with another `output`, try a smaller `lr`, a `clip_norm` of 5 or a smaller `strength`",
            on_all_ranks=True,
        )


def _to_host(steps: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Copy the metrics of several steps from the device, in one transfer."""
    if not steps:
        return []
    values = iter(torch.stack([value.double() for metrics in steps for value in metrics.values()]).tolist())
    return [{name: next(values) for name in metrics} for metrics in steps]
