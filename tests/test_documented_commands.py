"""Every command and every Python block in the README and the documentation.

The commands run here, page by page, in the order of the page and in a folder of small drawings: small networks stand in
for large ones, one epoch for many, two methods of a comparison for all. `NOT_RUN` lists those that cannot run, and why;
they are read completely by the real parser. A line that is no command is an error.
"""

import io
import itertools
import re
import shlex
import shutil
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from starlette.applications import Starlette
from torch import nn

import semaug
import semaug.report
from forks import Fork, run_ranks
from forks import script as run_script
from inline_workers import InlineWorker
from semaug.cli.compare import Compare, _candidate
from semaug.cli.main import COMMANDS, find_command, main
from semaug.cli.options import parse
from semaug.cli.reproduce import Reproduce
from semaug.cli.train import Train
from semaug.data.birds import Birds
from semaug.network.models import build_model
from semaug.report.serve import app
from semaug.studies import workers
from semaug.studies.presets import all_experiments
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]

NOT_RUN = {
    # beginning of the command, or text in it: why it does not run here
    "python3 -m venv ": "installs packages; `make dist-check` does so",
    ".venv/bin/pip ": "installs packages; `make dist-check` does so",
    "source ": "changes the shell",
    "make demo": "tests/studies/test_demo.py runs it with fewer birds",
    "make test": "runs this file",
    "make docs": "tests/test_docs.py builds the site",
    "make fuzz": "takes long; its tests are a part of `make test`",
    "make soak": "takes too long for a test",
    "make load": "takes too long for a test",
    "make dist-check": "installs packages",
    "pytest ": "is a part of `make test`",
    "python -m pytest ": "is a part of `make test`",
    "python tests/families.py": "tests/network/test_families.py compares the table with it",
    "python tests/rank_gpu.py": "needs a GPU",
    "python examples/": "tests/test_examples.py runs them on less data",
    "python docs/study.py": "tests/test_docs.py runs it without its charts, which are committed files",
    "python docs/last_blocks.py": "tests/test_docs.py runs it on few images",
    "python benchmarks/profile_step.py": "needs a GPU",
    "#SBATCH ": "needs Slurm",
    "head=$(scontrol ": "needs Slurm",
    "srun torchrun ": "needs Slurm",
    "torchrun --nnodes 2 ": "needs two machines; the same command runs on one",
    "torchrun --nproc-per-node 8 ": "tests/training/test_imagenet.py runs it in two processes",
    "semaug bench --frozen-blocks ": "takes seconds; `semaug bench` runs, with other options",
    "semaug bench --pixels ": "takes seconds; `semaug bench` runs, with other options",
    "semaug bench --model vit_base_patch16_224 ": "takes seconds; `semaug bench` runs, with other options",
    "semaug bench --p2p ": "takes seconds; `semaug bench` runs, with other options",
    "semaug figures neighbours CONSTANT ": "takes seconds; how-to/figures.md has it with other runs",
    "semaug figures tsne BASIC ": "takes seconds; how-to/figures.md has it with other runs",
    "semaug weights ": "downloads weights; tests/network/test_pretrained.py runs it",
    "semaug reproduce table-imagenet": "tests/training/test_imagenet.py runs it on drawings",
    "semaug reproduce table-datasets --data DIR": "takes too long; tests/studies/test_reproduce.py has a part",
    "semaug reproduce theorem": "takes too long; tests/studies/test_theorem.py has a part",
    "semaug reproduce table-covnet": "takes too long; tests/studies/test_reproduce.py has a part",
    "semaug reproduce figure-neighbours ": "takes too long; tests/studies/test_reproduce.py has a part",
    "semaug reproduce all ": "takes too long; tests/studies/test_reproduce.py has a part",
    "--meta-loss ": "has an option that was removed; the page names the commit",
}
REMOVED = ("--meta-loss ",)

