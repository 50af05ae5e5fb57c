"""Every command and every Python block in the README and the documentation.

The commands of the README run here, one after the other, on a folder of small drawings. All others are read completely
by the real parser, and those that train on `photos` make a dry run. A line that is neither is an error.
"""

import io
import os
import re
import shlex
import string
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import semaug
from photos import photo_folder
from semaug.cli.compare import Compare
from semaug.cli.main import COMMANDS, find_command, main
from semaug.cli.options import parse
from semaug.cli.reproduce import Reproduce
from semaug.cli.train import Train
from semaug.studies.presets import all_experiments

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
STUDY = ROOT / "docs" / "learning-the-covariance.md"
REMOVED_OPTIONS = {"--source", "--rank", "--meta-objective", "--meta-images"}  # the study's page keeps its old commands

# What makes the documented commands quick. These options come last, so they override those on the page.
SMALL = "--model small --pretrained False --resize 40 --crop 32 --batch-size 4 --epochs 1 --val-per-class 2 --workers 0"
QUICKER = {
    "train": f"{SMALL} --cache None --device cpu --output runs/photos-resnet50-isda-0",
    "data": "--workers 0",
    "evaluate": "--device cpu",
    "predict": "--device cpu",
}
IN_PYTHON = {
    "resnet50": "small",
    "resize=256, crop=224, epochs=20": "resize=40, crop=32, epochs=1, batch_size=4, cache=None",
}
# Without a prefix: the first words of lines that install or prepare something and cannot run in a test.
INSTALLATION = ("python3 -m venv ", ".venv/bin/pip install ", "source ", "#SBATCH ", "head=$(scontrol ")


def command_lines(page: Path) -> list[str]:
    """The lines of all indented blocks and of those marked as bash or console, with continued lines joined."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    # without options of an entry of the reference, and without notes
    text = re.sub(r"^(?:::: |!!! ).*\n(?: {4}.*\n)*", "", text, flags=re.MULTILINE)
    lines += re.findall(r"^(?: {4}.*\n)+", text, re.MULTILINE)
    joined = "\n".join(lines).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


def semaug_words(line: str) -> list[str] | None:
    """The words after `semaug` in a line of a shell, up to a pipe or redirection; None if it does not call semaug."""
    words = shlex.split(line, comments=True)
    for start in (("semaug",), ("-m", "semaug")):
        for i in range(len(words)):
            if tuple(words[i : i + len(start)]) == start:
                words = words[i + len(start) :]
                end = next((i for i, word in enumerate(words) if word in (">", "|")), len(words))
                return words[:end]
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a reader of the pages would be: photos, new photos and a file of settings."""
    folder = tmp_path_factory.mktemp("reader")
    photo_folder(folder / "photos")
    (folder / "new-photos").symlink_to(sorted((folder / "photos" / "test").iterdir())[0])
    for i, photo in enumerate(sorted((folder / "new-photos").iterdir())[:2], 1):
        photo.rename(photo.with_name(f"{i}.jpg"))
    (folder / "settings.yaml").write_text("data: photos\n")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_can_be_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    variables: dict[str, str] = {}
    for line in command_lines(page):
        assignment = re.fullmatch(r'([A-Z0-9]+)="(.*)"', line)
        if assignment:
            variables[assignment[1]] = assignment[2]
            continue
        line = string.Template(line).safe_substitute(variables)
        words = semaug_words(line)
        if page == STUDY and any(option in line for option in REMOVED_OPTIONS):
            continue
        if words is not None:
            try:
                check(words)
            except SystemExit:
                pytest.fail(f"{page.name}: {line}")
        elif line.startswith("make "):
            subprocess.run(
                ["make", "--dry-run", *shlex.split(line, comments=True)[1:]],
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        elif line.startswith("python "):
            _, script, *options = shlex.split(line, comments=True)
            text = (ROOT / script).read_text(encoding="utf-8")
            assert all(option in text for option in options if option.startswith("--")), f"{page.name}: {line}"
        else:
            assert line.startswith(INSTALLATION), f"{page.name}: is this a command? {line}"


def check(words: list[str]) -> None:
    """Read a command as the command line would, and what its options themselves consist of."""
    name, *options = words
    if name.startswith("-"):
        return
    assert name in COMMANDS, name
    kind = find_command(name)
    command = parse(kind, f"semaug {name}", kind.expand(options))
    if isinstance(command, Compare):
        for candidate in command.config().method:
            candidate.check()
    elif isinstance(command, Reproduce):
        assert set(command.names) <= {*all_experiments(), "all", "list"}
    elif isinstance(command, Train):
        command.resolve()
        if command.data == "photos" and not {"--weights", "--freeze"} & {*options}:
            with redirect_stdout(io.StringIO()):
                assert main(["train", *options, *shlex.split(QUICKER["train"]), "--dry-run"]) == 0, words


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder after the commands of the README's section about photos."""
    [section] = re.findall(
        r"^## From a folder.*?^## ", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    before = Path.cwd()
    os.chdir(folder)
    try:
        for line in (line for line in section.splitlines() if line.startswith("    semaug")):
            words = semaug_words(line)
            assert words is not None
            assert main([*words, *shlex.split(QUICKER.get(words[0], ""))]) == 0, line
    finally:
        os.chdir(before)
    return folder


def test_the_commands_of_the_readme_lead_to_an_answer(trained: Path) -> None:
    answers = (trained / "answers.csv").read_text().splitlines()
    assert answers[0].startswith("path,label,probability")
    assert len(answers) == 1 + len(list((trained / "new-photos").iterdir()))
    assert (trained / "runs" / "photos-resnet50-isda-0" / "report.html").exists()


def python_blocks() -> list[Any]:
    return [
        pytest.param(page, block, id=f"{page.stem}-{i}")
        for page in PAGES
        for i, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        )
        if "distributed.initialize" not in block  # needs torchrun
    ]


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_python_blocks_run(page: Path, block: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names that the text around them takes for granted."""
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "argv", ["page"])
    for text, quicker in IN_PYTHON.items():
        block = block.replace(text, quicker) if "train(" in block else block
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.tensor([0, 1, 2, 0])
    names = {
        "semaug": semaug,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "loader": [(torch.randn(4, 3, 2, 2), labels)],
        "scheduler": SimpleNamespace(step=lambda: None),
        "epochs": 1,
        "step": 1,
        "steps": 2,
        "images": torch.randn(4, 3, 2, 2),
        "labels": labels,
        "features": torch.randn(4, 2048, requires_grad=True),
        "backbone": lambda images: torch.randn(4, 2048, requires_grad=True),
        "head": nn.Linear(2048, 200),
    }
    exec(compile(block, page.name, "exec"), names)
