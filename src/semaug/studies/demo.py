"""The demonstration: training on the embedded birds."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from semaug.inference.runs import read_metrics
from semaug.report import write_report
from semaug.studies.grid import Candidate
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.files import refuse_edited
from semaug.util.untrusted import read_json


def demo(output: Path, methods: Sequence[str], epochs: int = 30, seed: int = 0) -> tuple[Table, list[str]]:
    """Train with each method, and write one report about all of them.

    Args:
        output: Folder of the runs and of report.html.
        methods: Names of the methods.
        epochs: Epochs of each run.
        seed: Seed of all random numbers.

    Returns:
        A table for the terminal, and lines to print below it.

    Raises:
        SettingError: A method is unknown.
        FileError: The report would replace a page that was edited, or a file of another kind.
    """
    for method in methods:
        Candidate(method).check()
    refuse_edited(output / "report.html")  # before minutes of training
    table = Table("method", "top-1 %", "± s.e.", "mean per class %", "calibration error", "s per epoch")
    folders, count = [], 0
    for method in methods:
        settings = Augmentation(order="pipelined", frozen_blocks=0)
        config = TrainConfig(method=method, epochs=epochs, seed=seed, output=output / method, augmentation=settings)
        folders.append(train(config))
        result, metrics = read_json(folders[-1] / "evaluation.json"), read_metrics(folders[-1])
        top1, count = result["top1"], result["count"]
        table.add_row(
            method,
            f"{100 * top1:.1f}",
            f"{100 * (top1 * (1 - top1) / count) ** 0.5:.1f}",
            f"{100 * result['mean_class_accuracy']:.1f}",
            f"{result['calibration_error']:.3f}",
            f"{sum(row['seconds'] for row in metrics) / len(metrics):.1f}",
        )
    write_report(folders, output / "report.html")
    return table, [
        "Guessing among 20 species would give 5 %. "
        f"One seed on {count} test images: a difference below {100 * (2 / count) ** 0.5:.0f} points may be chance.",
        f"{output / 'report.html'} has the curves, the confused species and pictures. What to try next:",
        f"  semaug figures confusions {folders[-1]}",
        f"  semaug serve {folders[-1]}",
    ]