# Instead of the large networks; the weights on the pages are files of these.
STAND_INS = {
    "resnet50": "small",
    "torchvision/resnet50": "small",
    "torchvision/resnet50-v1": "small",
    "torchvision/mobilenet_v2": "test_efficientnet",
    "mobilenetv2_100": "small",
    "convnext_tiny": "test_convnext",
    "vit_small_patch14_reg4_dinov2": "test_vit",
    "vit_base_patch16_224": "test_vit",
}
# What makes commands quick. These options come last, so they override those on the page.
TRAIN = "--pretrained False --resize 40 --crop 32 --batch-size 4 --epochs 1 --val-per-class 1 --workers 0 --device cpu"
BENCH = "--pixels 32 --half 2 --classes 3 --repetitions 3 --seconds 0.1 --device cpu --precision fp32"
BENCH += " --skip isda paper paper-double-backward paper-interval pipelined-interval"
QUICKER = {
    "train": f"{TRAIN} --cache cache",
    "compare": f"{TRAIN} --cache cache --seeds 0",
    "data check": "--workers 0",
    "data destruction": "--num-species 4 --per-species 2",
    "evaluate": "--device cpu",
    "soup": "--device cpu",
    "predict": "--device cpu",
    "serve": "--device cpu --port 0",
    "bench": BENCH,
    "reproduce": "--seeds 0 --epochs 1 --data photos --jobs 1",
    "benchmarks/long_tail.py": "--model test_efficientnet --epochs 1 --seeds 0",
    "benchmarks/loss_head.py": "--classes 9 --dim 8 --batch 4 --repetitions 1 --warm-up 0",
    "benchmarks/precision.py": "--data photos/train --pixels 32 --half 2 --classes 3 --warm-up 1",
    "benchmarks/input_pipeline.py": "--resize 40 --crop 32 --half 2 --steps 1 --turns 1 --cache cache",
    "benchmarks/streaming.py": "--images 8 --model small --resize 40 --crop 32 --half 2 --steps 1 --turns 1",
    "benchmarks/streaming.py --tables": "--tables 3000",
}
# Runs that a page takes for granted, by the method that they were trained with.
RUNS = dict.fromkeys(("RUN", "ISDA", "runs/isda", "runs/a", "runs/b", "runs/c"), "isda")
RUNS |= {"BASIC": "basic", "OTHER": "basic", "runs/basic": "basic", "CONSTANT": "constant"}
RUNS |= {"LEARNABLE": "learnable", "runs/learnable": "learnable", "runs/p2p": "p2p"}
IN_PYTHON = {
    "resnet50": "small",
    "resize=256, crop=224, epochs=20": "resize=40, crop=32, epochs=1, batch_size=4, cache=None",
}


def command_lines(page: Path) -> list[str]:
    """The commands of a page in their order: lines of indented blocks and of those in bash, and inline code."""
    text = page.read_text(encoding="utf-8")
    # without options of an entry of the reference, and without notes
    text = re.sub(r"^(?:::: |!!! ).*\n(?: {4}.*\n)*", "", text, flags=re.MULTILINE)
    pattern = r"^```(\w+)\n(.*?)^```|^((?: {4}[^\n]*\n)+)|(?<!`)`((?:semaug|python|make|pytest) [^`]+)`(?!`)"
    commands = []
    for language, fenced, indented, inline in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
        if inline:
            command = " ".join(inline.split()).removesuffix(" …")
            commands += [] if is_name(command) else [command]
        elif indented or language == "bash":
            lines = (indented or fenced).replace("\\\n", " ").splitlines()
            commands += [line.strip() for line in lines if line.strip()]
    return commands


def is_name(code: str) -> bool:
    """Whether inline code is the name of a command or an option, as `semaug train`, rather than an example."""
    words = code.split()
    names = words[0] == "semaug" and (len(words) == 2 or words[1:] in (["data", "check"], ["figures", "parts"]))
    return names or words[-1] in ("--help", "--config", "--track") or "COMMAND" in words


def reason_not_to_run(line: str) -> str | None:
    return next(
        (why for text, why in NOT_RUN.items() if line.startswith(text) or (text in REMOVED and text in line)), None
    )


def split_semaug(line: str) -> tuple[str, list[str], str | None]:
    """What comes before `semaug` in a line, the words after it, and the file that its output goes to."""
    before, _, command = line.partition("semaug ")
    words = shlex.split(command, comments=True)
    target = words[-1] if ">" in words else None
    return before, words[: words.index(">")] if target else words, target


