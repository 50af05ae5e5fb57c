"""Computes figures of README.md, docs/ and benchmarks/README.md from docs/results and benchmarks/results.

`python docs/study.py` prints the tables of each page and draws strengths.png and small-joint.png; `--no-chart` prints
only. A test compares the pages with what it prints. If a cell of cub-224px-runs.csv was run in two comparisons, the
second one is used, since it has all seeds. Some methods in that file have options that were removed later; they can be
run at commit 8a1c3f27df2149418847dd90b57243d2296e91b0.
"""

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    "Adam 0.0001, fixed trace": SHAPE,
    "*joint*: SGD 0.001 on the training loss itself, without a meta loop": "joint",
}
AT_40 = {
    "isda": "isda",
    "constant": "constant",
    "learnable, as in the paper": "learnable",
    "learnable, Adam 0.0001, fixed trace": SHAPE,
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
RESNET = NETWORKS["ResNet-50"]
STRENGTHS = ("5", "10", "20", "40", "80")


def read(first: bool = False) -> dict[Cell, Seeds]:
    """Read the accuracy of each seed of each cell; `first`: of the seeds 0 and 1 in the first comparison only."""
    runs: dict[Cell, dict[str, Seeds]] = defaultdict(lambda: defaultdict(dict))
    for row in runs_of("cub-224px-runs.csv"):
        if first and (row["comparison"] != "1" or row["seed"] not in "01"):
            continue
        cell = row["network"], int(row["epochs"]), row["method"], row["strength"]
        runs[cell][row["comparison"]][int(row["seed"])] = float(row["top1"])
    return {cell: comparisons[max(comparisons)] for cell, comparisons in runs.items()}


def runs_of(file: str) -> list[dict[str, str]]:
    with open(HERE / file, newline="") as content:
        return list(csv.DictReader(content))


def steps_of(file: str) -> dict[str, dict[str, float]]:
    content = (HERE.parents[1] / "benchmarks" / "results" / file).read_text()
    methods: dict[str, dict[str, float]] = json.loads(content)["methods"]
    return methods


def table(rows: Mapping[str, Sequence[str]], head: str = "") -> list[str]:
    """The lines of a table: the names of the columns, separated by |, if there are any, and the rows."""
    heading = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"] if head else []
    return [*heading, *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items())]


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
    constant, isda = (cells[RESNET, 10, method, "10"] for method in ("constant", "isda"))
    rows = {}
    for title, method in AT_10.items():
        own = cells[RESNET, 10, method, "10"]
        rows[title] = [shown(own), minus(own, constant), minus(own, isda)]
    return table(rows, "learnable with | top-1 | − constant | − isda")


def strengths(cells: dict[Cell, Seeds]) -> list[str]:
    rows = {}
    for strength in ("", *STRENGTHS):
        methods = ("constant", "isda") if strength else ("basic", "basic")
        own = [cells.get((net, 10, m, strength)) for net in NETWORKS.values() for m in methods]
        rows[strength or "(basic)"] = [shown(seeds) for seeds in own]
    return table(rows, "λ0 | constant, ResNet-50 | isda, ResNet-50 | constant, MobileNetV2 | isda, MobileNetV2")


def learned_at_40(cells: dict[Cell, Seeds]) -> list[str]:
    chosen = {"(basic)": ("basic", "")} | {title: (method, "40") for title, method in AT_40.items()}
    chosen |= {f"isda with λ0 = {strength}": ("isda", strength) for strength in ("20", "10")}
    rows: dict[str, list[str]] = {title: [] for title in chosen}
    for epochs in (10, 20):
        isda = cells[RESNET, epochs, "isda", "40"]
        for title, cell in chosen.items():
            own = cells.get((RESNET, epochs, *cell))
            rows[title] += [shown(own), minus(own, isda)]
    return table(rows, "λ0 = 40 | 10 epochs | − isda | 20 epochs | − isda")


