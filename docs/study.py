"""Computes figures of README.md, docs/ and benchmarks/README.md from docs/results and benchmarks/results.

`python docs/study.py` prints the tables of each page and draws docs/results/strengths.png; `--no-chart` prints only. A
test compares the pages with what it prints. If a cell of cub-224px-runs.csv was run in two comparisons, the second one
is used, since it has all seeds. Some methods in that file have options that were removed later; they can be run at
commit 8a1c3f27df2149418847dd90b57243d2296e91b0.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from semaug.report.canvas import slots, to_png
from semaug.report.charts import LineChart, Series, lines
from semaug.studies.paired import paired
from semaug.training.recipes import RECIPES

HERE = Path(__file__).parent / "results"
Cell = tuple[str, int, str, str]  # network, epochs, method with its options, strength
Seeds = dict[int, float]

ADAM = "--meta-optimizer adam"
SHAPE = f"learnable --order pipelined --fixed-trace 0.5 {ADAM} --meta-lr 0.0001"
AT_10 = {
    "SGD 0.001, as in the paper": "learnable",
    "Adam 0.001": f"learnable --order pipelined {ADAM}",
    "Adam 0.001, alignment": f"learnable --order pipelined {ADAM} --meta-objective alignment",
    "Adam 0.0001, fixed trace": SHAPE,
    "Adam 0.001, fixed trace, alignment": f"learnable --order pipelined --fixed-trace 0.5 {ADAM} "
    "--meta-objective alignment",
    "the same, meta images under RandAugment": f"learnable --fixed-trace 0.5 {ADAM} --meta-objective alignment "
    "--meta-images randaugment",
    "Adam 0.001, class-wise variance × learned factor, alignment": "learnable --order pipelined --source modulated "
    f"{ADAM} --meta-objective alignment",
    "*joint*: SGD 0.001 on the training loss itself, without a meta loop": "joint",
}
AT_40 = {
    "isda": "isda",
    "constant": "constant",
    "learnable, as in the paper": "learnable",
    "learnable, Adam 0.0001, fixed trace": SHAPE,
    "the same, meta images held out of training": f"learnable --fixed-trace 0.5 {ADAM} --meta-lr 0.0001 "
    "--meta-images held-out",
    "learnable, Adam 0.0001, class-wise variance × learned factor of its trace": "learnable --order pipelined "
    f"--source reshaped {ADAM} --meta-lr 0.0001",
    "learnable, Adam 0.0001, fixed trace, four directions": f"learnable --order pipelined --rank 4 --fixed-trace 0.5 "
    f"{ADAM} --meta-lr 0.0001",
}
EIGHT = {
    "basic": "basic",
    "constant, Σ = 0.5·I": "constant",
    "isda": "isda",
    "learnable": "learnable",
    "joint": "joint",
    "Mixup": "mixup",
    "CutMix": "cutmix",
    "Random Erasing": "random-erasing",
    "RandAugment": "randaugment",
}
NETWORKS = {"ResNet-50": "torchvision/resnet50", "MobileNetV2": "torchvision/mobilenet_v2"}


def read(first: bool = False) -> dict[Cell, Seeds]:
    """Read the accuracy of each seed of each cell; `first`: of the seeds 0 and 1 in the first comparison only."""
    runs: dict[Cell, dict[str, Seeds]] = defaultdict(lambda: defaultdict(dict))
    with open(HERE / "cub-224px-runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if first and (row["comparison"] != "1" or row["seed"] not in "01"):
                continue
            cell = row["network"], int(row["epochs"]), row["method"], row["strength"]
            runs[cell][row["comparison"]][int(row["seed"])] = float(row["top1"])
    return {cell: comparisons[max(comparisons)] for cell, comparisons in runs.items()}


def shown(seeds: Seeds | None, digits: int = 2) -> str:
    if seeds is None:
        return ""
    text = f"{fmean(seeds.values()):.{digits}f} ± {stdev(seeds.values()):.{digits}f}"
    return text if len(seeds) == 3 or digits == 1 else f"{text} ({len(seeds)} seeds)"


def minus(own: Seeds | None, base: Seeds | None, digits: int = 2) -> str:
    difference = paired(own, base) if own and base and own is not base else None
    if difference is None:
        return ""
    return f"{difference.mean:+.{digits}f} ± {difference.error:.{digits}f}".replace("-", "−")


def learned_at_10(cells: dict[Cell, Seeds]) -> list[str]:
    lines = ["| learnable with | top-1 | − constant | − isda |", "|---|---|---|---|"]
    for title, method in AT_10.items():
        own, constant, isda = (cells[NETWORKS["ResNet-50"], 10, m, "10"] for m in (method, "constant", "isda"))
        lines.append(f"| {title} | {shown(own)} | {minus(own, constant)} | {minus(own, isda)} |")
    return lines


def strengths(cells: dict[Cell, Seeds]) -> list[str]:
    lines = [
        "| λ0 | constant, ResNet-50 | isda, ResNet-50 | constant, MobileNetV2 | isda, MobileNetV2 |",
        "|---|---|---|---|---|",
    ]
    for strength in ("", "5", "10", "20", "40", "80"):
        methods = ("constant", "isda") if strength else ("basic", "basic")
        row = [shown(cells.get((net, 10, m, strength))) for net in NETWORKS.values() for m in methods]
        lines.append(f"| {strength or '(basic)'} | {' | '.join(row)} |")
    return lines


def learned_at_40(cells: dict[Cell, Seeds]) -> list[str]:
    lines = ["| λ0 = 40 | 10 epochs | − isda | 20 epochs | − isda |", "|---|---|---|---|---|"]
    for title, method in {"(basic)": "basic", **AT_40}.items():
        row = []
        for epochs in (10, 20):
            own, isda = (
                cells.get((NETWORKS["ResNet-50"], epochs, m, "40" if m != "basic" else "")) for m in (method, "isda")
            )
            row += [shown(own), minus(own, isda)]
        lines.append(f"| {title} | {' | '.join(row)} |")
    for strength in ("20", "10"):
        own, isda = (cells[NETWORKS["ResNet-50"], 20, "isda", s] for s in (strength, "40"))
        at_10, best_10 = (cells[NETWORKS["ResNet-50"], 10, "isda", s] for s in (strength, "40"))
        row = [shown(at_10), minus(at_10, best_10), shown(own), minus(own, isda)]
        lines.append(f"| isda with λ0 = {strength} | {' | '.join(row)} |")
    return lines


def mobilenet(cells: dict[Cell, Seeds]) -> list[str]:
    lines = ["| MobileNetV2 | top-1 | − isda, λ0 = 20 | − constant, λ0 = 10 |", "|---|---|---|---|"]
    net = NETWORKS["MobileNetV2"]
    rows = {
        "basic": ("basic", ""),
        "constant, λ0 = 10": ("constant", "10"),
        "isda, λ0 = 10": ("isda", "10"),
        "isda, λ0 = 20": ("isda", "20"),
        "joint, λ0 = 10": ("joint", "10"),
        "learnable, as in the paper, λ0 = 10": ("learnable", "10"),
        "learnable, Adam 0.0001, fixed trace, λ0 = 10": (SHAPE, "10"),
    }
    isda, constant = cells[net, 10, "isda", "20"], cells[net, 10, "constant", "10"]
    for title, (method, strength) in rows.items():
        own = cells[net, 10, method, strength]
        lines.append(f"| {title} | {shown(own)} | {minus(own, isda)} | {minus(own, constant)} |")
    return lines


def readme(cells: dict[Cell, Seeds]) -> list[str]:
    lines = ["| top-1 % | ResNet-50, 10 epochs | ResNet-50, 20 epochs | MobileNetV2, 10 epochs |", "|---|---|---|---|"]
    columns = [(NETWORKS["ResNet-50"], 10), (NETWORKS["ResNet-50"], 20), (NETWORKS["MobileNetV2"], 10)]
    best: dict[str, list[str]] = {}
    for method in ("isda", "learnable"):
        tried = [{cell[3]: own for cell, own in cells.items() if cell[:3] == (*column, method)} for column in columns]
        best[method] = [max(own, key=lambda strength, own=own: fmean(own[strength].values())) for own in tried]
    rows = {
        "basic": [("basic", "", "")] * 3,
        "isda, strength 20": [("isda", "20", "")] * 3,
        "isda, best of the strengths tried": [("isda", strength, f" ({strength})") for strength in best["isda"]],
        "learnable, best of the strengths tried": [("learnable", s, f" ({s})") for s in best["learnable"]],
    }
    for title, row in rows.items():
        texts = [shown(cells[*column, m, s], 1) + note for column, (m, s, note) in zip(columns, row, strict=True)]
        lines.append(f"| {title} | {' | '.join(texts)} |")
    return lines


def eight_methods(cells: dict[Cell, Seeds]) -> list[str]:
    first = read(first=True)
    lines = ["| method | ResNet-50 | − basic | MobileNetV2 | − basic |", "|---|---|---|---|---|"]
    for title, method in EIGHT.items():
        row = []
        for network in NETWORKS.values():
            own = first[network, 10, method, "10" if method in ("constant", "isda", "learnable", "joint") else ""]
            row += [shown(own, 1), minus(own, first[network, 10, "basic", ""], 1)]
        lines.append(f"| {title} | {' | '.join(row)} |")
    return lines


def claims(cells: dict[Cell, Seeds]) -> list[str]:
    """The differences in the table of docs/reproduction.md, by the beginning of their rows."""
    first = read(first=True)

    def less(own: str, base: str, network: str = "ResNet-50", epochs: int = 10, of: dict[Cell, Seeds] = cells) -> str:
        pair = (of[NETWORKS[network], epochs, *(f"{cell} ".split(" ")[:2])] for cell in (own, base))
        return minus(*pair, digits=1)

    def both(own: str, base: str, of: dict[Cell, Seeds] = cells) -> list[str]:
        return [less(own, base, network, of=of) for network in NETWORKS]

    rows = {
        "learnable is above basic": both("learnable 10", "basic"),
        "ISDA is above basic": [
            *both("isda 10", "basic"),
            less("isda 40", "basic"),
            less("isda 20", "basic", "MobileNetV2"),
        ],
        "learnable is above ISDA": [
            *both("learnable 10", "isda 10"),
            less("isda 40", "learnable 40").lstrip("+"),
            less("isda 40", "learnable 40", epochs=20).lstrip("+"),
        ],
        "Random Erasing and RandAugment": [
            less(method, "basic", network, of=first)
            for network in NETWORKS
            for method in ("random-erasing", "randaugment")
        ],
        "Mixup and CutMix": [less(method, "basic", of=first) for method in ("mixup", "cutmix")],
    }
    return [f"| {title} | {' | '.join(figures)} |" for title, figures in rows.items()]


def shares(cells: dict[Cell, Seeds]) -> list[str]:
    with open(HERE / "strength-runs.csv", newline="") as file:
        runs = {(row["network"], row["data"], row["share"]): row for row in csv.DictReader(file)}
    columns = list(
        dict.fromkeys(key[:2] for key in sorted(runs, key=lambda key: ("mobile" in key[0], "cars" in key[1])))
    )
    lines = []
    for share in ("0.1", "0.2", "0.3"):
        row = [f"{float(runs[*column, share]['last_top1']) + 1e-9:.1f}" for column in columns]  # 76.25 becomes 76.3
        lines.append(f"| {'**0.2**' if share == '0.2' else share} | {' | '.join(row)} |")
    ends = [f"{float(runs[*column, '0.2']['strength']):.0f}" for column in columns]
    return [*lines, f"| λ at the end, with 0.2 | {' | '.join(ends)} |"]


def graphed_steps(cells: dict[Cell, Seeds]) -> list[str]:
    titles = {
        "plain cross-entropy": "plain",
        "ISDA": "isda",
        "paper's order, jvp": "paper",
        "paper's order, double backward": "paper-double-backward",
        "pipelined": "pipelined",
        "paper's order, interval 10": "paper-interval",
        "pipelined, interval 10": "pipelined-interval",
    }
    folder = HERE.parents[1] / "benchmarks" / "results"
    lines = []
    for title, method in titles.items():
        row = []
        for pixels in (224, 448):
            files = [folder / f"resnet50-{pixels}-h200-{run}.json" for run in ("first", "second")]
            timed = [
                own[method] for own in (json.loads(file.read_text())["methods"] for file in files) if method in own
            ]
            row.append(", ".join(f"{own['ms_per_step']:.1f}" for own in timed))
            row.append(", ".join(f"{own['ratio']:.2f}" for own in timed) if method != "plain" else "")
        lines.append(f"| {title} | {' | '.join(row)} |")
    return lines


def cost(cells: dict[Cell, Seeds]) -> list[str]:
    titles = {
        "ISDA": "isda",
        "learnable, paper's order": "paper",
        "learnable, pipelined": "pipelined",
        "learnable, pipelined, meta loop every tenth half step": "pipelined-interval",
    }
    files = [
        HERE.parents[1] / "benchmarks" / "results" / f"resnet50-{pixels}-h200-second.json" for pixels in (224, 448)
    ]
    sizes = [json.loads(file.read_text())["methods"] for file in files]
    cell = "{ratio:.2f} | {peak_memory:.1f}"
    return [
        f"| {title} | "
        + " | ".join(cell.format(**own[method] | {"peak_memory": own[method]["peak_memory"] / 1e9}) for own in sizes)
        + " |"
        for title, method in titles.items()
    ]


def recipes(cells: dict[Cell, Seeds]) -> list[str]:
    names = ("epochs", "crop", "layer_decay", "drop_path", "ema")
    lines = []
    for recipe in RECIPES.values():
        own = recipe.defaults(None, 64)
        figures = [f"{own[name]:g}" for name in ("lr", "weight_decay", *names)]
        lines.append(f"| `{recipe.name}` | {own['optimizer']} | {' | '.join(figures)} |")
    return lines


TABLES = {
    "README.md": (readme,),
    "docs/cost.md": (cost,),
    "docs/learning-the-covariance.md": (learned_at_10, strengths, learned_at_40, mobilenet),
    "docs/results.md": (eight_methods,),
    "docs/reproduction.md": (claims,),
    "docs/how-to/strength-and-source.md": (shares,),
    "docs/how-to/vision-transformers.md": (recipes,),
    "benchmarks/README.md": (graphed_steps,),
}
"""What is computed for each page: the first cell begins a row of the page, which has the other cells in order."""


def draw(cells: dict[Cell, Seeds], file: Path) -> None:
    """Draw accuracy against the strength, with the spread over seeds."""
    labels = {"isda": "isda", "constant": "constant Σ", "learnable": "learnable, as in the paper", "basic": "basic"}
    steps = ("5", "10", "20", "40", "80")
    charts = []
    for title, net in NETWORKS.items():
        series = []
        for slot, (method, label) in zip(slots(list(labels)), labels.items(), strict=True):
            own = [cells.get((net, 10, method, "" if method == "basic" else step)) for step in steps]
            means = [None if seeds is None else fmean(seeds.values()) / 100 for seeds in own]
            spreads = [None if seeds is None else stdev(seeds.values()) / 100 for seeds in own]
            series.append(Series(label, slot, means, range(len(steps)), () if method == "basic" else spreads))
        caption = "top-1 accuracy on validation photos, ± over seeds"
        charts.append(LineChart(title, caption, series, "strength λ0", steps, percent=True))
    file.write_bytes(to_png(lines(charts)))


def main() -> None:
    """Print the tables, and draw the chart unless `--no-chart` is set."""
    cells = read()
    for page, tables in TABLES.items():
        print(f"## {page}", "", sep="\n")
        for table in tables:
            print(*table(cells), "", sep="\n")
    if "--no-chart" not in sys.argv:
        draw(cells, HERE / "strengths.png")


if __name__ == "__main__":
    main()
