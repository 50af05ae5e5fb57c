"""Charts of the pages: nothing is cut off, series can be told apart, and a page may use its own styles and scripts."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from markupsafe import Markup

from semaug.report import charts
from semaug.report.charts import Measured, Series, bar_chart, line_chart, measured_bars, shortened, text_width
from semaug.report.html import environment, render_page
from semaug.report.matrix import confusion_matrix
from semaug.report.reading import ReportedRun
from semaug.report.sweeps import Mark, dot_chart, sweep_chart

CHROMIUM = shutil.which("chromium")
LONG = "OTHER WORDS of 12 drawn species, seed 0, test_efficientnet: constant Σ (control), MAXIMUM"

PROBE = """<script>onload = () => {
  const texts = [...document.querySelectorAll("iframe")].flatMap(frame =>
    [...frame.contentDocument.querySelectorAll("svg text")]);
  const cut = texts.filter(text => {
    const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
    return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1;
  });
  document.title = JSON.stringify([texts.length, cut.map(text => text.textContent)]);
}</script>"""

PAGE = """{% extends "base.html" %}
{% import "figures.html" as figures with context %}
{% block main %}
{{ figures.line_chart(tiny) }}
{{ figures.line_chart(sweep.chart, sweep.keys) }}
{{ figures.bar_chart(bars, "bars") }}
{{ figures.dot_chart(dots, "dots") }}
{{ figures.heat_map(matrix, "matrix") }}
{{ more | safe }}
{% endblock %}"""


def page_of_charts(more: str) -> str:
    """A chart of every kind with long texts, and some HTML more."""
    made = environment()
    evaluation = {"classes": [{"name": LONG}, {"name": "W" * 80}], "confusion": [[0, 0, 3], [1, 0, 2]]}
    return made.from_string(PAGE).render(
        tiny=line_chart("tiny", "", [Series("run", 0, [1, 2, 3], [-0.0000101, 0.0000112, 0.0000125])]),
        sweep=sweep_chart("sweep", "", "axis", ["a", "DenseNet-161, WIDE"], [Series("a", 0, [0, 1], [1, 2])], str),
        bars=bar_chart([LONG, "W" * 80, "short"], [(0, "run", {LONG: 1.0, "W" * 80: 0.5, "short": 0.1234})]),
        dots=dot_chart([(LONG, [Mark(0, 12.0, 3.0, "")]), ("short", [Mark(1, 9.0, 0.0, "", hollow=True)])], str),
        matrix=confusion_matrix(ReportedRun(Path("run"), "run", 0, {}, [], [], evaluation, [])),
        more=more,
        title="charts",
        policy="",
        script="",
        style=Markup(made.get_template("style.css").render()),
    )


def bench_chart() -> str:
    rows = [Measured(LONG, 2.0, 0.5, "2.00 ± 0.50 · 123.4 GB"), Measured("a", None, 0.0, "failed")]
    lines = [f"{LONG}, at length {LONG}", "device"]
    return environment().get_template("bench.svg").render(chart=measured_bars(rows), title="bench", lines=lines)


def texts_of(folder: Path, width: int, more: str) -> tuple[int, list[str]]:
    """How many texts the charts have in a real browser, and those that are cut off."""
    page = re.sub(r"<meta http-equiv[^>]*>", "", page_of_charts(more))
    (folder / "charts.html").write_text(page)
    (folder / "bench.svg").write_text(bench_chart())
    frames = "".join(f"<iframe width={width} height=900 src={file}></iframe>" for file in ("charts.html", "bench.svg"))
    (folder / "frame.html").write_text(frames + PROBE)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [str(CHROMIUM), *options, (folder / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
    assert title is not None
    count, cut = json.loads(unescape(title[1]))
    return count, cut


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [420, 1200])
def test_no_text_of_a_chart_is_cut_off(tmp_path: Path, width: int) -> None:
    planted = '<svg viewBox="0 0 100 20"><text x="60" y="12">planted and too long</text></svg>'
    count, cut = texts_of(tmp_path, width, planted)
    assert count > 25
    assert cut == ["planted and too long"]


def test_long_names_are_shortened_to_their_room() -> None:
    assert shortened("short", 420) == "short"
    cut = shortened("W" * 80, 420)
    assert cut.endswith("W…")
    assert text_width(cut) <= 420 < text_width(cut[:-1] + "WW…")
    assert shortened("anything", 0) == "…"


def test_curves_over_settings_have_them_on_the_axis_and_in_the_hints() -> None:
    lines = [Series("isda", 1, [0, 2], [10.0, 12.0], [1.0, None]), Series("none", 2, [0, 1, 2], [None, None, None])]
    sweep = sweep_chart("title", "caption", "axis", ["few", "some", "many"], lines, charts.plain)
    assert sweep is not None
    assert [tick.text for tick in sweep.chart.x_ticks] == ["few", "many"]
    assert [dot.text for dot in sweep.chart.curves[0].dots] == ["isda, few: 10 ± 1", "isda, many: 12"]
    assert [key.label for key in sweep.keys] == ["isda"]
    assert sweep_chart("title", "caption", "axis", ["few"], lines[1:], charts.plain) is None


def test_series_differ_in_mark_and_dashes_as_well_as_colour() -> None:
    lines = [Series(str(i), i, [1, 2], [i, i + 1]) for i in range(8)]
    html = environment().from_string(
        '{% import "figures.html" as figures with context %}{{ figures.line_chart(chart) }}'
    )
    drawn = html.render(chart=line_chart("title", "caption", lines))
    marks = re.findall(r'<path class="fill (c\d)" d="([^"]+)"', drawn)
    assert len(marks) == 16
    assert len({shape for _, shape in marks}) == 8
    style = environment().get_template("style.css").render()
    dashes = re.findall(r"\.stroke\.c\d \{ stroke: var\(--c\d\); stroke-dasharray: ([^;]+);", style)
    assert len(set(dashes)) == len(dashes) == 6


def test_a_page_may_use_its_own_styles_and_scripts_and_nothing_else() -> None:
    fragments = "<style>.x { color: red }</style><script>1 + 1</script>"
    page = render_page(environment(), "base.html", script="sort.js", fragments=fragments, title="<b>")
    policy = unescape(re.findall(r'Content-Security-Policy" content="([^"]+)"', page)[0])
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0] for tag in ("style", "script"))
    wanted = {"style-src": [style, ".x { color: red }"], "script-src": [script, "1 + 1"]}
    for name, texts in wanted.items():
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert f"{name} 'sha256-{digests[0]}' 'sha256-{digests[1]}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "<title>&lt;b&gt;</title>" in page
    assert "script-src 'none'" in unescape(render_page(environment(), "base.html", title=""))
