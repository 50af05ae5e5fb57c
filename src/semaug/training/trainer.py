"""The training loop: one for all methods."""

import csv
import io
import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import semaug
from semaug.data.images import Preprocessing, decoded
from semaug.data.readable import readable_splits
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import DataSet, Samples
from semaug.data.space import check_free_space
from semaug.inference.classifier import Classifier, as_composite
from semaug.inference.evaluation import evaluate
from semaug.inference.pictures import sample_pictures
from semaug.inference.runs import FORMAT
from semaug.isda.sources import CovNet
from semaug.meta.problem import global_norm
from semaug.meta.state import gather_learner_state, take_rank_state
from semaug.network.models import build_model, load_weights
from semaug.training import checkpoints as checkpoint
from semaug.training import methods
from semaug.training.batches import Batches, Inputs, Pixels, as_tensor
from semaug.training.settings import TrainConfig, given, identifying
from semaug.training.tracking import check_installed, make_tracker
from semaug.util import distributed
from semaug.util.errors import SemaugError
from semaug.util.files import leftovers, read_json, write_atomically, write_json
from semaug.util.progress import Progress
from semaug.util.signals import Interrupted, Stop

LOOK_EVERY = 50  # steps between two looks at their numbers
OVERFLOWS_ALLOWED = 20  # steps in a row without a finite loss in fp16, where the scaler leaves them out
MUCH_WAITING = 0.1  # share of the first epoch, for images that are decoded when they are needed
GRADIENT = "gradient_norm"  # looked at, but no metric
LEARNING_BY = 2  # epochs with augmentation after which a CovNet should have moved …
LITTLE_DRIFT = 1e-3  # … by this share of its size,
LITTLE_SPREAD = 1e-3  # and give images variances that differ by this share of their mean


def train(config: TrainConfig) -> Path:
    """Train as configured, from the start or from where the run in the output directory stopped; returns the latter.

    Under torchrun all processes train one network together, and the first one writes.
    """
    config = config.filled()
    if not distributed.is_launched():
        return _Run(config).train()
    met = distributed.is_running()
    device = distributed.initialize(given(config.device))
    try:
        return _Run(config, device).train()
    except distributed.PeerLostError as error:
        folder = given(config.output)
        told = f"another process has ended; the same command goes on from the last checkpoint in {folder}"
        raise SemaugError(told, on_all_ranks=True) from error
    finally:
        if not met:
            distributed.shut_down()


