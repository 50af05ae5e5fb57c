"""The demonstration: three methods on the embedded birds, side by side."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from semaug.inference.runs import read_metrics
from semaug.report import write_report
from semaug.training.methods import METHODS, Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SemaugError
from semaug.util.files import read_json


def demo(output: Path, methods: Sequence[str], epochs: int, seed: int) -> None:
    """Train by each method, print the comparison, and write one report."""
    for method in methods:
        if method not in METHODS:
            raise SemaugError(f"unknown method {method!r}; the methods are {', '.join(METHODS)}")
    folders = []
    for method in methods:
        config = TrainConfig(
            method=method,
            epochs=epochs,
            seed=seed,
            output=output / method,
            augmentation=Augmentation(order="pipelined"),
        )
        folders.append(train(config))

    table = Table("method", "top-1 %", "± s.e.", "mean per class %", "calibration error", "s per epoch")
    for method, folder in zip(methods, folders, strict=True):
        result = read_json(folder / "evaluation.json")
        rows = read_metrics(folder)
        top1, count = result["top1"], result["count"]
        table.add_row(
            method,
            f"{100 * top1:.1f}",
            f"{100 * (top1 * (1 - top1) / count) ** 0.5:.1f}",
            f"{100 * result['mean_class_accuracy']:.1f}",
            f"{result['calibration_error']:.3f}",
            f"{sum(row['seconds'] for row in rows) / len(rows):.1f}",
        )
    report = output / "report.html"
    write_report(folders, report)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"One seed on {result['count']} test images: differences of a few standard errors are chance.\n"
        f"Curves and pictures: {report}",
        markup=False,
        soft_wrap=True,
    )
