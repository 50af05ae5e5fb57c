"""The picture of the README, from the embedded birds and a run on them.

    semaug train --method isda --epochs 40 --strength 3 --output runs/picture
    python docs/picture.py runs/picture docs/picture.png

Of the pairs of species that differ in one trait, it takes the one whose test images the network confuses the least.
Left: the two in the same scene, and augmentations of the image that destroy the difference. Right: features of all
test images of the two, and draws from N(a, λΣ) around one of them, the median of its species in the direction in which
the head tells the two apart. That direction is the ordinate; the abscissa is that of the largest variance beside it.
"""

import io
import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from PIL import Image
from torch import Tensor

from semaug.data.birds import TRAITS, Species, species
from semaug.data.destruction import AUGMENTATIONS, LEFT, Pair, augment_all, difference_left, look_alike_pairs, measure
from semaug.report.canvas import COLOURS, INK, RULE, SOFT, to_png
from semaug.report.figures.groups import confusion_counts
from semaug.report.figures.runs import FigureRun, compute_features, open_runs, run_images

SHOWN = ("CutMix", "Random Erasing")
DRAWS = 60
BLUE, ORANGE = COLOURS[:2]


def main(run: Path, output: Path) -> None:
    [view] = open_runs({"run": run}, "run")
    kinds = species(len(view.classes))
    first, second = best_told_apart(run, kinds)
    trait = differing(kinds[first], kinds[second])[0]
    values = kinds[first].traits[trait], kinds[second].traits[trait]
    pair, augmented = destroyed_by_all(TRAITS[trait], values)
    shares = {row.name: 100 * row.share for row in measure()}
    print(f"{kinds[first].name} and {kinds[second].name}: {TRAITS[trait]}, {values}")
    print("images that lose it:", ", ".join(f"{name} {share:.0f} %" for name, share in shares.items()))

    figure = Figure(figsize=(11.6, 4.5), dpi=100, facecolor="white")
    heading = {"fontsize": 11.5, "weight": "bold", "color": INK, "va": "center"}
    figure.text(0.012, 0.965, f"Two species that differ in one trait ({TRAITS[trait].replace('_', ' ')}) …", **heading)
    figure.text(0.012, 0.482, "… which augmentation of the image can hide", **heading)
    figure.text(0.475, 0.965, "What the network sees, and variations of one image (circles)", **heading)
    for place, (picture, colour) in enumerate(zip(pair.pictures, (BLUE, ORANGE), strict=True)):
        show(figure.add_axes((0.012 + 0.225 * place, 0.535, 0.205, 0.39)), picture, pair, colour)
    for place, name in enumerate(SHOWN):
        show(figure.add_axes((0.012 + 0.225 * place, 0.055, 0.205, 0.39)), augmented[name], pair, BLUE)
        note = f"{name}: in {shares[name]:.0f} % of images"
        figure.text(0.012 + 0.225 * place + 0.1025, 0.027, note, fontsize=9.5, color=SOFT, ha="center", va="center")
    features(figure.add_axes((0.475, 0.055, 0.513, 0.87)), view, first, second)
    picture = Image.open(io.BytesIO(to_png(figure))).convert("RGB")
    picture.resize((1160, round(1160 * picture.height / picture.width))).save(output, optimize=True)


def differing(one: Species, two: Species) -> list[int]:
    return [i for i, values in enumerate(zip(one.traits, two.traits, strict=True)) if values[0] != values[1]]


def best_told_apart(run: Path, kinds: list[Species]) -> tuple[int, int]:
    """The look-alikes with the fewest mistakes between them, and among those in all."""
    counts = confusion_counts([run], len(kinds))
    pairs = [(i, j) for i in range(len(kinds)) for j in range(i) if len(differing(kinds[i], kinds[j])) == 1]
    mistakes = {i: sum(count for pair, count in counts.items() if i in pair) for i in range(len(kinds))}
    return min(pairs, key=lambda pair: (counts[min(pair), max(pair)], mistakes[pair[0]] + mistakes[pair[1]]))


def destroyed_by_all(trait: str, values: tuple[str, str]) -> tuple[Pair, dict[str, Tensor]]:
    """The first drawing of such a pair whose difference each augmentation destroys, and what becomes of it."""
    pairs = look_alike_pairs(20, 20, size=224)
    results = {name: augment_all(pairs, AUGMENTATIONS[name][1]) for name in SHOWN}
    for i, pair in enumerate(pairs):
        right = pair.trait == trait and pair.values == values
        if right and all(difference_left(pair, result[i]) < LEFT for result in results.values()):
            return pair, {name: result[i][0] for name, result in results.items()}
    raise SystemExit("no drawing of the pair loses its difference under all augmentations")


def show(axes: Axes, picture: Tensor, pair: Pair, colour: str) -> None:
    """A bird in a frame, with a ring around what tells it from its look-alike."""
    axes.imshow(picture.permute(1, 2, 0).numpy())
    left, top, right, bottom = pair.box
    radius = 0.5 * max(right - left, bottom - top) + 7
    for width, ink in ((4.5, "white"), (1.8, INK)):
        axes.add_patch(Circle(((left + right) / 2, (top + bottom) / 2), radius, fill=False, lw=width, ec=ink))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=colour, linewidth=3)


@torch.no_grad()
def features(axes: Axes, view: FigureRun, first: int, second: int) -> None:
    samples = run_images(view.classifier)
    wanted = [i for i, label in enumerate(samples.labels) if label in (first, second)]
    seen = compute_features(samples, wanted, view.classifier, {"own": view.features})
    found, labels = seen.features["own"], seen.labels
    weight, bias = view.network.head_parameters({})
    across = weight[second] - weight[first]
    line = 0.0 if bias is None else float((bias[first] - bias[second]) / across.norm())
    across = across / across.norm()
    beside = found - found.mean(0)
    beside = beside - (beside @ across)[:, None] * across
    plane = torch.stack([torch.linalg.svd(beside, full_matrices=False).Vh[0], across], 1)
    places = found @ plane
    own = torch.nonzero(labels == first)[:, 0]
    middle = int(own[places[own, 1].argsort()[len(own) // 2]])
    x, y = places[middle].tolist()
    cloud = view.draws(found[[middle]], labels[[middle]], DRAWS, torch.Generator().manual_seed(0))[:, 0] @ plane
    kept = int((cloud[:, 1] < line).sum())
    right = int(((places[:, 1] > line) == (labels == second)).sum())
    print(f"{right} of {len(labels)} images and {kept} of {DRAWS} draws on their side, λ {view.strength:.2f}")
    axes.axhline(line, color=INK, lw=1, ls=(0, (5, 3)), zorder=1)
    for end in cloud.tolist():
        axes.plot([x, end[0]], [y, end[1]], color=BLUE, lw=0.5, alpha=0.25, zorder=1)
    axes.scatter(*cloud.T.numpy(), s=22, facecolors="white", edgecolors=BLUE, lw=1, zorder=2)
    for label, colour, marker in ((first, BLUE, "o"), (second, ORANGE, "s")):
        mine = places[labels == label].T.numpy()
        axes.scatter(*mine, s=36, color=colour, marker=marker, edgecolors="white", lw=0.6, zorder=3)
    axes.scatter(x, y, s=170, color=BLUE, edgecolors=INK, lw=1.6, zorder=4)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(RULE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
