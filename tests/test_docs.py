"""The documentation: the site builds, and the commands, names, files and tables on the pages are right."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

import semaug
from photos import photo_folder
from semaug.training.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
STUDY = ROOT / "docs" / "learning-the-covariance.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all tests; `--strict` turns every warning into an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def reference(site: Path) -> str:
    return (site / "reference.html").read_text(encoding="utf-8")


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        for element in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8")):
            address = re.search(r'(?:src|href)="?([^" >]*)', element)
            assert address is None or not re.match(r"https?:|//", address[1]), element


def test_formulas_become_mathml(site: Path) -> None:
    method = (site / "method.html").read_text(encoding="utf-8")
    assert method.count("<math") > 10
    assert "arithmatex" not in method


def test_docstrings_become_markdown(reference: str) -> None:
    text = re.sub(r"<pre.*?</pre>", "", reference, flags=re.DOTALL)  # without code
    assert not re.search(r":(class|func|meth|mod|data):", text)
    assert "&gt;&gt;&gt;" not in text
    assert "``" not in text
    assert not re.search(r"<p>\s*(Args|Returns|Raises|Examples?):", text)  # a section that was not recognised


def test_reference_lists_every_public_name_with_its_arguments(reference: str) -> None:
    for name in semaug.__all__:
        entry = reference.split(f'<h3 id="semaug.{name}"')[1].split('<h3 id="')[0]
        parameters = inspect.signature(getattr(semaug, name)).parameters.values()
        arguments = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if arguments:
            table = entry.split("Parameters:")[1].split("</table>")[0]
            documented = re.findall(r"<tr[^>]*>\s*<td>\s*<code>(\w+)</code>", table)
            assert documented == (arguments if name != "JointAugmentation" else ["model"]), name


def test_reference_lists_every_method() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (`[^|]*`) \| (.*) \|$", page, re.MULTILINE))
    assert [name for cell in rows for name in re.findall(r"`([^`]+)`", cell) if not name.startswith("--")] == [*METHODS]
    for name, method in METHODS.items():
        if method.composite is None:
            assert rows[f"`{name}`"] == method.summary


def test_the_study_names_the_commit_of_its_commands() -> None:
    page = STUDY.read_text(encoding="utf-8")
    assert re.search(r"They need\s+commit [0-9a-f]{40}", page)


def test_files_and_tests_on_the_pages_exist() -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    functions = set(re.findall(r"^(?:async )?def (test_\w+)", tests, re.MULTILINE))
    places = [ROOT / place for place in ("", "src", "src/semaug", "tests", "docs", "benchmarks")]
    missing = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]:
        for name in re.findall(r"`([\w./-]+)`", page.read_text(encoding="utf-8")):
            if re.fullmatch(r"test_\w{20,}", name):
                known = name in functions
            elif re.fullmatch(r"[\w./-]+\.py|\w+/[\w./-]+\.md", name) and "NAME" not in name:
                known = any((place / name).is_file() for place in places)
            else:
                continue
            missing += [] if known else [f"{page.name}: {name}"]
    assert not missing


def table_rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_figures_on_the_pages_are_computed_from_the_committed_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", "--no-chart"])
    runpy.run_path(str(ROOT / "docs" / "study.py"), run_name="__main__")
    pages = dict(part.split("\n", 1) for part in capsys.readouterr().out.split("## ")[1:])
    assert len(pages) >= 6
    for page, printed in pages.items():
        on_page = table_rows(ROOT / page)
        for row in (line for line in printed.splitlines() if line.startswith("| ")):
            title, *cells = (cell.strip() for cell in row.strip("|").split("|"))
            figures = r".*".join(rf"(?<![\d.+−]){re.escape(cell)}(?!\d)" for cell in cells if cell)
            same = [" | ".join(line[1:]) for line in on_page if line[0].startswith(title)]  # or with more columns
            assert any(re.search(figures, line) for line in same), f"{page}: {row}"


def test_the_last_blocks_are_fine_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, weights = photo_folder(tmp_path, train=8) / "train", tmp_path / "weights.safetensors"
    torch.manual_seed(0)
    save_file(torchvision.models.mobilenet_v2().state_dict(), weights)
    script = (ROOT / "docs" / "last_blocks.py").read_text()
    script = re.sub("EPOCHS, BATCH, RATE, DECAY = 10, 64", "EPOCHS, BATCH, RATE, DECAY = 2, 2", script)
    (tmp_path / "quick.py").write_text(script)
    monkeypatch.setattr(sys, "argv", ["quick.py", str(photos), str(weights), "0", "basic", "5", "auto 0.3"])
    runpy.run_path(str(tmp_path / "quick.py"), run_name="__main__")
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [row[2] for row in rows] == ["basic", "5", "auto 0.3"]
    basic, fixed, _ = ([float(value) for value in row[3:]] for row in rows)
    assert basic[-1] == 0
    assert fixed[-1] == pytest.approx(5 * 5 / 6, abs=1e-3)  # λ of the last of six steps
    assert all(0 <= accuracy <= 100 for accuracy in (*basic[:3], *fixed[:3]))


def test_every_table_of_measurements_has_a_known_origin() -> None:
    """A new table is either computed from committed files by a script that a test runs, or it is listed here."""
    computed = {"| top-1 %", "| learnable with", "| λ0", "| λ0 = 40", "| MobileNetV2", "| method | ResNet-50 | − basic"}
    computed |= {"| | bytes", "| 64 + 64 images a GPU", "| 1024 images in all", "| | operations", "| | numbers"}
    computed |= {
        "| recipe",
        "| head on fixed features",
        "| a step, 64 GPUs",
        "| the paper says",
        "| drawn birds",
        "| P2P-Net on drawn birds",
        "| share |",
        "| Σ, automatic strength",
        "| seed 0 |",
        "| share, without a GPU",
        "| ResNet-50 | birds | auto is above it by",
        "| method | 224 px | GB",
    }
    computed |= {"| recipe", "| head on fixed features", "| linear probe"}
    # Printed by the commands beside them; docs/results.md lists those whose runs were not kept.
    only_on_the_page = {
        "| method | ResNet-50, best",
        "| phase | sentence after",
        "| what | time",
    }
    for page in PAGES[:-1]:
        for header, body in re.findall(
            r"^(\|.*)\n\|[-|: ]+\|\n((?:\|.*\n?)*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            if len(re.findall(r"\d\.\d", body)) > 3:
                known = [start for start in computed | only_on_the_page if header.startswith(start)]
                assert known, f"{page.name}: where do the figures of this table come from? {header}"
