"""The interactive pages in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semaug.report import figures

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
Runs = dict[str, Path]

PROBE = """<script>addEventListener("load", () => {
  const root = document.querySelector(".semaug-figure"), tip = root.querySelector(".tip");
  const points = [...root.querySelectorAll(".cloud")].map(cloud => [...cloud.querySelectorAll(".point")]);
  const state = () => ({
    shown: !tip.hidden && tip.getBoundingClientRect().height > 60, name: tip.querySelector("b").textContent,
    hint: tip.querySelector("span").textContent, on: root.querySelectorAll(".point.on").length,
    picture: getComputedStyle(tip.querySelector(".picture")).backgroundImage.slice(0, 22),
    place: getComputedStyle(tip.querySelector(".picture")).backgroundPosition,
    inside: tip.getBoundingClientRect().right <= innerWidth + 1 && tip.getBoundingClientRect().left >= 0,
  });
  const result = { before: state() };
  const point = points[0][7], box = point.getBoundingClientRect();
  result.expected = point.dataset.name;
  result.hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2).closest(".point") !== null;
  point.dispatchEvent(new PointerEvent("pointerenter", { pointerType: "mouse" }));
  result.hover = state();
  point.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
  result.left = state();
  points[0][0].focus();
  result.focus = state();
  points[0][0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  result.arrow = { ...state(), active: document.activeElement === points[0][1] };
  document.activeElement.blur();
  points[1][3].dispatchEvent(new PointerEvent("pointerenter", { pointerType: "touch" }));
  points[1][3].dispatchEvent(new MouseEvent("click", { bubbles: true }));
  points[1][3].dispatchEvent(new PointerEvent("pointerleave", { pointerType: "touch" }));
  result.tap = state();
  root.querySelector(".key li").dispatchEvent(new PointerEvent("pointerenter"));
  result.kin = root.querySelectorAll(".cloud.dimmed .point.kin").length;
  result.width = document.documentElement.scrollWidth <= innerWidth;
  document.title = JSON.stringify(result);
})</script></body>"""


def browse(page: Path, profile: Path, *options: str) -> tuple[str, str]:
    """Open a page in headless Chromium; returns what it writes to standard output, and to the console."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr", "--v=0", *options, page.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return result.stdout, "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.parametrize("width", [1200, 500])
def test_a_point_shows_its_image_when_pointed_at_focused_or_tapped(runs: Runs, tmp_path: Path, width: int) -> None:
    figure = figures.tsne({label: runs[label] for label in ("basic", "learnable")})
    figures.write(figure, tmp_path)
    page = (tmp_path / "tsne.html").read_text()
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", PROBE)
    (tmp_path / "probed.html").write_text(page)
    html, console = browse(tmp_path / "probed.html", tmp_path / "profile", "--dump-dom", f"--window-size={width},900")
    assert console == ""
    title = re.search(r"<title>(.*?)</title>", html)
    assert title is not None
    found = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["hit"]
    assert not found["before"]["shown"]
    assert found["hover"]["shown"]
    assert found["hover"]["name"] == found["expected"]
    assert found["hover"]["on"] == 2  # the same image in both panels
    assert found["hover"]["picture"] == 'url("data:image/jpeg;b'
    assert not found["left"]["shown"]
    assert found["left"]["on"] == 0
    assert found["focus"]["shown"]
    assert found["arrow"]["active"]
    assert found["arrow"]["place"] != found["focus"]["place"]
    assert found["tap"]["shown"]
    assert all(found[way]["inside"] for way in ("hover", "focus", "tap"))
    assert found["kin"] == 10  # five images in each of two panels
    assert found["width"]


def test_pages_open_from_disk_without_errors_in_light_and_dark(runs: Runs, tmp_path: Path) -> None:
    made = [
        figures.tsne({"basic": runs["basic"]}),
        figures.augmentations(runs["isda"]),
        figures.neighbours({"isda": runs["isda"]}, queries=1),
        figures.diagnostics({"isda": runs["isda"]}),
        figures.confusions(runs["basic"], pairs=2),
        figures.destruction_chart(4, 2),
    ]
    (tmp_path / "all.html").write_text(figures.page(made, "All figures"))
    brightness = {}
    for mode, options in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        shot = ("--hide-scrollbars", "--window-size=1200,1500", f"--screenshot={tmp_path / mode}.png")
        _, console = browse(tmp_path / "all.html", tmp_path / f"profile-{mode}", *shot, *options)
        assert console == ""
        brightness[mode] = np.asarray(Image.open(tmp_path / f"{mode}.png").convert("L")).mean()
    assert brightness["light"] > 200
    assert brightness["dark"] < 90