def mobilenet(cells: dict[Cell, Seeds]) -> list[str]:
    chosen = {
        "basic": ("basic", ""),
        "constant, λ0 = 10": ("constant", "10"),
        "isda, λ0 = 10": ("isda", "10"),
        "isda, λ0 = 20": ("isda", "20"),
        "joint, λ0 = 10": ("joint", "10"),
        "learnable, as in the paper, λ0 = 10": ("learnable", "10"),
        "learnable, Adam 0.0001, fixed trace, λ0 = 10": (SHAPE, "10"),
    }
    own = {title: cells[NETWORKS["MobileNetV2"], 10, *cell] for title, cell in chosen.items()}
    isda, constant = own["isda, λ0 = 20"], own["constant, λ0 = 10"]
    rows = {title: [shown(seeds), minus(seeds, isda), minus(seeds, constant)] for title, seeds in own.items()}
    return table(rows, "MobileNetV2 | top-1 | − isda, λ0 = 20 | − constant, λ0 = 10")


def readme(cells: dict[Cell, Seeds]) -> list[str]:
    titles = {method: f"{method}, best of the strengths tried" for method in ("isda", "learnable")}
    rows: dict[str, list[str]] = {title: [] for title in ("basic", "isda, strength 20", *titles.values())}
    for column in ((RESNET, 10), (RESNET, 20), (NETWORKS["MobileNetV2"], 10)):
        rows["basic"].append(shown(cells[*column, "basic", ""], 1))
        rows["isda, strength 20"].append(shown(cells[*column, "isda", "20"], 1))
        for method, title in titles.items():
            tried = {cell[3]: own for cell, own in cells.items() if cell[:3] == (*column, method)}
            best, own = max(tried.items(), key=lambda item: fmean(item[1].values()))
            rows[title].append(f"{shown(own, 1)} ({best})")
    return table(rows, "top-1 % | ResNet-50, 10 epochs | ResNet-50, 20 epochs | MobileNetV2, 10 epochs")


def eight_methods(cells: dict[Cell, Seeds]) -> list[str]:
    first, rows = read(first=True), {}
    for title, method in EIGHT.items():
        strength = "10" if method in ("constant", "isda", "learnable", "joint") else ""
        pairs = [(first[net, 10, method, strength], first[net, 10, "basic", ""]) for net in NETWORKS.values()]
        rows[title] = [text for own, basic in pairs for text in (shown(own, 1), minus(own, basic, 1))]
    return table(rows, "method | ResNet-50 | − basic | MobileNetV2 | − basic")


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
    return table(rows)


def shares(cells: dict[Cell, Seeds]) -> list[str]:
    runs = {(row["network"], row["data"], row["form"], row["share"]): row for row in runs_of("strength-runs.csv")}
    columns = [(net, data) for net in ("resnet50-v1", "mobilenet_v2") for data in ("cub300", "cars256")]
    titles = {("ramp", share): f"earlier form, {share}" for share in ("0.1", "0.2", "0.3")}
    titles |= {("knowledge", "0.2"): "share **0.2**", ("knowledge", "0.25"): "share 0.25"}
    rows, ends = {}, []
    for kind, title in titles.items():
        own = [runs.get((f"torchvision/{net}", data, *kind)) for net, data in columns]
        rows[title] = [f"{float(run['last_top1']) + 1e-9:.1f}" if run else "" for run in own]  # 76.25: 76.3
        ends = [f"{float(run['strength']):.0f}" if run else "" for run in own] if kind == ("knowledge", "0.2") else ends
    return table(rows | {"λ at the end, with **0.2**": ends})


