"""Learnable semantic augmentation in a plain PyTorch loop, with torchmetrics.

    python examples/plain_pytorch.py

In your own loop, :class:`semaug.LearnableAugmentation` replaces the forward pass, the backward pass and the optimiser
step. The data are the embedded birds.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

import semaug
from semaug.data.birds import Birds
from semaug.network.models import build_model

SPECIES, PER_SPECIES, EPOCHS = 10, 60, 5


def birds(split: str, per_species: int) -> TensorDataset:
    """The embedded birds, drawn once for all epochs."""
    data = Birds(SPECIES, per_species, split, size=64, transform=lambda image: image / 127.5 - 1)
    images, labels = zip(*(data[i] for i in range(len(data))), strict=True)
    return TensorDataset(torch.stack(images), torch.tensor(labels))


def main() -> None:
    torch.manual_seed(0)
    model = build_model("small", SPECIES, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    learner = semaug.LearnableAugmentation(model, optimizer)  # with the automatic strength λ
    loader = DataLoader(birds("train", PER_SPECIES), batch_size=50, shuffle=True, drop_last=True)
    test = DataLoader(birds("test", PER_SPECIES // 4), batch_size=50)
    scores = MetricCollection([MulticlassAccuracy(SPECIES, average="micro"), MulticlassCalibrationError(SPECIES)])
    loss = MeanMetric()
    for epoch in range(EPOCHS):
        model.train()
        for step, (images, labels) in enumerate(loader):
            learner.set_progress((epoch + step / len(loader)) / EPOCHS)
            loss.update(learner.step(images, labels)["train_loss"])
        scheduler.step()
        model.eval()
        with torch.no_grad():
            for images, labels in test:
                scores.update(model(images).softmax(1), labels)
        results = {name.removeprefix("Multiclass"): f"{float(value):.3f}" for name, value in scores.compute().items()}
        print(f"epoch {epoch + 1}: loss {float(loss.compute()):.2f}, test {results} (chance: {1 / SPECIES:.3f})")
        scores.reset()
        loss.reset()


if __name__ == "__main__":
    main()
