"""The interactive pages in a real browser."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import CHROMIUM, POLICY, browse, title_of
from semaug.report import figures

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
Drawn = dict[str, figures.Figure]

PROBE = """<script>addEventListener("load", () => {
  const root = document.querySelector(".semaug-figure"), tip = root.querySelector(".tip");
  const ink = getComputedStyle(root).color;
  const points = [...root.querySelectorAll(".cloud")].map(cloud => [...cloud.querySelectorAll(".point")]);
  const state = () => ({
    shown: !tip.hidden && tip.getBoundingClientRect().height > 60, name: tip.querySelector("b").textContent,
    hint: tip.querySelector("span").textContent, on: root.querySelectorAll(".point.on").length,
    outline: [...root.querySelectorAll(".point.on")].every(p => getComputedStyle(p).stroke === ink),
    picture: getComputedStyle(tip.querySelector(".picture")).backgroundImage.slice(0, 22),
    place: getComputedStyle(tip.querySelector(".picture")).backgroundPosition,
    inside: tip.getBoundingClientRect().right <= innerWidth + 1 && tip.getBoundingClientRect().left >= 0,
  });
  const result = { before: state() };
  const point = points[0][7];
  point.scrollIntoView({ block: "center" });
  const box = point.getBoundingClientRect();
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


@pytest.mark.parametrize("width", [1200, 500])
def test_a_point_shows_its_image_when_pointed_at_focused_or_tapped(drawn: Drawn, tmp_path: Path, width: int) -> None:
    page = POLICY.sub("", figures.page([drawn["tsne"]])).replace("</body>", PROBE)
    (tmp_path / "probed.html").write_text(page)
    html, console = browse(tmp_path / "probed.html", tmp_path / "profile", "--dump-dom", f"--window-size={width},900")
    assert console == ""
    result = json.loads(title_of(html))
    assert result["hit"]
    assert not result["before"]["shown"]
    assert result["hover"]["shown"]
    assert result["hover"]["name"] == result["expected"]
    assert result["hover"]["on"] == 2  # the same image in both panels
    assert result["hover"]["outline"]
    assert result["hover"]["picture"] == 'url("data:image/jpeg;b'
    assert not result["left"]["shown"]
    assert result["left"]["on"] == 0
    assert result["focus"]["shown"]
    assert result["arrow"]["active"]
    assert result["arrow"]["place"] != result["focus"]["place"]
    assert result["tap"]["shown"]
    assert all(result[way]["inside"] for way in ("hover", "focus", "tap"))
    assert result["kin"] == 10  # five images in each of two panels
    assert result["width"]


def test_pages_open_from_disk_without_errors_in_light_and_dark(drawn: Drawn, tmp_path: Path) -> None:
    (tmp_path / "all.html").write_text(figures.page(list(drawn.values()), "All figures"))
    brightness = {}
    for mode, options in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        shot = ("--hide-scrollbars", "--window-size=1200,1500", f"--screenshot={tmp_path / mode}.png")
        _, console = browse(tmp_path / "all.html", tmp_path / f"profile-{mode}", *shot, *options)
        assert console == ""
        brightness[mode] = np.asarray(Image.open(tmp_path / f"{mode}.png").convert("L")).mean()
    assert brightness["light"] > 200
    assert brightness["dark"] < 90