def shares_on_a_cpu(cells: dict[Cell, Seeds]) -> list[str]:
    runs: dict[str, dict[tuple[str, str], Seeds]] = defaultdict(lambda: defaultdict(dict))
    for row in runs_of("strength-cpu-runs.csv"):
        runs[row["cell"]][row["form"], row["value"]][int(row["seed"])] = float(row["top1"])
    titles = {("basic", ""): "basic"}
    titles |= {("fixed", value): f"λ0 = {value}" for value in ("1", "3", "10", "20")}
    best = {
        cell: max((seeds for key, seeds in own.items() if key in titles), key=lambda seeds: fmean(seeds.values()))
        for cell, own in runs.items()
    }
    titles |= {("knowledge", share): f"auto, share {share}" for share in ("0.15", "0.2", "0.25", "0.3", "0.4")}
    titles["knowledge", "0.2"] = "auto, share **0.2**"
    rows: dict[str, list[str]] = {title: [] for title in titles.values()}
    for key, title in titles.items():
        for cell, own in runs.items():
            rows[title] += [shown(own.get(key), 1), minus(own.get(key), best[cell], 1)]
    return table(rows)


def last_blocks(cells: dict[Cell, Seeds]) -> list[str]:
    """Fine-tuning of the last blocks on a CPU: accuracies, and differences to basic training and to the best λ0."""
    runs: dict[tuple[str, str], Seeds] = defaultdict(dict)
    for row in runs_of("last-blocks-runs.csv"):
        runs[row["setting"], row["data"]][int(row["seed"])] = float(row["last_top1"])
    titles = {"basic": "basic, last blocks"} | {value: f"λ0 = {value}, last blocks" for value in STRENGTHS[:4]}
    titles |= {"auto": "auto, share **0.2**, last blocks"}
    titles |= {f"auto {share}": f"auto, share {share}, last blocks" for share in ("0.3", "0.4")}
    rows: dict[str, list[str]] = {title: [] for title in titles.values()}
    for data in ("cub300", "cars256"):
        best = max((runs[value, data] for value in STRENGTHS[:4]), key=lambda seeds: fmean(seeds.values()))
        for setting, title in titles.items():
            own = runs[setting, data]
            rows[title] += [shown(own, 1), minus(own, runs["basic", data], 1), minus(own, best, 1)]
    return table(rows, "MobileNetV2 | birds | − basic | − best λ0 | cars | − basic | − best λ0")


def fine_tuning(cells: dict[Cell, Seeds]) -> list[str]:
    """Fine-tuning of ResNet-50: accuracies, and by how much the automatic strength is above each."""
    runs: dict[tuple[str, str], Seeds] = defaultdict(dict)
    for row in runs_of("fine-tuning-runs.csv"):
        if row["network"] == "torchvision/resnet50-v1":
            runs[row["setting"], row["data"]][int(row["seed"])] = float(row["last_top1"])
    rows: dict[str, list[str]] = {}
    for setting in ("basic", "20", "40", "auto"):
        own = [(runs[setting, data], runs["auto", data]) for data in ("cub300", "cars256")]
        title = f"λ0 = {setting}" if setting.isdigit() else setting
        rows[f"{title}, whole network"] = [text for o, auto in own for text in (shown(o), minus(auto, o))]
    return table(rows, "ResNet-50 | birds | auto is above it by | cars | auto is above it by")


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
    rows: dict[str, list[str]] = {title: [] for title in titles}
    for pixels in (224, 448):
        files = [steps_of(f"resnet50-{pixels}-h200-{run}.json") for run in ("first", "second")]
        for title, method in titles.items():
            timed = [methods[method] for methods in files if method in methods]
            rows[title].append(", ".join(f"{own['ms_per_step']:.1f}" for own in timed))
            rows[title].append(", ".join(f"{own['ratio']:.2f}" for own in timed) if method != "plain" else "")
    return table(rows)


