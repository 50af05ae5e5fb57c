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

from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import evaluate
from semaug.inference.loop import predict_logits
from semaug.inference.pictures import sample_pictures
from semaug.network.models import pretrained_weights
from semaug.training import checkpoints
from semaug.training.batches import Batches, PixelLoader, prefetched
from semaug.training.checks import NOT_FINITE, FiniteCheck, breakdown, covnet_warning
from semaug.training.methods import METHODS
from semaug.training.optimization import Optimization, build_network
from semaug.training.probing import whole_network, with_features
from semaug.training.run_data import RunData, load_run_data, read_run_data
from semaug.training.run_directory import RunDirectory
from semaug.training.settings import TrainConfig, required
from semaug.training.state import SELECT_BY, EpochState, TrainingState
from semaug.training.tracking import Tracker, check_installed, make_tracker
from semaug.util import distributed
from semaug.util.errors import RunError, TrainingError
from semaug.util.files import write_json
from semaug.util.names import counted, percent
from semaug.util.progress import Progress, ProgressCallback
from semaug.util.signals import Interrupted, Stop
from semaug.util.untrusted import read_json

CHECK_EVERY = 50  # steps between two checks of their numbers, for which the host waits for the device
LEAST_ON_GPU = 256  # images in a batch of validation, which a GPU does not fill with fewer
MUCH_WAITING = 0.1  # share of the first epoch spent waiting for images that causes a hint


def train(config: TrainConfig, verbose: bool = False) -> Path:
    """Train a network as configured, or resume the run in the output directory.

    Under torchrun all processes train one network together, and rank 0 writes the files.

    Args:
        config: The settings.
        verbose: Whether to print all settings, and all numbers of each epoch.

    Returns:
        The run directory, with the trained model, metrics and evaluation.

    Raises:
        SemaugError: If a setting, the data, the network or the run directory is at fault, or training diverges.
        Interrupted: If SIGINT or SIGTERM arrives; the message says what is saved.
    """
    config = config.resolve()
    if not distributed.is_launched():
        return _run(config, torch.device(required(config.device)), verbose)
    initialized = distributed.is_running()
    device = distributed.initialize(required(config.device))
    try:
        return _run(config, torch.device(device), verbose)
    except distributed.PeerLostError as error:
        message = f"another process has ended; run the same command again to resume the run in {config.output}"
        raise TrainingError(message, on_all_ranks=True) from error
    finally:
        if not initialized:
            distributed.shut_down()


