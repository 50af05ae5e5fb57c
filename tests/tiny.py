"""A small residual network with BatchNorm and dropout, fast enough for double backward in fp64."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.drop(self.norm2(self.conv2(y))))


class TinyNet(nn.Module):
    """Stem, three residual blocks, pooling, head."""

    def __init__(self, classes: int = 4, width: int = 6, drop: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*[Residual(width, drop) for _ in range(3)])
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


TINY_BLOCKS = ["stem", "blocks.0", "blocks.1", "blocks.2"]


def batches(count: int, size: int = 8, classes: int = 4, pixels: int = 9) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, 3, pixels, pixels, dtype=torch.float64, generator=generator),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]