def graphed_networks(cells: dict[Cell, Seeds]) -> list[str]:
    titles = {
        "vit-b16-224": {
            "ViT-B/16, 224 px": "plain",
            "ViT-B/16, paper's order": "paper",
            "ViT-B/16, pipelined": "pipelined",
        },
        "mobilenetv2-448": {
            "MobileNetV2, 448 px": "plain",
            "MobileNetV2, paper's order": "paper",
            "MobileNetV2, pipelined": "pipelined",
        },
        "p2p-resnet50-448": {
            "P2P-Net": "plain",
            "P2P-Net with ISDA": "isda",
            "P2P-Net with learnable, paper's order, interval 10": "paper-interval",
        },
    }
    rows = {}
    for file, methods in titles.items():
        timed = steps_of(f"{file}-h200.json")
        for title, method in methods.items():
            own = timed[method]
            rows[title] = [f"{own['ms_per_step']:.1f}", f"{own['ratio']:.2f}", f"{own['peak_memory'] / 1e9:.1f}"]
    return table(rows)


def cost(cells: dict[Cell, Seeds]) -> list[str]:
    titles = {
        "ISDA": "isda",
        "learnable, paper's order": "paper",
        "learnable, pipelined": "pipelined",
        "learnable, pipelined, meta loop every tenth half step": "pipelined-interval",
    }
    sizes = [steps_of(f"resnet50-{pixels}-h200-second.json") for pixels in (224, 448)]
    rows = {}
    for title, method in titles.items():
        own = [methods[method] for methods in sizes]
        rows[title] = [text for m in own for text in (f"{m['ratio']:.2f}", f"{m['peak_memory'] / 1e9:.1f}")]
    return table(rows)


def probes(cells: dict[Cell, Seeds]) -> list[str]:
    runs: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in runs_of("probe-runs.csv"):
        runs[row["strength"]][row["data"]].append(row)
    top1 = {
        key: {data: {int(row["seed"]): float(row["last_top1"]) for row in own} for data, own in of_data.items()}
        for key, of_data in runs.items()
    }
    titles, rows = {"": "basic", "auto": "isda, automatic"}, {}
    for strength, of_data in runs.items():
        cells_of_row = rows[titles.get(strength, f"isda, λ0 = {strength}")] = list[str]()
        for data in ("cub300", "cars256"):
            own, end = top1[strength][data], fmean(float(row["end_strength"]) for row in of_data[data])
            cells_of_row += [shown(own, 1), minus(own, top1[""][data], 1), f"{end:.1f}"]
    return table(rows)


def probe_runs() -> dict[str, dict[str, Seeds]]:
    """Heads on fixed features with the automatic strength: the accuracies by method, data and seed."""
    runs: dict[str, dict[str, Seeds]] = defaultdict(lambda: defaultdict(dict))
    for row in runs_of("probe-runs.csv"):
        if row["strength"] == "auto":
            runs[row["method"]][row["data"]][int(row["seed"])] = float(row["last_top1"])
    for row in runs_of("probe-auto-runs.csv"):
        runs[row["method"]][row["data"]][int(row["seed"])] = float(row["last_top1"])
    return runs


def closed_forms(cells: dict[Cell, Seeds]) -> list[str]:
    titles = {"constant": "constant"}
    titles |= {f"isda --covariance {name}": f"isda, `{name}`" for name in ("pooled", "neighbours", "shrunk")}
    return against_isda({"isda": "isda, `classwise`"} | titles, "Σ, automatic strength")