class _Run:
    """One training run: its data, network, learner and files."""

    def __init__(self, config: TrainConfig, device: str | None = None) -> None:
        self.config, self.method = config, methods.METHODS[config.method]
        self.folder, self.epochs, self.model_name = given(config.output), given(config.epochs), given(config.model)
        self.lr, self.batch_size = given(config.lr), given(config.batch_size)
        self.device = torch.device(device or given(config.device))
        self.writes = distributed.rank() == 0
        self.preprocessing = Preprocessing(given(config.resize), given(config.crop), config.shape)
        self.streams = config.images_on == "stream"
        self.progress = Progress(quiet=not self.writes)
        self.stop = Stop()
        self.pixels = Pixels(self.preprocessing, self.device, config.workers)
        self.overflows = 0  # in fp16, one after the other
        self.start: dict[str, Any] | None = None  # the state in the beginning, until there is a checkpoint

    def train(self) -> Path:
        with self.stop:
            return self._train()

    def _train(self) -> Path:
        config, folder = self.config, self.folder
        distributed.raise_on_all_ranks(lambda: check_installed(config.track))
        if distributed.broadcast_object(distributed.raise_on_all_ranks(self._claim)):
            self.progress.say(f"{folder} is complete; give another --output to train again")
            return folder
        data, splits, held_out = distributed.raise_on_all_ranks(self._read)
        torch.manual_seed(config.seed)
        self.model = distributed.raise_on_all_ranks(lambda: self._model(len(data.classes)))
        self._set_up()

        state = self._resume()
        if not distributed.broadcast_object((folder / "checkpoints" / "last").exists()):
            self.start = _copied(self._content(state))
        self.tracker = make_tracker(config.track if self.writes else None, folder, _settings(config), state["epoch"])
        try:
            with self.stop.deferred():
                while not self._ended(state):
                    self._epoch(state, held_out)
            if self.writes:
                _write_metrics(folder, state["metrics"])
            self._finish(data, splits, state)
        finally:
            self.tracker.close()
        return folder

    def _read(self) -> tuple[DataSet, dict[str, Samples], tuple[Tensor | Samples, Tensor]]:
        """The data, its splits, and images and labels of the validation split."""
        config = self.config
        with self.progress.task(f"fetching {config.data}", 0) as advance:
            data = read_data(config.data, config.data_root, download=config.download, progress=advance)
        if len(data.classes) < 2:
            raise SemaugError(f"{data.name} has a single class; there is nothing to tell apart")
        splits = training_splits(data, config.select, config.val_per_class, config.val_fraction, config.seed)
        splits = self._readable(splits, data)
        self._describe(data, splits)
        images = self._decode(splits["train"], "train")
        transforms = self.method.images(len(data.classes))
        self.batches = Batches(images, splits["train"], transforms, config, self.pixels)
        return data, splits, (self._decode(splits["val"], "val"), as_tensor(splits["val"].labels))

    def _set_up(self) -> None:
        """Optimisers and learner, in the state in which training starts."""
        config = self.config
        self.optimizer = _optimizer(self.model, config)
        autocast = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[str(config.precision)]
        self.scaler = GradScaler(self.device.type) if autocast == torch.float16 else None
        try:
            self.learner = methods.make_learner(
                config.method,
                config.augmentation,
                self.model,
                self.optimizer,
                label_smoothing=config.label_smoothing,
                clip_norm=config.clip_norm,
                micro_batch=config.micro_batch,
                compile=config.compile,
                sync_batch_norm=config.sync_batch_norm,
                autocast=autocast,
                scaler=self.scaler,
            )
        except ValueError as error:  # a network that cannot be split, or settings out of range
            raise SemaugError(str(error), on_all_ranks=True) from error
        self.learner.check_values = False  # for which the device would wait; `_train_epoch` looks at the numbers
        self.average = _average(self.model, config.ema)
        self._draw_apart()

    def _draw_apart(self) -> None:
        """Let each rank draw other masks of dropout from here on; the first one goes on as it would alone."""
        if distributed.rank() > 0:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * distributed.rank() + self.learner.half_steps)

    def _ended(self, state: dict[str, Any]) -> bool:
        patience = self.config.patience
        if patience is not None and state["epoch"] - state["best_epoch"] >= patience and state["epoch"] > 0:
            self.progress.say(f"no better validation accuracy for {patience} epochs: stopping")
            return True
        return bool(state["epoch"] == self.epochs)

    # -- setting up ---------------------------------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Make the run directory ours, or find that it already is, and say if its run is complete.

        A run with other settings is left alone.
        """
        if not self.writes:
            return False
        settings = _settings(self.config)
        file = self.folder / "config.json"
        for leftover in (*leftovers(self.folder), *leftovers(self.folder / "checkpoints")):
            leftover.unlink(missing_ok=True)
        if not file.exists() and any(found.suffix != ".part" for found in self.folder.glob("*")):
            raise SemaugError(f"{self.folder} is not empty and holds no run; choose another --output")
        if not (self.folder / "checkpoints").exists():  # new, or ended by a mistake before its first epoch did
            started = datetime.now(UTC).isoformat(timespec="seconds")
            header = {"format": FORMAT, "version": semaug.__version__, "started": started}
            write_json(
                file,
                {**header, "composite": self.method.composite, "preprocessing": asdict(self.preprocessing), **settings},
            )
            return False
        before = read_json(file)
        if before.get("format") != FORMAT:
            raise SemaugError(f"{self.folder} has format {before.get('format')}, and this version reads {FORMAT}")
        changed = [k for k, v in settings.items() if k in identifying() and before.get(k) != v]
        if changed:
            was = ", ".join(f"{k} {before.get(k)} → {settings[k]}" for k in changed)
            raise SemaugError(f"{self.folder} holds a run with other settings ({was}); choose another --output")
        if not self.config.resume:
            raise SemaugError(f"{self.folder} holds a run already; choose another --output, or leave out --no-resume")
        return (self.folder / "model.safetensors").is_file() and (self.folder / "evaluation.json").is_file()

    def _readable(self, splits: dict[str, Samples], data: DataSet) -> dict[str, Samples]:
        config, cache = self.config, self.config.cache.expanduser() if self.config.cache is not None else None
        listing = self.folder / "bad_images.json" if self.writes else None
        if not self.streams:
            told = check_free_space(splits, self.preprocessing, cache)
            if told is not None:
                self.progress.say(told)
        elif config.on_bad_image == "stop":  # where the first that cannot be read ends training, when it is its turn
            return splits
        with self.progress.task("reading images", 0) as advance:
            found, told = readable_splits(
                splits, data.classes, self.preprocessing, config.on_bad_image,
                cache=cache, workers=config.workers, progress=advance, listing=listing, keep=not self.streams,
            )  # fmt: skip
        if told is not None:
            self.progress.say(told)
        return found

    def _describe(self, data: DataSet, splits: dict[str, Samples]) -> None:
        if self.writes:
            write_json(self.folder / "classes.json", list(data.classes))
        counts = ", ".join(f"{len(samples)} {name}" for name, samples in splits.items())
        self.progress.say(f"{data.name}: {len(data.classes)} classes, {counts} images")
        where = f"{self.device}" if not distributed.is_running() else f"{distributed.world_size()} × {self.device.type}"
        self.progress.say(f"{self.model_name} by {self.config.method}, {self.epochs} epochs, on {where}")

    def _model(self, classes: int) -> nn.Module:
        model = build_model(self.model_name, classes, self.preprocessing.crop, bool(self.config.pretrained))
        if self.config.weights is not None:
            self.progress.say(f"{self.config.weights}: {load_weights(model, self.config.weights)}")
        try:
            model = as_composite(self.method.composite, model, classes).to(self.device)
        except ValueError as error:  # no stages to make a P2P-Net of
            raise SemaugError(str(error)) from error
        return model.to(memory_format=torch.channels_last) if self.device.type == "cuda" else model

    def _decode(self, samples: Samples, split: str) -> Tensor | Samples:
        """All pixels of a split, or the split itself where they are decoded when they are needed."""
        if self.streams:
            return samples
        cache = self.config.cache.expanduser() if self.config.cache is not None else None
        with self.progress.task(f"decoding {split}", len(samples)) as advance:
            pixels = decoded(samples, self.preprocessing, cache, self.config.workers, advance)
        if self.device.type != "cuda" or self.config.images_on == "ram":
            return pixels
        if self.config.images_on is None and pixels.nbytes > torch.cuda.mem_get_info(self.device)[0] / 2:
            return pixels
        return pixels.to(self.device)

    def _resume(self) -> dict[str, Any]:
        content = self._last_checkpoint()
        if content is None:
            return {"epoch": 0, "within": None, "metrics": [], "best": -1.0, "best_epoch": 0, "warned": False}
        try:
            state = self._take_up(content)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            told = f"the checkpoint in {self.folder} does not fit this run ({reason})"
            raise SemaugError(told, on_all_ranks=True) from error
        had = (state["within"] or {}).get("images", self.batches.images)
        if had != self.batches.images:
            raise SemaugError(
                f"{self.folder} was left within an epoch of {had} training images, and now there are "
                f"{self.batches.images}; give it the images that it had, or choose another --output",
                on_all_ranks=True,
            )
        within = f", step {state['within']['step']} of epoch {state['epoch'] + 1}" if state["within"] else ""
        self.progress.say(f"going on after epoch {state['epoch']} of {self.epochs}{within}")
        return state

    def _last_checkpoint(self) -> dict[str, Any] | None:
        """What the first rank finds in the run directory, which the others need not see."""
        content = distributed.raise_on_all_ranks(lambda: checkpoint.load(self._checkpoint) if self.writes else None)
        return distributed.broadcast_object(content)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last"

    def _take_up(self, content: dict[str, Any]) -> dict[str, Any]:
        """Put network, optimisers and random numbers in the state that :meth:`_content` gave; returns the rest."""
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.learner.load_state_dict(take_rank_state(content["learner"], self.config.micro_batch))
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        if self.average is not None:
            self.average.load_state_dict(content["average"])
        self._take_up_random(content)
        return {key: content[key] for key in ("epoch", "within", "metrics", "best", "best_epoch", "warned")}

    def _take_up_random(self, content: dict[str, Any]) -> None:
        """The random numbers that this rank would have drawn next, or others where there was no such rank."""
        of_ranks = content.get("random_of_ranks") or [(content["random"], content["cuda_random"])]
        if len(of_ranks) != distributed.world_size() and distributed.rank() > 0:
            self._draw_apart()
            return
        own, on_gpu = of_ranks[distributed.rank()]
        torch.set_rng_state(own)
        if self.device.type == "cuda" and on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, self.device)

    # -- one epoch ----------------------------------------------------------------------------------------------------

    def _epoch(self, state: dict[str, Any], held_out: tuple[Tensor | Samples, Tensor]) -> None:
        """Train and validate for what is left of an epoch, and save; `state` becomes that after it."""
        self.pixels.waited = 0.0
        self._train_epoch(state)
        self._average_buffers()
        started, within, epoch = time.perf_counter(), state["within"], state["epoch"] + 1
        row = {"epoch": epoch, "lr": within["lr"], "strength": self.learner.strength, **_means(within)}
        row |= self._validate(state, *held_out)
        row["seconds"] = round(within["seconds"] + time.perf_counter() - started, 3)
        row["images_per_second"] = round(self.batches.images / max(row["seconds"], 1e-3), 1)
        state["metrics"].append(row)
        state["epoch"], state["within"] = epoch, None
        if row["val_top1"] > state["best"]:
            state["best"], state["best_epoch"] = row["val_top1"], epoch
            kept = {"model": self._evaluated().state_dict(), "source": self.learner.source.state_dict()}
            if self.writes:
                checkpoint.save(self.folder / "checkpoints" / "best", {**kept, "epoch": epoch})
        odd = None if state["warned"] else _odd_covnet(self.learner.source, state["metrics"])
        state["warned"] = state["warned"] or odd is not None
        self.tracker.epoch(row)  # before the epoch is saved: one that is made again is tracked again
        self._save(state)
        self.progress.epoch(row, self.epochs)
        if odd is not None:
            self.progress.say(f"warning: after epoch {epoch} {odd}")
        if self.pixels.waited > MUCH_WAITING * row["seconds"] and epoch == 1:
            self.progress.say(
                f"{self.pixels.waited / row['seconds']:.0%} of epoch 1 was spent waiting for images; try more --workers"
            )

    def _train_epoch(self, state: dict[str, Any]) -> None:
        """The steps that are left of an epoch, with a look at their numbers every `LOOK_EVERY`: the device waits then.

        Where a number is not finite, the steps since the last checkpoint are made again up to the one that went wrong,
        and what was before it is saved.
        """
        total = self.batches.steps
        within = state["within"] = state["within"] or _beginning(self.batches.images)
        what = f"epoch {state['epoch'] + 1}/{self.epochs}"
        with self.progress.task(what, total) as advance, self.batches.left(state["epoch"], state["within"]) as inputs:
            while within["step"] < total:
                numbers = self._steps(state, inputs, min(total, within["step"] + LOOK_EVERY))
                bad = self._first_bad(numbers, total)
                if bad is not None:
                    self._broke_down(within["step"] - len(numbers) + bad, numbers[bad], total)
                _add_up(within, numbers)
                advance(within["step"], total)
                self._stop_if_asked(state, total)

    def _steps(self, state: dict[str, Any], inputs: Iterator[Inputs], end: int) -> list[dict[str, float]]:
        """The steps of an epoch from where `state` is to `end`, or until asked to stop; returns their numbers."""
        epoch, within, started = state["epoch"], state["within"], time.perf_counter()
        total = self.batches.steps
        self.learner.set_progress(epoch / self.epochs)
        self.model.train()
        found = []
        for i in range(within["step"], end):
            within["lr"] = self._set_learning_rates(epoch + i / total)
            batch, within["generator"] = next(inputs)
            found.append(self._step(*batch))
            if self._asked_to_stop() is not None:
                break
        numbers = _fetched(found)
        within["step"] += len(found)
        within["seconds"] += time.perf_counter() - started
        return numbers

    def _step(self, *inputs: Tensor) -> dict[str, Tensor]:
        try:
            found = self.learner.step(*inputs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise SemaugError(
                "BatchNorm has nothing to average over when one image at a time goes through the network, and at this "
                "size leaves one pixel of it; give a larger --batch-size, --micro-batch or --crop"
            ) from error
        if self.average is not None:
            self.average.update_parameters(self.model)
        if self.scaler is None:
            found[GRADIENT] = global_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return found

    def _first_bad(self, numbers: list[dict[str, float]], total: int) -> int | None:
        """The first step that broke down. In fp16 the scaler leaves steps out; only many in a row mean that."""
        allowed = 0 if self.scaler is None else min(OVERFLOWS_ALLOWED, total - 1)
        for i, row in enumerate(numbers):
            finite = all(map(math.isfinite, row.values() if self.scaler is None else [row["train_loss"]]))
            self.overflows = 0 if finite else self.overflows + 1
            if self.overflows > allowed:
                return i
        return None

    def _broke_down(self, step: int, numbers: dict[str, float], total: int) -> None:
        content = self._last_checkpoint() if self.start is None else distributed.broadcast_object(self.start)
        assert content is not None
        state = self._take_up(content)
        state["within"] = state["within"] or _beginning(self.batches.images)
        with self.batches.left(state["epoch"], state["within"]) as inputs:
            _add_up(state["within"], self._steps(state, inputs, step))
        self._save(state)
        name = next(name for name, value in numbers.items() if not math.isfinite(value))
        raise SemaugError(
            f"training broke down in epoch {state['epoch'] + 1}, step {step + 1} of {total} "
            f"({name.replace('_', ' ')} {numbers[name]}); the state before that step is saved in {self.folder}; "
            "with another --output, try a smaller --lr, --clip-norm 5 or a smaller --strength",
            on_all_ranks=True,
        )

    def _asked_to_stop(self) -> int | None:
        """The signal that this process, or another one of the run, has been sent."""
        return max(asked for (asked,) in distributed.gather_numbers([self.stop.asked or 0])) or None

    def _stop_if_asked(self, state: dict[str, Any], total: int) -> None:
        asked = self._asked_to_stop()
        if asked is None:
            return
        self._save(state)
        name, where = signal.Signals(asked).name, f"step {state['within']['step']} of {total}"
        message = f"stopped by {name} in epoch {state['epoch'] + 1} after {where}, which is saved"
        raise Interrupted(asked, message)

    def _set_learning_rates(self, epoch: float) -> float:
        """Cosine decay after a linear warm-up, the same shape for f and CovNet."""
        warmup = min(self.config.warmup_epochs, self.epochs / 10)
        if epoch < warmup:
            factor = (epoch + 1e-3) / warmup
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (self.epochs - warmup)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for group in self.learner.meta_optimizer.param_groups if self.learner.meta_optimizer is not None else ():
            group["lr"] = self.config.augmentation.meta_lr * factor
        return self.lr * factor

    def _evaluated(self) -> nn.Module:
        """The network that is evaluated and kept: the running average of the weights where there is one."""
        return self.average.module if self.average is not None else self.model

    @torch.inference_mode()
    def _validate(self, state: dict[str, Any], images: Tensor | Samples, labels: Tensor) -> dict[str, float]:
        """Accuracy and loss on the validation split, of which each rank looks at its share."""
        model = self._evaluated().eval()
        own = distributed.rank_slice(len(labels))
        right = loss = torch.zeros((), dtype=torch.float64)
        self._stop_if_asked(state, state["within"]["step"])
        parts = torch.arange(own.start, own.stop).split(2 * self.batch_size) if own.stop > own.start else ()
        with closing(self.pixels.of(images, parts)) as pixels:
            for part in parts:
                if not distributed.is_running():  # several would have to agree, and not all have as many chunks
                    self._stop_if_asked(state, state["within"]["step"])
                inputs, truth = self.preprocessing.evaluation_input(next(pixels)), labels[part]
                with self.learner.executor.mixed.cast():
                    logits = model(inputs).float().cpu()
                right = right + (logits.argmax(1) == truth).double().sum()
                loss = loss + nn.functional.cross_entropy(logits, truth, reduction="none").double().sum()
        right, loss = distributed.sum_over_ranks([right, loss])
        return {
            "val_top1": round(float(right) / len(labels), 6),
            "val_loss": round(float(loss) / len(labels), 6),
        }

    # -- files --------------------------------------------------------------------------------------------------------

    def _content(self, state: dict[str, Any]) -> dict[str, Any]:
        """All that is needed to go on exactly; complete on the first rank alone, and made by all."""
        random = (
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        )
        return {
            **state,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learner": gather_learner_state(self.learner.state_dict()),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "random": random[0],
            "cuda_random": random[1],
            "random_of_ranks": distributed.gather_objects(random),
        }

    def _average_buffers(self) -> None:
        """Make running statistics the mean of all ranks'; at any time, as they change linearly with what is seen."""
        for network in dict.fromkeys((self.model, self._evaluated())):
            distributed.average_buffers_(network)

    def _save(self, state: dict[str, Any]) -> None:
        self._average_buffers()
        content = self._content(state)
        if self.writes:
            checkpoint.save(self._checkpoint, content)
            _write_metrics(self.folder, state["metrics"])
        self.start = None

    def _finish(self, data: DataSet, splits: dict[str, Samples], state: dict[str, Any]) -> None:
        best = distributed.raise_on_all_ranks(
            lambda: checkpoint.load(self.folder / "checkpoints" / "best") if self.writes else None
        )
        best = distributed.broadcast_object(best)
        assert best is not None
        epoch = best.get("epoch", state["best_epoch"])  # another one where the best was damaged
        model = self._evaluated()
        model.load_state_dict(best["model"])
        if self.writes:
            if self.method.augments:
                _write_tensors(self.folder / "source.safetensors", best["source"])  # Σ, as it was for this model
            _write_tensors(self.folder / "model.safetensors", model.state_dict())
        split = "test" if "test" in splits else "val"
        config = read_json(self.folder / "config.json") if self.writes else {}
        classifier = Classifier(model.eval(), data.classes, self.preprocessing, self.model_name, config)
        with self.progress.task(f"evaluating on {split}", len(splits[split])) as advance:
            result = evaluate(classifier, splits[split], progress=advance)
        if not self.writes:
            return
        write_json(self.folder / "samples.json", sample_pictures(classifier, splits[split], self.config.seed))
        header = {"split": split, "best_epoch": epoch}
        self.tracker.evaluation(split, epoch, result.scores.numbers())
        write_json(self.folder / "evaluation.json", {**header, **result.to_json()})
        self.progress.say(f"{split}: top-1 {100 * result.scores.top1:.2f} % (epoch {epoch} by validation)")


