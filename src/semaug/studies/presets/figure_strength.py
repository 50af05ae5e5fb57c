"""Figure "strength of augmentation": accuracy against λ0 with three networks on CUB-200-2011.

**Settings of the paper.** As in the table of data sets, with ResNet-50, DenseNet-161 and MobileNetV2. The paper shows
its values of λ0 in the drawing only; ours are 0 (basic training), 2.5, 5, 7.5, 10, 15 and 20.

**The paper's results.** Drawn, with a peak around λ0 = 10. As numbers from the table of networks, basic and λ0 = 10:
ResNet-50 84.5 and 86.7, DenseNet-161 86.7 and 88.4, MobileNetV2 82.6 and 84.3.

**Time at full scale.** 18 learnable runs and 3 basic ones for one seed, by the paper 4.5 h each with ResNet-50 on four
V100, more with DenseNet-161: about four days.
"""

from semaug.studies.cells import Cell, Experiment

_PAPER = {"ResNet-50": (84.5, 86.7), "DenseNet-161": (86.7, 88.4), "MobileNetV2": (82.6, 84.3)}


def _cells(*strengths: float) -> tuple[Cell, ...]:
    cells = []
    for network, (basic, learnable) in _PAPER.items():
        cells.append(Cell("basic", network=network, paper=basic, setting="λ0 = 0"))
        for strength in strengths:
            paper = learnable if strength == 10 else None
            setting = f"λ0 = {strength:g}"
            cells.append(Cell("learnable", network=network, paper=paper, setting=setting, strength=strength))
    return tuple(cells)


EXPERIMENT = Experiment(
    name="figure-strength",
    order=70,
    title="Strength of augmentation",
    line="accuracy against the strength λ0 with three networks on CUB-200-2011",
    shows="Accuracy rises with λ0 to a peak around 10, and stays above basic training (λ0 = 0).",
    caption="λ0 is written as in the paper; at small scale every strength is 0.3 times that.",
    cells=_cells(2.5, 5.0, 7.5, 10.0, 15.0, 20.0),
    small_cells=_cells(2.5, 5.0, 10.0, 20.0),
    small_seeds=(0,),
    kind="lines",
    axis="λ0",
)