def covnets(cells: dict[Cell, Seeds]) -> list[str]:
    """CovNet with the automatic strength, beside the closed forms; Σ at the end is that of seed 0."""
    adam = "--meta-optimizer adam --meta-lr 0.0001"
    titles = {
        "constant": "constant",
        "isda": "class-wise (isda)",
        "learnable --meta-lr 0": "CovNet, not trained",
        "learnable --meta-lr 0.1": "CovNet, SGD 0.1",
        "learnable --meta-lr 1": "CovNet, SGD 1",
        "learnable --meta-lr 10": "CovNet, SGD 10",
        f"learnable {adam}": "CovNet, Adam 0.0001",
        f"learnable --activation softplus {adam}": "CovNet, Adam 0.0001, softplus",
        f"learnable --fixed-trace 0.5 {adam}": "CovNet, Adam 0.0001, fixed trace",
    }
    accuracies, rows = probe_runs(), dict[str, list[str]]()
    ends = {(row["method"], row["data"]): row for row in runs_of("probe-auto-runs.csv") if row["seed"] == "0"}
    for method, title in titles.items():
        cells_of_row = rows[title] = list[str]()
        for data in ("cub300", "cars256"):
            own, isda, end = accuracies[method][data], accuracies["isda"][data], ends.get((method, data))
            if len(own) > 1:
                cells_of_row += [shown(own, 1), minus(own, isda, 1)]
            else:
                cells_of_row += [f"{own[0]:.1f} (seed 0)" if own else "", f"{own[0] - isda[0]:+.1f}" if own else ""]
                cells_of_row[-1] = cells_of_row[-1].replace("-", "−")
            names = ("variance_mean", "variance_std_samples", "variance_std_dims")
            sizes = [float(end[name]) for name in names] if end and method.startswith("learnable") else []
            cells_of_row.append("{:.3g}; {:.2g}, {:.2g}".format(*sizes) if sizes else "")
    heads = "birds, head | − class-wise | Σ at the end | cars, head | − class-wise | Σ at the end"
    return table(rows, f"Σ, automatic strength | {heads}")


def against_isda(titles: Mapping[str, str], head: str) -> list[str]:
    """The accuracies of methods on birds and cars, and their differences to ISDA's."""
    runs, rows = probe_runs(), {}
    for method, title in titles.items():
        cells_of_row = rows[title] = list[str]()
        for data in ("cub300", "cars256"):
            own, isda = runs[method][data], runs["isda"][data]
            cells_of_row += [shown(own, 1), minus(own, isda, 1)]
    return table(rows, f"{head} | birds, head | − classwise | cars, head | − classwise")


def recipes(cells: dict[Cell, Seeds]) -> list[str]:
    names = ("lr", "weight_decay", "epochs", "crop", "layer_decay", "drop_path", "ema")
    own = {recipe.name: recipe.defaults(None, 64) for recipe in RECIPES.values()}
    return table(
        {f"`{name}`": [row["optimizer"], *(f"{row[setting]:g}" for setting in names)] for name, row in own.items()}
    )


def birds(study: str) -> dict[str, Seeds]:
    """The accuracies of a study on drawn birds, by method and seed."""
    seeds: dict[str, Seeds] = defaultdict(dict)
    for row in runs_of("birds-runs.csv"):
        if row["study"] == study:
            seeds[row["method"]][int(row["seed"])] = float(row["top1"])
    return seeds


def variances(study: str) -> dict[str, list[list[float]]]:
    """The mean of Σ in each epoch of each run of a study on drawn birds, by method."""
    runs: dict[str, list[list[float]]] = defaultdict(list)
    for row in runs_of("birds-runs.csv"):
        if row["study"] == study and row["variance_mean"]:
            runs[row["method"]].append([float(value) for value in row["variance_mean"].split()])
    return runs


def joint(cells: dict[Cell, Seeds]) -> list[str]:
    rows: dict[str, list[str]] = defaultdict(list)
    for study in ("joint, 10 epochs", "joint, 40 epochs"):
        accuracies, means = birds(study), variances(study)
        for method, own in accuracies.items():
            ends = {seed: run[-1] for seed, run in enumerate(means.get(method, []))} or None
            rows[method] += [shown(own, 1), minus(own, accuracies["basic"], 1), shown(ends)]
    return table(rows, "drawn birds | 10 epochs | − basic | mean of Σ | 40 epochs | − basic | mean of Σ")


def p2p(cells: dict[Cell, Seeds]) -> list[str]:
    rows = {}
    for study in ("P2P-Net's recipe", "meta loss"):
        own = birds(study)
        first = next(iter(own.values()))
        rows |= {method: [shown(seeds, 1), minus(seeds, first, 1)] for method, seeds in own.items()}
    return table(rows, "P2P-Net on drawn birds | top-1 | difference")