def photo(file: Path, image: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(file)


def few(words: list[str]) -> list[str]:
    """Options that train two methods of a comparison, with one strength, after a check of the others."""

    def values(option: str) -> list[str]:
        after = words[words.index(option) + 1 :] if option in words else []
        return list(itertools.takewhile(lambda word: not word.startswith("--"), after))

    methods = values("--method")
    for method in methods[2:]:
        _candidate(method).check()
    return ["--method", *methods[:2], "--strength", *(values("--strength")[:1] or ["auto"])]


class Reader:
    """Somebody who reads a page and types its commands in a folder."""

    def __init__(self, page: Path, folder: Path, shared: Path) -> None:
        self.page, self.folder, self.shared = page, folder, shared
        self.served: list[str] = []  # commands for a running server
        for split, count in (("train", 8), ("test", 2)):
            birds = Birds(3, count, split, 40)
            for i, label in enumerate(birds.labels):
                drawing, name = birds.drawing(i).image, birds.classes[label]
                photo(folder / "photos" / split / name / f"{i}.jpg", drawing)
                photo(
                    folder / "data" / "imagenet" / split.replace("test", "val") / f"n{label:08d}" / f"{i}.jpg", drawing
                )
                photo(folder / "animals" / name / f"individual-{i // 2}" / f"{split}-{i}.jpg", drawing)
                if split == "test" and label == 0:
                    photo(folder / "new-photos" / f"{i + 1}.jpg", drawing)
        for name in ("cub300", "cars256", "CUB", "DATA"):
            (folder / name).symlink_to("photos")
        for name in ("photo.jpg", "first.jpg"):
            shutil.copy(folder / "new-photos" / "1.jpg", folder / name)
        (folder / "second.png").write_text("not an image")
        rows = [
            f"{file.relative_to(folder)},{file.parents[1].name},{file.parent.name}"
            for file in folder.glob("animals/*/*/*")
        ]
        (folder / "table.csv").write_text("\n".join(["path,label,sequence", *rows]))
        (folder / "docs" / "results").mkdir(parents=True)
        small, efficientnet = build_model("small", 3, 32), timm.create_model("test_efficientnet", num_classes=3)
        for name in ("resnet50", "resnet50-keras-v1"):
            save_file(small.state_dict(), folder / f"{name}.safetensors")
        save_file(efficientnet.state_dict(), folder / "mobilenet_v2.safetensors")

    def run(self, line: str) -> None:
        """Run a command; an exit code other than 0 is an error."""
        if line.startswith("curl "):
            assert line in self.served, f"no server: {line}"
        elif line.removeprefix("OMP_NUM_THREADS=1 ").startswith("python "):
            self.run_script(*shlex.split(line.partition("python ")[2], comments=True))
        else:
            before, words, target = split_semaug(line)
            words = self.quicker(words)
            if words[0] == "export" and "ONNX" not in line:  # it takes seconds; one page describes it
                words += ["--no-onnx"]
            if before.startswith("torchrun "):
                run_ranks(2, self.folder / "ranks", main, words)
                return
            with pytest.MonkeyPatch.context() as patch:
                if words[0] == "train" and self.page != README:  # one report is enough
                    patch.setattr(semaug.report, "write_report", lambda runs, file: file.touch())
                if before.endswith("| "):
                    piped = subprocess.run(before[:-2], shell=True, check=True, capture_output=True).stdout
                    patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(piped)))
                output = io.StringIO()
                with redirect_stdout(output):
                    assert main(words) == 0, words
            if target is not None:
                Path(target).write_text(output.getvalue())

    def quicker(self, words: list[str]) -> list[str]:
        """The command on drawings and small networks, after the runs that it takes for granted."""
        name = " ".join(words[: 2 if words[0] == "data" else 1])
        options = shlex.split(QUICKER.get(name, ""))
        if words[0] == "train":  # so that the run has the name that it would have with the network on the page
            options += ["--output", str(parse(Train, "semaug train", Train.expand(words[1:])).resolve().output)]
        if "--near-duplicates" in words and "resnet50" in words:
            options += ["--weights", "resnet50.safetensors"]  # instead of downloaded ones
        if words[0] in ("train", "compare", "bench") and not {"--model", "--config"} & {*words}:
            options += ["--model", "small"]
        if (words[0] == "train" and not {"--data", "--config"} & {*words}) or "birds" in words:
            options += ["--data", "photos"]  # instead of the embedded birds, which are more
        if words[0] == "reproduce" and len(words) == 1:
            options = []
        if words[0] == "compare":
            options += few(words)
        if "--reject" in words:
            options += ["--reject", "0.9"]  # of three validation images
        if "exported/" in words[1:2] and not Path("exported").exists():
            self.run("semaug export RUN exported/")
        for i, word in enumerate(words):
            run = RUNS.get(word.rpartition("=")[2])
            if run is not None and not (self.folder / word.rpartition("=")[2]).exists():
                self.copy_run(run, self.folder / word.rpartition("=")[2])
            model, equals, value = word.partition("=")
            words[i] = STAND_INS.get(model, model) + equals + value
        line = re.sub(r"(--frozen-blocks |=)10(?= |$)", r"\g<1>1", shlex.join(words))  # of three blocks
        return [*shlex.split(line), *options]

    def copy_run(self, method: str, folder: Path) -> None:
        """Put a run there, which is trained once for all pages."""
        trained = self.shared / method
        if not trained.exists():
            words = f"--data {self.folder / 'photos'} --model test_resnet --method {method} --strength 10"
            words += f" {QUICKER['train']} --epochs 2 --output {trained}"
            train(parse(TrainConfig, "semaug train", shlex.split(words)))
        shutil.copytree(trained, folder)

    def run_script(self, script: str, *options: str) -> None:
        name = f"{script} --tables" if "--tables" in options else script
        words = [STAND_INS.get(option, option) for option in options]
        words += shlex.split(QUICKER.get(name, ""))
        log = self.folder / f"{Path(script).stem}.log"  # in a fork: scripts set threads and precision for the process
        code, said = Fork(log, run_script, str(self.folder), str(ROOT / script), *words).wait()
        assert code == 0, said

    def serve(self, application: Starlette, listening: Any) -> None:
        """Stands in for a server that runs until Ctrl-C: one that runs until the commands of the page are answered."""
        server = app._server(application)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            for line in self.served or ["curl http://127.0.0.1:8000/health"]:
                line = line.replace("http://127.0.0.1:8000/", app.address(listening)).replace("curl ", "curl -sSf ", 1)
                answer = subprocess.run(shlex.split(line), check=True, capture_output=True).stdout
                assert answer.startswith(b"{"), line
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """The folder after the commands of the README."""
    return follow(README, tmp_path_factory.mktemp("reader"), shared)


