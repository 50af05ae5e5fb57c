"""Classes and files whose names are scripts: in Chromium they stay text, on every page."""

import base64
import csv
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from browser import CHROMIUM, POLICY, browse
from semaug.data.birds import Birds
from semaug.report import figures, write_report
from semaug.studies import page as reproduction
from semaug.studies.presets import all_experiments
from semaug.studies.results import Section, collect
from semaug.studies.scales import Setup
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

MARK = "document.documentElement.dataset.owned=1"
CLASSES = (
    f"<script>{MARK}</script>",
    f'"><img src=x onerror="{MARK}">',
    f"' onmouseover='{MARK}' x='",
    f'" onmouseover="{MARK}" x="',
    f"</style></title></script><script>{MARK}</script>",
    f"]]><svg onload={MARK}>",
)
FILE = f"\"'><img src=x onerror={MARK}> {{{{ 7 * 7 }}}} {{}}.png"

PROBE = """<script>addEventListener("load", () => {
  for (const element of document.querySelectorAll("body *"))
    for (const [kind, event] of [["mouseover", MouseEvent], ["pointerenter", PointerEvent], ["focus", FocusEvent]])
      element.dispatchEvent(new event(kind, { bubbles: true }));
})</script></body>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real runs on a table of images, of which class names and files are hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = ["path\tlabel\tsplit"]
    for split, count in (("train", 5), ("test", 3)):
        drawn = Birds(len(CLASSES), count, split, 40)
        for i, label in enumerate(drawn.labels):
            name = f"{split}{i}{FILE}"
            Image.fromarray(drawn.drawing(i).image).save(folder / name)
            cells = (name, CLASSES[int(label)], split)
            rows.append("\t".join('"' + cell.replace('"', '""') + '"' for cell in cells))
    (folder / "<b>set.tsv").write_text("\n".join(rows))
    settings: dict[str, Any] = {
        "data": str(folder / "<b>set.tsv"), "model": "small", "pretrained": False, "epochs": 2, "resize": 40,
        "crop": 32, "batch_size": 8, "workers": 0, "cache": None, "val_per_class": 1,
        "augmentation": Augmentation(10.0),
    }  # fmt: skip
    methods: tuple[Any, ...] = ("basic", "learnable", "p2p")
    return {m: train(TrainConfig(method=m, output=folder / f"<i>{m}", **settings)) for m in methods}


@pytest.fixture(scope="module")
def drawn(runs: dict[str, Path]) -> list[figures.Figure]:
    both = {f"<u>{method}": runs[method] for method in ("basic", "learnable")}
    return [
        figures.tsne(both),
        figures.augmentations(both, copies=1),
        figures.neighbours({"<u>": runs["learnable"]}, queries=4, count=2),
        figures.diagnostics({"<u>learnable": runs["learnable"]}),
        figures.confusions(runs["basic"], pairs=6),
        figures.parts(runs["p2p"], images=2),
    ]


def shown(page: Path, profile: Path) -> tuple[str, str]:
    """The page after its scripts have run, and what it wrote to the console."""
    return browse(page, profile, "--dump-dom")


def owned(html: str) -> bool:
    return re.search(r"<(html|svg)[^>]* data-owned=", html) is not None


def stays_text(html: str, folder: Path, expected: int) -> None:
    """The page runs no script of a name, nor when pointed at without the policy that forbids all scripts."""
    (folder / "page.html").write_text(html)
    seen, console = shown(folder / "page.html", folder / "profile")
    assert console == ""
    assert not owned(seen)
    assert seen.count("&lt;script&gt;") >= expected
    free = POLICY.sub("", html)
    assert free != html
    (folder / "free.html").write_text(free.replace("</body>", PROBE))
    seen, _ = shown(folder / "free.html", folder / "profile")
    assert not owned(seen)


def test_a_name_that_is_not_escaped_would_be_noticed(tmp_path: Path) -> None:
    for name in CLASSES:
        page = f"<!doctype html><html><body><p title=\"{name}\" class='{name}'>{name}</p>{PROBE}</html>"
        (tmp_path / "page.html").write_text(page)
        assert owned(shown(tmp_path / "page.html", tmp_path / "profile")[0]), name


def test_the_report_of_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    write_report(list(runs.values()), tmp_path / "report.html")
    stays_text((tmp_path / "report.html").read_text(), tmp_path, expected=5)


def test_figures(drawn: list[figures.Figure], tmp_path: Path) -> None:
    stays_text(figures.page(drawn, f"<b>{CLASSES[0]}"), tmp_path, expected=5)


def test_figures_as_svg(drawn: list[figures.Figure], tmp_path: Path) -> None:
    vector = [figure for figure in drawn if figure.svg is not None]
    assert len(vector) >= 2
    for figure in vector:
        (tmp_path / "figure.svg").write_text(str(figure.svg))
        assert not owned(shown(tmp_path / "figure.svg", tmp_path / "profile")[0])


def test_the_page_of_a_reproduction(drawn: list[figures.Figure], tmp_path: Path) -> None:
    setup = Setup("small", tmp_path, tmp_path)
    pictures = [
        {
            "title": figure.title,
            "caption": figure.caption,
            "html": figure.html,
            "png": f"data:image/png;base64,{base64.b64encode(figure.png).decode()}",
        }
        for figure in drawn
    ]
    preset = all_experiments()["figure-tsne"]
    extra = {"pictures": pictures, "lines": [CLASSES[1]]}
    section = Section(setup, preset, collect(preset, setup, {}), [CLASSES[0]], extra, CLASSES[2])
    stays_text(reproduction.render([section], [CLASSES[4]]), tmp_path, expected=5)


def test_the_table_of_metrics_holds_numbers_alone(runs: dict[str, Path]) -> None:
    with open(runs["learnable"] / "metrics.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert all(name.isidentifier() for name in header)
    assert len(rows) == 2
    assert all(cell == "" or isinstance(float(cell), float) for row in rows for cell in row)
