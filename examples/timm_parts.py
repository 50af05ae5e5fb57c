"""A timm network with timm's optimiser, layer-wise learning rates and schedule, trained with learnable augmentation.

    python examples/timm_parts.py

The pseudo update follows AdamW's own rule, layer by layer; under an optimiser that semaug has no rule for (LAMB, say)
it is a plain gradient step, and a warning says so. The data are the embedded birds. Takes a few
minutes on two CPU cores.
"""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.utils.data import DataLoader, TensorDataset

import semaug
from semaug.data.birds import Birds

SPECIES, PER_SPECIES, EPOCHS, OPTIMIZER = 10, 40, 4, "adamw"


def birds(split: str, per_species: int) -> TensorDataset:
    """Drawn once, for all epochs."""
    data = Birds(SPECIES, per_species, split, size=64, transform=lambda image: image / 127.5 - 1)
    images, labels = zip(*(data[i] for i in range(len(data))), strict=True)
    return TensorDataset(torch.stack(images), torch.tensor(labels))


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", num_classes=SPECIES, drop_path_rate=0.1)
    optimizer = create_optimizer_v2(model, opt=OPTIMIZER, lr=0.002, weight_decay=0.05, layer_decay=0.9)
    loader = DataLoader(birds("train", PER_SPECIES), batch_size=40, shuffle=True, drop_last=True)
    test = DataLoader(birds("test", PER_SPECIES // 4), batch_size=50)
    steps = {"step_on_epochs": False, "updates_per_epoch": len(loader)}
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=1, **steps)
    learner = semaug.LearnableAugmentation(model, optimizer, strength=2.0, frozen_blocks=6, order="pipelined")
    updates = 0
    for epoch in range(EPOCHS):
        model.train()
        learner.set_progress(epoch / EPOCHS)
        for images, labels in loader:
            metrics = learner.step(images, labels)
            updates += 1
            scheduler.step_update(updates)
        model.eval()
        with torch.no_grad():
            right = [model(images).argmax(1) == labels for images, labels in test]
        rates = sorted({group["lr"] for group in optimizer.param_groups})
        print(
            f"epoch {epoch + 1}: loss {metrics['train_loss']:.2f}, learning rates {rates[0]:.1e} to {rates[-1]:.1e}, "
            f"test accuracy {100 * torch.cat(right).float().mean():.1f} %"
        )


if __name__ == "__main__":
    main()