def _beginning(images: int) -> dict[str, Any]:
    """Where an epoch of so many images is before its first step."""
    return {"step": 0, "seconds": 0.0, "lr": 0.0, "sums": {}, "counts": {}, "images": images}


def _fetched(found: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The numbers of several steps, brought from the device at once."""
    if not found:
        return []
    values = iter(torch.stack([value.double() for row in found for value in row.values()]).tolist())
    return [{name: next(values) for name in row} for row in found]


def _add_up(within: dict[str, Any], numbers: list[dict[str, float]]) -> None:
    """Take the numbers of further steps into an epoch's sums; those of steps left out in fp16 are not finite."""
    sums, counts = within["sums"], within["counts"]
    for row in numbers:
        for name, value in row.items():
            if name != GRADIENT and math.isfinite(value):
                sums[name] = sums.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + 1


def _means(within: dict[str, Any]) -> dict[str, float]:
    """An epoch's means, to six digits."""
    means = {name: total / within["counts"][name] for name, total in within["sums"].items()}
    means["train_accuracy"] = means.pop("accuracy")
    return {name: float(f"{value:.6g}") for name, value in means.items()}


def _copied(value: Any) -> Any:
    """A copy of nested values with its tensors in main memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    return value


def _odd_covnet(source: nn.Module, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with a CovNet, if anything, by the epochs so far."""
    last = metrics[-1]
    if not isinstance(source, CovNet):
        return None
    mean, highest = last["variance_mean"], 1.0
    if source.fixed_trace is None:
        what = f"its mean variance is {mean:.3g} of at most {highest:g}"
        if mean < 0.01 * highest:
            return f"CovNet has collapsed: {what}, so that hardly anything is augmented; try --fixed-trace 0.5"
        if mean > 0.99 * highest:
            return f"CovNet is saturated: {what}, alike in all dimensions; try --fixed-trace 0.5"
    if sum(row["strength"] > 0 for row in metrics) < LEARNING_BY:
        return None
    if last["drift"] < LITTLE_DRIFT:
        return (
            f"CovNet does not learn: it has moved by {last['drift']:.1g} of its size, so that Σ is what it was in the "
            "beginning; --method isda costs less, and --meta-optimizer adam makes CovNet move"
        )
    if last["variance_std_samples"] < LITTLE_SPREAD * mean:
        return (
            f"CovNet gives the same Σ to all images: their standard deviation is {last['variance_std_samples']:.1g} "
            f"around {mean:.2g}; --method isda costs less"
        )
    return None


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    content = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(file, safetensors_bytes(content))


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The configuration as JSON would give it back."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return settings


def _optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    groups = methods.parameter_groups(model, given(config.lr))
    groups = [{**group, "initial_lr": group["lr"]} for group in groups]
    decay = given(config.weight_decay)
    if config.optimizer == "adamw":
        return AdamW(groups, weight_decay=decay)
    return SGD(groups, momentum=config.momentum, weight_decay=decay)


def _average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def _write_metrics(folder: Path, metrics: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in metrics)
    write_atomically(folder / "metrics.jsonl", lines.encode())
    names = list(dict.fromkeys(name for row in metrics for name in row))
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, names)
    writer.writeheader()
    writer.writerows(metrics)
    write_atomically(folder / "metrics.csv", table.getvalue().encode())