def long_tail(cells: dict[Cell, Seeds]) -> list[str]:
    columns = ("mean of classes", "more than 10", "4 to 10", "1 to 3")
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with open(HERE / "long-tail-runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            runs[row["method"], row["variant"]].append(row)
    lines = [f"| linear probe | {' | '.join(columns)} | − basic |", "|---|---|---|---|---|---|"]
    for (method, variant), rows in runs.items():
        values = [{int(row["seed"]): 100 * float(row[name]) for row in rows} for name in columns]
        plain = {int(row["seed"]): 100 * float(row[columns[0]]) for row in runs[method, "plain"]}
        title = method if variant == "plain" else f"{method}, `{variant}`"
        difference = minus(values[0], plain, 1) if variant != "plain" else ""
        lines.append(f"| {title} | {' | '.join(shown(own, 1) for own in values)} | {difference} |")
    return lines


TABLES = {
    "README.md": (readme,),
    "docs/cost.md": (cost,),
    "docs/learning-the-covariance.md": (
        strengths,
        shares,
        shares_on_a_cpu,
        last_blocks,
        fine_tuning,
        closed_forms,
        learned_at_10,
        learned_at_40,
        mobilenet,
        covnets,
    ),
    "docs/results.md": (eight_methods,),
    "docs/reproduction.md": (claims, joint, p2p),
    "docs/how-to/linear-probe.md": (probes,),
    "docs/how-to/vision-transformers.md": (recipes,),
    "docs/how-to/long-tailed-data.md": (long_tail,),
    "benchmarks/README.md": (graphed_steps, graphed_networks),
}
"""What is computed for each page: the first cell begins a row of the page, which has the other cells in order."""


def draw(cells: dict[Cell, Seeds], file: Path) -> None:
    """Draw accuracy against the strength, with the spread over seeds."""
    labels = {"isda": "isda", "constant": "constant Σ", "learnable": "learnable, as in the paper", "basic": "basic"}
    charts = []
    for title, net in NETWORKS.items():
        series = []
        for slot, (method, label) in zip(slots(list(labels)), labels.items(), strict=True):
            own = [cells.get((net, 10, method, "" if method == "basic" else step)) for step in STRENGTHS]
            means = [None if seeds is None else fmean(seeds.values()) / 100 for seeds in own]
            spreads = [None if seeds is None else stdev(seeds.values()) / 100 for seeds in own]
            series.append(Series(label, slot, means, range(len(STRENGTHS)), () if method == "basic" else spreads))
        caption = "top-1 accuracy on validation photos, ± over seeds"
        charts.append(LineChart(title, caption, series, "strength λ0", STRENGTHS, percent=True))
    file.write_bytes(to_png(lines(charts)))


def draw_joint(file: Path) -> None:
    """Draw the mean of Σ over the epochs of joint training, with the spread over seeds."""
    charts = []
    for epochs in (10, 40):
        series = []
        for slot, (method, runs) in enumerate(variances(f"joint, {epochs} epochs").items()):
            values = [*zip(*runs, strict=True)]
            means, spreads = [fmean(own) for own in values], [stdev(own) for own in values]
            series.append(Series(method, slot, means, range(1, len(values) + 1), spreads))
        charts.append(LineChart(f"{epochs} epochs", "mean of Σ, ± over seeds", series))
    file.write_bytes(to_png(lines(charts)))


def main() -> None:
    """Print the tables, and draw the charts unless `--no-chart` is set."""
    cells = read()
    for page, tables in TABLES.items():
        print(f"## {page}", "", sep="\n")
        for table in tables:
            print(*table(cells), "", sep="\n")
    if "--no-chart" not in sys.argv:
        draw(cells, HERE / "strengths.png")
        draw_joint(HERE / "small-joint.png")


if __name__ == "__main__":
    main()
