"""`semaug export`: write a trained model for use elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from semaug.cli.common import Command, say, show


@dataclass(frozen=True)
class Export(Command):
    """Write a trained model for use elsewhere: safetensors, ONNX (checked against PyTorch) and a model card."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write."""
    onnx: bool = True
    """Write ONNX too. Needs pip install '.[onnx]'."""
    hub: bool = False
    """Write a folder that timm.create_model("local-dir:FOLDER", pretrained=True) loads too, and that can be uploaded to
    a model hub. For networks of timm."""

    def run(self) -> None:
        from semaug.inference.classifier import load_classifier
        from semaug.inference.exporting import export
        from semaug.inference.runs import read_evaluation

        evaluation = read_evaluation(self.model)
        report = export(load_classifier(self.model), self.folder, self.onnx, hub=self.hub, evaluation=evaluation)
        for file in report.files:
            show(file)
        if report.onnx_difference is not None:
            say(f"ONNX and PyTorch differ by at most {report.onnx_difference:.1e}")
        if report.hub_difference is not None:
            say(f"timm loads it with logits that differ by at most {report.hub_difference:.1e}")
