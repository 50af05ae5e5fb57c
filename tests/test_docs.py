"""The documentation: its site is built as `make docs` does, and what it tells people to type exists."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import semaug
from semaug.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def test_the_site_needs_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        for element in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8")):
            address = re.search(r'(?:src|href)="?([^" >]*)', element)
            assert address is None or not re.match(r"https?:|//", address[1]), element


def test_formulas_are_mathml_and_names_have_their_docstrings(site: Path) -> None:
    method = (site / "method.html").read_text(encoding="utf-8")
    assert method.count("<math") > 10
    assert "arithmatex" not in method
    reference = (site / "reference.html").read_text(encoding="utf-8")
    for name in semaug.__all__:
        assert f'id="semaug.{name}"' in reference, name
    told = re.sub(r"<pre.*?</pre>", "", reference, flags=re.DOTALL)  # without the source code
    assert ":meth:" not in told
    assert "&gt;&gt;&gt;" not in told
    assert "``" not in told


def code(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_code_on_the_pages_can_be_read_and_its_names_exist() -> None:
    found = [block for page in PAGES for block in code(page)]
    assert len(found) >= 5
    for block in found:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "semaug":
                assert hasattr(semaug, node.attr), node.attr


def commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ") or line.startswith("\t")]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("semaug ")]


def options(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options that a command's help names."""
    command = words[:1] if words[0] != "data" else words[:2]
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))


def test_commands_on_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, set[str]] = {}
    found = [(page, words[1:]) for page in PAGES for words in commands(page)]
    assert len(found) > 30
    for page, words in found:
        if len(words) < 1:
            continue
        name = " ".join(words[: 2 if words[0] == "data" else 1])
        if name not in known:
            known[name] = options(words, capsys)
        for word in words:
            inner = shlex.split(word) if " " in word else [word]
            for option in (part for part in inner if part.startswith("--")):
                own = known.setdefault("train", options(["train"], capsys)) if inner != [word] else known[name]
                assert option in own, f"{page.name}: semaug {name} has no {option}"


def test_the_tables_of_the_study_are_those_of_its_runs() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "docs" / "study.py", "--no-chart"], check=True, stdout=subprocess.PIPE
    )
    page = (ROOT / "docs" / "learning-the-covariance.md").read_text(encoding="utf-8")
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    rows = [line for line in found.stdout.decode().splitlines() if line.startswith("| ")]
    assert len(rows) > 25
    for row in rows:
        title, *figures = (cell.strip() for cell in row.strip("|").split("|"))
        lines = [line[1:] for line in told if line[0] == title]
        kept = [[cell for cell in line if cell in figures and cell] for line in lines]  # the page may tell more
        assert [figure for figure in figures if figure] in kept, row
