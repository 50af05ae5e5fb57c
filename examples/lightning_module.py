"""Learnable semantic augmentation as a Lightning module, with Lightning's own checkpoints.

    python examples/lightning_module.py
    python examples/lightning_module.py --accelerator gpu --precision bf16-mixed

Optimisation is manual, because a step consists of two half steps with three updates each. The state of the meta loop
is saved in Lightning's checkpoint, so that an interrupted run resumes exactly: here six epochs give the same weights as
three and three. ``Trainer(precision="bf16-mixed")`` works; ``16-mixed`` does not, because Lightning owns its scaler.
The data are the embedded birds.
"""

import argparse
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import semaug
from semaug.data.birds import Birds
from semaug.network.models import build_model

SPECIES, PER_SPECIES, EPOCHS = 10, 100, 6


class Learnable(L.LightningModule):
    """A classifier trained with the meta loop; `options` are those of :class:`semaug.LearnableAugmentation`."""

    def __init__(self, model: nn.Module, epochs: int, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.epochs, self.options = model, epochs, options
        self.state: dict[str, Any] | None = None  # of the meta loop and the random generators, from a checkpoint

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.005)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]

    def on_train_start(self) -> None:
        self.learner = semaug.LearnableAugmentation(self.model, self.optimizers(), **self.options)
        if self.state is not None:
            self.learner.load_state_dict(self.state["learner"])
            torch.set_rng_state(self.state["random"][0])
            torch.cuda.set_rng_state_all(self.state["random"][1:])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.learner.set_progress((self.current_epoch + index / self.trainer.num_training_batches) / self.epochs)
        metrics = self.learner.step(*batch)
        self.log("train_loss", metrics["train_loss"], on_step=False, on_epoch=True)
        if self.trainer.is_last_batch:  # at the end of the epoch the checkpoint would be written already
            self.lr_schedulers().step()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        random = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        checkpoint["semaug"] = {"learner": self.learner.state_dict(), "random": random}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.state = checkpoint["semaug"]


@cache
def birds(split: str, per_species: int) -> TensorDataset:
    """The embedded birds, drawn once for all epochs and runs."""
    data = Birds(SPECIES, per_species, split, size=64, transform=lambda image: image / 127.5 - 1)
    images, labels = zip(*(data[i] for i in range(len(data))), strict=True)
    return TensorDataset(torch.stack(images), torch.tensor(labels))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return exact_loader(birds("train", PER_SPECIES), 40), DataLoader(birds("test", 10), batch_size=50)


def exact_loader(data: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """A loader that shuffles by seed and epoch, so that a resumed run sees the same batches."""
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=True, generator=torch.Generator())


def fit(folder: Path, epochs: int, checkpoint: Path | None = None, **options: Any) -> tuple[Learnable, Path]:
    """Train for some epochs; returns the module and its last checkpoint."""
    torch.manual_seed(0)
    module = Learnable(build_model("small", SPECIES, 64), EPOCHS, order="pipelined")
    saving = ModelCheckpoint(folder, save_last=True)
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "devices": 1}
    trainer = L.Trainer(max_epochs=epochs, callbacks=[saving], num_sanity_val_steps=0, **settings, **options)
    trainer.fit(module, *loaders(), ckpt_path=checkpoint, weights_only=True)
    metrics = {name: f"{float(value):.3f}" for name, value in trainer.callback_metrics.items()}
    print(f"epoch {trainer.current_epoch}, optimiser step {trainer.global_step}: {metrics}")
    return module, Path(saving.last_model_path)


def main(accelerator: str = "cpu", precision: str = "32-true") -> None:
    options: dict[str, Any] = {"accelerator": accelerator, "precision": precision, "deterministic": "warn"}
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = fit(Path(folder) / "whole", EPOCHS, **options)
        _, checkpoint = fit(Path(folder) / "first", EPOCHS // 2, **options)
        resumed, _ = fit(Path(folder) / "second", EPOCHS, checkpoint, **options)
    pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    print(f"chance: {1 / SPECIES:.3f}")
    print("the same weights:", all(torch.equal(one, other) for one, other in pairs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learnable semantic augmentation as a Lightning module")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    main(**vars(parser.parse_args()))