def follow(page: Path, folder: Path, shared: Path) -> Path:
    """Run the commands of a page in a new folder."""
    reader = Reader(page, folder, shared)
    lines = list(substituted(page))
    reader.served = [line for line in lines if line.startswith("curl ")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(workers, "_Worker", InlineWorker)
        patch.setattr(app, "run", reader.serve)
        for line in lines:
            if reason_not_to_run(line) is None:
                reader.run(line)
            else:
                read(line)
    return folder


def substituted(page: Path) -> Iterator[str]:
    """The commands of a page; those that set a variable are left out, and its value is put where it is used."""
    variables: dict[str, str] = {}
    for line in command_lines(page):
        assignment = re.fullmatch(r'([A-Z0-9]+)="(.*)"', line)
        if assignment:
            variables[assignment[1]] = assignment[2]
        else:
            yield string.Template(line).safe_substitute(variables)


def read(line: str) -> None:
    """Check a command that is not run, as far as that is possible."""
    if line.startswith("make "):
        words = ["make", "--dry-run", *shlex.split(line, comments=True)[1:]]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif line.startswith("python ") and not line.startswith("python -m "):
        _, script, *options = shlex.split(line, comments=True)
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(option in text for option in options if option.startswith("--")), line
    elif re.match(r"(.*-m )?semaug ", line) and not any(text in line for text in REMOVED):
        _, (name, *options), _ = split_semaug(line)
        assert name in COMMANDS, line
        command = parse(find_command(name), f"semaug {name}", options)
        if isinstance(command, Train):
            command.resolve()
        elif isinstance(command, Reproduce):
            assert {*command.names} <= {*all_experiments(), "all"}, line
        else:
            assert not isinstance(command, Compare), "it can be run"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, shared: Path) -> None:
    follow(page, tmp_path, shared)


def test_the_commands_of_the_readme_lead_to_an_answer(trained: Path) -> None:
    answers = (trained / "answers.csv").read_text().splitlines()
    assert answers[0].startswith("path,label,probability")
    assert len(answers) == 1 + len(list((trained / "new-photos").iterdir()))
    assert (trained / "runs" / "photos-resnet50-isda-0" / "report.html").exists()


def test_no_reason_is_out_of_date() -> None:
    lines = [line for page in PAGES for line in substituted(page)]
    for text, why in NOT_RUN.items():
        assert any(reason_not_to_run(line) == why and text in line for line in lines), text
        for file in re.findall(r"tests/\S+\.py", why):
            assert (ROOT / file).is_file(), file


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
