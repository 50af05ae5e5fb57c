"""A timm network with timm's optimiser, layer-wise learning rates and schedule, trained with learnable augmentation.

    python examples/timm_parts.py

The pseudo update follows AdamW's own rule with the learning rate of each layer. For an optimiser without a rule in
semaug, such as LAMB, it is a plain gradient step, and a warning says so. The network is one of timm's test models. The
data are scikit-learn's digits, which it learns in a minute; on 1000 embedded birds it stayed at chance for six epochs.
"""

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import semaug

DIGITS, TRAIN, EPOCHS, OPTIMIZER = 10, 1500, 3, "adamw"


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Digits enlarged from 8 to 32 pixels; the first TRAIN images are for training, the others for the test."""
    data = load_digits()
    grey = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
    images, labels = grey.expand(-1, 3, -1, -1), torch.tensor(data.target)
    return TensorDataset(images[:TRAIN], labels[:TRAIN]), TensorDataset(images[TRAIN:], labels[TRAIN:])


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=DIGITS)
    optimizer = create_optimizer_v2(model, opt=OPTIMIZER, lr=0.002, weight_decay=0.05, layer_decay=0.9)
    train, unseen = digits()
    loader = DataLoader(train, batch_size=50, shuffle=True, drop_last=True)
    test = DataLoader(unseen, batch_size=100)
    steps = {"step_on_epochs": False, "updates_per_epoch": len(loader)}
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=1, **steps)
    learner = semaug.LearnableAugmentation(model, optimizer, frozen_blocks=1, order="pipelined")
    updates = 0
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            learner.set_progress(updates / (EPOCHS * len(loader)))
            metrics = learner.step(images, labels)
            updates += 1
            scheduler.step_update(updates)
        model.eval()
        with torch.no_grad():
            right = [model(images).argmax(1) == labels for images, labels in test]
        rates = sorted({group["lr"] for group in optimizer.param_groups})
        print(
            f"epoch {epoch + 1}: loss {metrics['train_loss']:.2f}, learning rates {rates[0]:.1e} to {rates[-1]:.1e}, "
            f"test accuracy {100 * torch.cat(right).float().mean():.1f} % (chance: {100 / DIGITS:.0f} %)"
        )


if __name__ == "__main__":
    main()
