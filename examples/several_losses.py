"""A custom model with several losses, trained with learnable semantic augmentation on one of its heads.

    python examples/several_losses.py

The network has three outputs: the species, the family to which the species belongs, and a second prediction of the
species from a middle stage (deep supervision). The head that predicts the species is augmented:
:class:`semaug.Composite` names it and the rest of the loss. The network is updated with the whole loss; the meta loss
is the cross-entropy of that head. The data are the embedded birds, with pairs of species as families. Takes about a
minute on two CPU cores.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import semaug
from semaug.data.birds import Birds

SPECIES, FAMILIES, EPOCHS = 10, 5, 8


class Predictions(NamedTuple):
    """Logits (N, classes) of the three heads."""

    species: Tensor
    family: Tensor
    early_species: Tensor


def stage(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(stage(3, 16), stage(16, 32))
        self.late = nn.Sequential(stage(32, 64), stage(64, 64))
        self.species = nn.Linear(64, SPECIES)
        self.family = nn.Linear(64, FAMILIES)
        self.early_species = nn.Linear(32, SPECIES)

    def forward(self, images: Tensor) -> Predictions:
        middle = self.middle(images)
        feature = self.late(middle).amax((2, 3))
        return Predictions(self.species(feature), self.family(feature), self.early_species(middle.amax((2, 3))))


def rest(model: nn.Module, outputs: Predictions, labels: Tensor) -> Tensor:
    """The loss without the cross-entropy of the species."""
    families = labels // (SPECIES // FAMILIES)
    return 0.5 * F.cross_entropy(outputs.family, families) + 0.3 * F.cross_entropy(outputs.early_species, labels)


def photos(split: str, per_class: int) -> tuple[Tensor, Tensor]:
    birds = Birds(SPECIES, per_class, split, size=64, transform=lambda image: image / 127.5 - 1)
    drawn = [birds[i] for i in range(len(birds))]
    return torch.stack([image for image, _ in drawn]), torch.tensor([label for _, label in drawn])


def main() -> None:
    torch.manual_seed(0)
    images, labels = photos("train", 100)
    test_images, test_labels = photos("test", 30)
    model = Net()
    network = semaug.Network(
        model,
        head="species",
        composite=semaug.Composite(run=lambda net, x: net(x), logits=lambda outputs: outputs.species, rest=rest),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    learner = semaug.LearnableAugmentation(network, optimizer, order="pipelined")
    for epoch in range(EPOCHS):
        model.train()
        metrics, batches = {}, torch.randperm(len(images)).split(60)
        for step, chosen in enumerate(batches):
            learner.set_progress((epoch + step / len(batches)) / EPOCHS)
            metrics = learner.step(images[chosen], labels[chosen])
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).species.argmax(1) == test_labels).float().mean()
        print(
            f"epoch {epoch + 1}: ISDA loss {metrics['train_loss']:.2f}, rest {metrics['rest_loss']:.2f}, "
            f"test accuracy {100 * accuracy:.1f} % (chance: {100 / SPECIES:.0f} %)"
        )


if __name__ == "__main__":
    main()
