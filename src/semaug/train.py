"""The training loop: one for all methods."""

import csv
import io
import json
import math
import time
from collections.abc import Iterator, Mapping
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
from semaug import checkpoint, methods
from semaug.config import TrainConfig, given
from semaug.data.images import Preprocessing, decoded
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import DataSet, Samples
from semaug.errors import UserError
from semaug.evaluate import evaluate
from semaug.models import build_model, load_weights
from semaug.progress import Progress
from semaug.report.pictures import sample_pictures
from semaug.runs import FORMAT, Classifier, read_json, write_atomically, write_json


def train(config: TrainConfig) -> Path:
    """Train as configured, from the start or from where the run in the output directory stopped; returns the latter."""
    return _Run(config.filled()).train()


class _Run:
    """One training run: its data, network, learner and files."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.folder, self.epochs, self.model_name = given(config.output), given(config.epochs), given(config.model)
        self.lr, self.batch_size = given(config.lr), given(config.batch_size)
        self.device = torch.device(given(config.device))
        self.preprocessing = Preprocessing(given(config.resize), given(config.crop), config.shape)
        self.progress = Progress()

    def train(self) -> Path:
        config, folder = self.config, self.folder
        self._claim()
        if (folder / "model.safetensors").is_file() and (folder / "evaluation.json").is_file():
            self.progress.say(f"{folder} is complete; give another --output to train again")
            return folder
        with self.progress.task(f"fetching {config.data}", 0) as advance:
            data = read_data(config.data, config.data_root, download=config.download, progress=advance)
        splits = training_splits(data, config.select, config.val_per_class, config.val_fraction, config.seed)
        self._describe(data, splits)
        torch.manual_seed(config.seed)
        self.model = self._model(len(data.classes))
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
                autocast=autocast,
                scaler=self.scaler,
            )
        except ValueError as error:  # a network that cannot be split, or settings out of range
            raise UserError(str(error)) from error
        self.average = _average(self.model, config.ema)
        self.transforms = methods.image_transforms(config.method, len(data.classes))
        pixels = self._decode(splits["train"], "train")
        labels = torch.tensor(splits["train"].labels, device=self.device)
        held_out = self._decode(splits["val"], "val"), torch.tensor(splits["val"].labels)

        state = self._resume()
        for epoch in range(state["epoch"], self.epochs):
            started = time.perf_counter()
            row = {"epoch": epoch + 1, **self._train_epoch(epoch, pixels, labels)}
            row |= self._validate(*held_out)
            row["seconds"] = round(time.perf_counter() - started, 3)
            row["images_per_second"] = round(len(labels) / row["seconds"], 1)
            state["metrics"].append(row)
            state["epoch"] = epoch + 1
            if row["val_top1"] > state["best"]:
                state["best"], state["best_epoch"] = row["val_top1"], epoch + 1
                kept = {"model": self._evaluated().state_dict(), "source": self.learner.source.state_dict()}
                checkpoint.save(folder / "checkpoints" / "best", kept)
            self._save(state)
            self.progress.epoch(row, self.epochs)
            if config.patience is not None and epoch + 1 - state["best_epoch"] >= config.patience:
                self.progress.say(f"no better validation accuracy for {config.patience} epochs: stopping")
                break
        self._finish(data, splits, state)
        return folder

    # -- setting up ---------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Make the run directory ours, or find that it already is; a run with other settings is left alone."""
        settings = _settings(self.config)
        file = self.folder / "config.json"
        if not file.exists() and self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} is not empty and holds no run; choose another --output")
        if not (self.folder / "checkpoints").exists():  # new, or ended by a mistake before its first epoch did
            started = datetime.now(UTC).isoformat(timespec="seconds")
            header = {"format": FORMAT, "version": semaug.__version__, "started": started}
            write_json(file, {**header, "preprocessing": asdict(self.preprocessing), **settings})
            return
        before = read_json(file)
        if before.get("format") != FORMAT:
            raise UserError(f"{self.folder} has format {before.get('format')}, and this version reads {FORMAT}")
        changed = [k for k, v in settings.items() if k not in _MAY_CHANGE and before.get(k) != v]
        if changed:
            was = ", ".join(f"{k} {before.get(k)} → {settings[k]}" for k in changed)
            raise UserError(f"{self.folder} holds a run with other settings ({was}); choose another --output")
        if not self.config.resume:
            raise UserError(f"{self.folder} holds a run already; choose another --output, or leave out --no-resume")

    def _describe(self, data: DataSet, splits: dict[str, Samples]) -> None:
        write_json(self.folder / "classes.json", list(data.classes))
        counts = ", ".join(f"{len(samples)} {name}" for name, samples in splits.items())
        self.progress.say(f"{data.name}: {len(data.classes)} classes, {counts} images")
        self.progress.say(f"{self.model_name} by {self.config.method}, {self.epochs} epochs, on {self.device}")

    def _model(self, classes: int) -> nn.Module:
        model = build_model(self.model_name, classes, self.preprocessing.crop, bool(self.config.pretrained))
        if self.config.weights is not None:
            self.progress.say(f"{self.config.weights}: {load_weights(model, self.config.weights)}")
        try:
            model = methods.dressed(self.config.method, model, classes).to(self.device)
        except ValueError as error:  # no stages to make a P2P-Net of
            raise UserError(str(error)) from error
        return model.to(memory_format=torch.channels_last) if self.device.type == "cuda" else model

    def _decode(self, samples: Samples, split: str) -> Tensor:
        cache = self.config.cache.expanduser() if self.config.cache is not None else None
        with self.progress.task(f"decoding {split}", len(samples)) as advance:
            pixels = decoded(samples, self.preprocessing, cache, self.config.workers, advance)
        if self.device.type != "cuda" or self.config.images_on == "ram":
            return pixels
        if self.config.images_on is None and pixels.nbytes > torch.cuda.mem_get_info(self.device)[0] / 2:
            return pixels
        return pixels.to(self.device)

    def _resume(self) -> dict[str, Any]:
        state = checkpoint.load(self.folder / "checkpoints" / "last")
        if state is None:
            return {"epoch": 0, "metrics": [], "best": -1.0, "best_epoch": 0}
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.load_state_dict(state["learner"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self.device)
        self.progress.say(f"going on after epoch {state['epoch']} of {self.epochs}")
        return {key: state[key] for key in ("epoch", "metrics", "best", "best_epoch")}

    # -- one epoch ----------------------------------------------------------------------------------------------------

    def _train_epoch(self, epoch: int, pixels: Tensor, labels: Tensor) -> dict[str, float]:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        batches = list(_batches(len(labels), 2 * self.batch_size, generator))
        self.learner.set_progress(epoch / self.epochs)
        self.model.train()
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        with self.progress.task(f"epoch {epoch + 1}/{self.epochs}", len(labels)) as advance:
            seen = 0
            for i, indices in enumerate(batches):
                lr = self._set_learning_rates(epoch + i / len(batches))
                images, targets = self._inputs(pixels, labels, indices, generator)
                try:
                    metrics = self.learner.step(images, targets)
                except ValueError as error:  # NaN or infinite features
                    raise UserError(
                        f"training broke down in epoch {epoch + 1}, step {i + 1} of {len(batches)} ({error}); what was "
                        "saved after the last epoch is kept; try a smaller --lr, --clip-norm 5 or a smaller --strength"
                    ) from error
                if self.average is not None:
                    self.average.update_parameters(self.model)
                for name, value in metrics.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value
                    counts[name] = counts.get(name, 0) + 1
                seen += len(indices)
                advance(seen, len(labels))
        means = {name: float(total) / counts[name] for name, total in sums.items()}
        means["train_accuracy"] = means.pop("accuracy")
        return {
            "lr": lr,
            "strength": self.learner.strength,
            **{name: float(f"{value:.6g}") for name, value in means.items()},
        }

    def _inputs(
        self, pixels: Tensor, labels: Tensor, indices: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        on_crops, on_images, on_batch = self.transforms
        crops = self.preprocessing.training_crops(pixels[indices.to(pixels.device)].to(self.device), generator)
        images = self.preprocessing.normalised(crops if on_crops is None else on_crops(crops))
        targets = labels[indices.to(labels.device)]
        if on_images is not None:
            images = on_images(images)
        return (images, targets) if on_batch is None else on_batch(images, targets)

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
    def _validate(self, pixels: Tensor, labels: Tensor) -> dict[str, float]:
        model = self._evaluated().eval()
        parts = []
        for chunk in pixels.split(2 * self.batch_size):
            inputs = self.preprocessing.evaluation_input(chunk.to(self.device))
            with self.learner._autocast():
                parts.append(model(inputs).float().cpu())
        logits = torch.cat(parts)
        loss = nn.functional.cross_entropy(logits, labels)
        top1 = (logits.argmax(1) == labels).double().mean()
        return {"val_top1": round(float(top1), 6), "val_loss": round(float(loss), 6)}

    # -- files --------------------------------------------------------------------------------------------------------

    def _save(self, state: dict[str, Any]) -> None:
        content = {
            **state,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learner": self.learner.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        checkpoint.save(self.folder / "checkpoints" / "last", content)
        _write_metrics(self.folder, state["metrics"])

    def _finish(self, data: DataSet, splits: dict[str, Samples], state: dict[str, Any]) -> None:
        best = checkpoint.load(self.folder / "checkpoints" / "best")
        assert best is not None
        model = self._evaluated()
        model.load_state_dict(best["model"])
        if self.config.method.removeprefix("p2p+") in methods.AUGMENTING:
            _write_tensors(self.folder / "source.safetensors", best["source"])  # Σ, as it was for this model
        _write_tensors(self.folder / "model.safetensors", model.state_dict())
        split = "test" if "test" in splits else "val"
        config = read_json(self.folder / "config.json")
        classifier = Classifier(model.eval(), data.classes, self.preprocessing, self.model_name, config)
        with self.progress.task(f"evaluating on {split}", len(splits[split])) as advance:
            result = evaluate(classifier, splits[split], progress=advance)
        write_json(self.folder / "samples.json", sample_pictures(classifier, splits[split], self.config.seed))
        header = {"split": split, "best_epoch": state["best_epoch"]}
        write_json(self.folder / "evaluation.json", {**header, **result.to_json()})
        self.progress.say(
            f"{split}: top-1 {100 * result.scores.top1:.2f} % (epoch {state['best_epoch']} by validation)"
        )


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    content = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(file, safetensors_bytes(content))


_MAY_CHANGE = {"workers", "cache", "device", "images_on", "compile", "resume", "output", "data_root", "download"}


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


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Every index once, in random order, in batches of about `size` that differ by at most one image."""
    yield from torch.randperm(count, generator=generator).tensor_split(math.ceil(count / size))


def _write_metrics(folder: Path, metrics: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in metrics)
    write_atomically(folder / "metrics.jsonl", lines.encode())
    names = list(dict.fromkeys(name for row in metrics for name in row))
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, names)
    writer.writeheader()
    writer.writerows(metrics)
    write_atomically(folder / "metrics.csv", table.getvalue().encode())