def _run(config: TrainConfig, device: torch.device, verbose: bool) -> Path:
    run, progress = RunDirectory(required(config.output)), Progress(distributed.rank() > 0, verbose)
    settings = config.to_json()
    progress.numbers(settings.pop("augmentation") | settings)
    with Stop() as stop, run:
        distributed.raise_on_all_ranks(lambda: check_installed(config.track))
        if run.claim(config, progress):
            further = f"with weights {run.folder} to train its model further"
            progress.say(f"{run.folder} is complete; choose another output directory to train again, {further}")
            if not config.keep_checkpoints:
                run.delete_checkpoints()  # if the process was killed before it had done so
            return run.folder
        listing = run.folder / "bad_images.json" if run.writes else None
        dataset = distributed.raise_on_all_ranks(lambda: read_run_data(config, progress))
        run.identify(config, dataset, progress)
        if config.pretrained:  # before images are decoded, which may take long
            distributed.raise_on_all_ranks(lambda: pretrained_weights(required(config.model)))
        data = distributed.raise_on_all_ranks(lambda: load_run_data(config, dataset, device, progress, listing))
        torch.manual_seed(config.seed)
        model = distributed.raise_on_all_ranks(lambda: build_network(config, len(data.classes), device, progress))
        if config.freeze == "all":
            data = distributed.raise_on_all_ranks(lambda: with_features(config, data, model, device, progress))
        optimization = Optimization(model, config, device, data.class_images)
        if METHODS[config.method].learns:
            progress.say(optimization.learner.network.frozen_text())
        trainer = Trainer(config, run, data, optimization, progress, stop)
        trainer.resume()
        track = config.track if run.writes else None
        with closing(make_tracker(track, run.folder, config.to_json(), trainer.state.epoch)) as tracker:
            with stop.deferred():
                while not trainer.is_finished():
                    trainer.run_epoch(tracker)
                run.wait()
            run.write_metrics(trainer.state.metrics)  # again, if the process was killed after the last checkpoint
            progress.say(trainer.evaluate_best(tracker))
        if not config.keep_checkpoints:
            run.delete_checkpoints()
    return run.folder


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
        self._loader = PixelLoader(data.preprocessing, self.optimization.device, config.workers)
        transforms = METHODS[config.method].images(len(data.classes))
        self._batches = Batches(data.train, data.splits["train"], transforms, config, self._loader)
        self._finite_check = FiniteCheck(self._batches.steps, config.precision == "fp16")
        self._chance = max(data.class_images) / len(data.splits["train"])
        self._beginning: dict[str, Any] | None = None  # the initial state, until there is a checkpoint

    # -- the loop -----------------------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Whether all epochs are done, or validation has not improved for `patience` epochs.

        Raises:
            TrainingError: If training has broken down.
        """
        state, patience = self.state, self.config.patience
        if state.epoch == 0:
            return False
        self._raise_if_broken_down()
        is_validated = "val_top1" in state.metrics[-1]
        if patience is not None and is_validated and state.epoch - state.best_epoch >= patience:
            self.progress.say(f"no better validation accuracy for {counted(patience, 'epoch')}: stopping")
            return True
        return state.epoch == self._epochs

    def run_epoch(self, tracker: Tracker) -> None:
        """Take the remaining steps of an epoch, validate, save and report."""
        state, epoch, learner = self.state, self.state.epoch + 1, self.optimization.learner
        self._loader.waited = 0.0
        within = self._train_epoch()
        row = {"epoch": epoch, "lr": within.lr, "strength": learner.strength, **within.means()}
        started = time.perf_counter()
        is_due, select = epoch % self.config.validate_every == 0, self.config.select
        if epoch == self._epochs or (is_due and select != "last"):
            row |= self._validate()
        elif is_due and self.config.best_of_test:
            row["test_top1"] = self._validate()["val_top1"]  # under another name: it chooses no epoch
        row["validation_seconds"] = round(time.perf_counter() - started, 3)
        started = time.perf_counter()
        snapshot = self._snapshot()
        row["saving_seconds"] = round(time.perf_counter() - started, 3)
        row["seconds"] = round(within.seconds + row["validation_seconds"] + row["saving_seconds"], 3)
        row["images_per_second"] = round(self._batches.images / max(within.seconds, 1e-3), 1)

        is_best = state.complete_epoch(row, SELECT_BY[self.config.select_by])
        warning = None if state.warned else covnet_warning(learner.source, state.metrics)
        state.warned = state.warned or warning is not None
        # Logged before the epoch is saved: an epoch that has to be repeated is logged again.
        tracker.log(epoch, {name: value for name, value in row.items() if name != "epoch"})
        self._save(snapshot, is_best=is_best)

        self.progress.epoch(row, self._epochs)
        self.progress.numbers(row)
        if warning is not None:
            self.progress.say(f"warning: after epoch {epoch} {warning}")
        if epoch == 1 and self._loader.waited > MUCH_WAITING * row["seconds"]:
            share = self._loader.waited / row["seconds"]
            self.progress.say(f"{percent(share, 0)} of epoch 1 was spent waiting for images; try more worker processes")

    def _train_epoch(self) -> EpochState:
        """Take the remaining steps of an epoch; at a number that is not finite, save the state before that step."""
        state, total = self.state, self._batches.steps
        within = state.within = state.within or EpochState(self._batches.images)
        name = f"epoch {state.epoch + 1}/{self._epochs}"
        with self.progress.task(name, total) as advance, self._batches.remaining(state.epoch, within) as inputs:
            while within.step < total:
                first = within.step
                steps = self._take_steps(within, inputs, min(total, first + CHECK_EVERY), advance)
                failure = self._finite_check.first_failure(steps)
                if failure is not None:
                    self._fail(first + failure, steps[failure])
                within.add(steps)
                self._stop_if_asked()
        return within

    def _take_steps(
        self,
        within: EpochState,
        inputs: Iterator[tuple[Tensor, Tensor, Tensor]],
        end: int,
        advance: ProgressCallback = lambda done, total: None,
    ) -> list[dict[str, float]]:
        """Take the steps up to `end`, or until asked to stop; returns their metrics."""
        epoch, started, metrics = self.state.epoch, time.perf_counter(), []
        learner, steps = self.optimization.learner, self._batches.steps
        self.optimization.set_training_mode()
        for step in range(within.step, end):
            # The paper's λ is constant within an epoch.
            learner.set_progress((epoch + (step / steps if self._auto else 0)) / self._epochs)
            within.lr = self.optimization.set_learning_rates(epoch + step / steps)
            images, labels, within.generator = next(inputs)
            metrics.append(self.optimization.step(images, labels))
            advance(step + 1, steps)
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
        batches = own.split(self._validation_batch()) if len(own) else ()
        classes = len(self.data.classes)
        right, loss, finite = (torch.zeros(size, dtype=torch.float64) for size in (classes, 1, 1))
        with closing(self._loader.load(self.data.val, batches)) as pixels:
            model, settings = self.optimization.evaluated, self.config
            ahead = prefetched(pixels, self.optimization.device)
            logits_of_batches = predict_logits(model, ahead, self.data.preprocessing, autocast=settings.autocast)
            for indices, logits in zip(batches, logits_of_batches, strict=True):
                truth = labels[indices]
                losses = nn.functional.cross_entropy(logits, truth, reduction="none").double()
                is_finite = losses.isfinite()
                right += truth[(logits.argmax(1) == truth) & is_finite].bincount(minlength=classes)
                loss, finite = loss + losses[is_finite].sum(), finite + is_finite.double().sum()
                if not distributed.is_running():  # ranks would have to agree, and may have different numbers of batches
                    self._stop_if_asked()
        right, loss, finite = distributed.sum_over_ranks([right, loss, finite])
        images = labels.bincount(minlength=classes)
        of_classes = (right / images)[images > 0].mean()
        row = {"val_top1": round(float(right.sum()) / len(labels), 6)}
        row["val_mean_class_accuracy"] = round(float(of_classes), 6)
        if finite < len(labels):
            return {**row, NOT_FINITE: len(labels) - int(finite)}
        return {**row, "val_loss": round(float(loss) / len(labels), 6)}

    def _validation_batch(self) -> int:
        """Images that are validated at a time: without gradients more of them fit than in training."""
        if self.optimization.device.type != "cuda":
            return 2 * self._batch_size
        if self.config.micro_batch is not None:
            return 4 * self.config.micro_batch
        return max(4 * self._batch_size, LEAST_ON_GPU)

    def evaluate_best(self, tracker: Tracker) -> str:
        """Write the model of the best epoch and evaluate it on the test split, or else on the validation split.

        Returns:
            A sentence with the result.

        Raises:
            TrainingError: If no epoch gave finite numbers in validation.
        """
        config, run, data, epoch = self.config, self.run, self.data, self._write_best()
        if epoch is None:
            raise TrainingError(
                f"no epoch of {run.folder} gave finite numbers in validation, so there is no best model; with another "
                "`output`, try a smaller `lr`",
                on_all_ranks=True,
            )
        split = "test" if "test" in data.splits else "val"
        samples = data.splits[split]
        settings = read_json(run.folder / "config.json") if run.writes else {}
        network = whole_network(self.optimization.evaluated).eval()
        classifier = Classifier(network, data.classes, config.preprocessing, required(config.model), settings)
        with Progress(quiet=not run.writes).task(f"evaluating on {split}", len(samples)) as advance:
            result = evaluate(classifier, samples, progress=advance)
        content = {"split": split, "best_epoch": epoch, **result.to_json()}
        which = {"last": "the last", "test": "the best on the test split"}.get(config.select, "the best on validation")
        message = f"{split}: top-1 {100 * result.scores.top1:.2f} % (epoch {epoch}, {which})"
        if config.best_of_test:  # of the epochs that were evaluated on it
            best = max(row.get("test_top1") or row.get("val_top1") or 0.0 for row in self.state.metrics)
            content["best_of_test"] = best
            message += f"; best of test, which is too high: {100 * best:.2f} %"
        if run.writes:
            write_json(run.folder / "samples.json", sample_pictures(classifier, samples, config.seed))
            scores = {f"{split}_{name}": value for name, value in result.scores.numbers().items()}
            tracker.log(epoch, scores, final=True)
            write_json(run.folder / "evaluation.json", content)
        run.sign()
        return message

    def _write_best(self) -> int | None:
        """Load the best epoch into the model and write it; returns the epoch, or None if there is none."""
        best, model = self.run.load("best"), self.optimization.evaluated
        if best is None:
            return None
        model.load_state_dict(best["model"])
        if METHODS[self.config.method].augments:
            self.run.write_tensors("source.safetensors", best["source"])  # Σ, as it was for this model
        self.run.write_tensors("model.safetensors", whole_network(model).state_dict())
        if self.run.writes:  # scores that are there already may be damaged or another run's, and would get a checksum
            (self.run.folder / "evaluation.json").unlink(missing_ok=True)
        self.run.sign()
        return int(best["epoch"])

    # -- saving and resuming ------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Restore the state of the last checkpoint, if there is one."""
        content, folder = self.run.load("last"), self.run.folder
        if content is None:
            self._beginning = self.state.to_checkpoint() | checkpoints.snapshot(self.optimization.state_dict())
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
        best = self.run.load("best") if self.state.best_epoch else {"epoch": 0}
        # A process that is killed between the two has a newer "best", and repeats that epoch.
        if best is None or best["epoch"] not in (self.state.best_epoch, epoch + 1):
            raise RunError(
                f"{folder} has no intact checkpoint of its best epoch, {self.state.best_epoch}; restore "
                "checkpoints/best, or choose another `output`",
                on_all_ranks=True,
            )
        step = "" if within is None else f", step {within.step} of epoch {epoch + 1}"
        self.progress.say(f"resuming after epoch {epoch} of {self._epochs}{step}")

    def _restore(self, content: dict[str, Any]) -> None:
        self.optimization.load_state_dict(content)
        self.state = TrainingState.from_checkpoint(content)

    def _snapshot(self) -> dict[str, Any]:
        """Copy the contents of a checkpoint except the progress, once the previous checkpoint is written."""
        self.run.wait()
        self.optimization.average_buffers()
        optimization = self.optimization
        best = {"model": optimization.evaluated.state_dict(), "source": optimization.learner.source.state_dict()}
        return checkpoints.snapshot({"last": optimization.state_dict(), "best": best})

    def _save(self, snapshot: dict[str, Any], *, is_best: bool = False) -> None:
        best = {**snapshot["best"], "epoch": self.state.epoch} if is_best else None
        self.run.save(self.state.to_checkpoint() | snapshot["last"], best)
        self._beginning = None

    def _signal(self) -> int | None:
        """The signal that this process, or another one of the run, has received."""
        return max(number for (number,) in distributed.gather_numbers([self.stop.asked or 0])) or None

    def _stop_if_asked(self) -> None:
        number, within = self._signal(), self.state.within
        if number is None or within is None:
            return
        self._save(self._snapshot())
        self.run.wait()
        where = f"in epoch {self.state.epoch + 1} after step {within.step} of {self._batches.steps}"
        raise Interrupted(number, f"stopped by {signal.Signals(number).name} {where}, which is saved")

    def _fail(self, step: int, numbers: dict[str, float]) -> None:
        """Repeat the steps since the last checkpoint up to the one that failed, and save the state before that one."""
        content = self.run.load("last") if self._beginning is None else distributed.broadcast_object(self._beginning)
        if content is None:
            raise RunError(f"the checkpoints of {self.run.folder} were deleted during training", on_all_ranks=True)
        self._restore(content)
        within = self.state.within = self.state.within or EpochState(self._batches.images)
        with self._batches.remaining(self.state.epoch, within) as inputs:
            within.add(self._take_steps(within, inputs, step))
        self._save(self._snapshot())
        self.run.wait()
        name = next(name for name, value in numbers.items() if not math.isfinite(value))
        raise TrainingError(
            f"training diverged in epoch {self.state.epoch + 1}, step {step + 1} of {self._batches.steps} "
            f"({name.replace('_', ' ')} {numbers[name]}); the state before that step is saved in {self.run.folder}; "
            "with another `output`, try a smaller `lr`, a `clip_norm` of 5 or a smaller `strength`",
            on_all_ranks=True,
        )

    def _raise_if_broken_down(self) -> None:
        """Stop a run that has diverged. Its metrics are saved, so the same command stops again."""
        state = self.state
        reason = breakdown(state.metrics, len(self.data.classes), self._batches.images, self._chance)
        if reason is None:
            return
        if self._write_best() is None:
            good = "there was no epoch to save as the best"
        else:
            scores = f"the best on validation with {100 * state.best:.1f} %"
            good = f"{self.run.folder} has the model of epoch {state.best_epoch}, {scores}"
        smaller = "a smaller `strength` or a smaller `lr`" if METHODS[self.config.method].augments else "a smaller `lr`"
        raise TrainingError(
            f"training diverged in epoch {state.epoch}: {reason}; {good}; with another `output`, try {smaller}",
            on_all_ranks=True,
        )


def _to_host(steps: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Copy the metrics of several steps from the device, in one transfer."""
    if not steps:
        return []
    values = iter(torch.stack([value.double() for metrics in steps for value in metrics.values()]).tolist())
    return [{name: next(values) for name in metrics} for metrics in steps]
