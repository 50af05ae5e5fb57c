"""Charts: what they show, that nothing is cut off, and that names stay text."""

import json
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, browse, title_of
from semaug.report.canvas import slots, to_png, to_svg
from semaug.report.charts import LineChart, Series, confusion_matrix, lines, percent, rows, swatch

LONG = "OTHER WORDS of 12 drawn species, seed 0, test_efficientnet: constant Σ (control), MAXIMUM"
EPOCHS = [1.0, 2.0, 3.0]


def chart(*series: Series, **options: Any) -> LineChart:
    return LineChart("title", "caption", series, **options)


def texts(figure: Any) -> list[str]:
    return [
        str(text.text) for text in ElementTree.fromstring(to_svg(figure, "label")).iter() if text.tag.endswith("text")
    ]


# ------------------------------------------------------------------------------------------------------ SVG and PNG


def test_an_svg_has_a_label_and_no_styles_and_is_the_same_on_every_call() -> None:
    figure = lines([chart(Series("run", 0, [1, 2, 3], EPOCHS))])
    svg = to_svg(figure, 'what it "shows"')
    assert svg == to_svg(lines([chart(Series("run", 0, [1, 2, 3], EPOCHS))]), 'what it "shows"')
    root = ElementTree.fromstring(svg)
    assert (root.get("role"), root.get("aria-label")) == ("img", 'what it "shows"')
    assert not [element for element in root.iter() if "style" in element.attrib or element.tag.endswith("style")]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    assert {element.get("id") for element in root.iter()} - {None} == used
    assert to_png(figure) == to_png(figure)


@pytest.mark.parametrize("name", ["<script>x()</script>", "]]>&amp;", "$x$ $y", "\x00\x1b[31m", "\ud800", "_run"])
def test_names_stay_text(name: str) -> None:
    shown = re.sub("[\x00\x1b\ud800]", "\ufffd", name)
    assert shown in texts(rows([name, "b"], [Series("", 0, [1, 2])]))
    assert shown in texts(lines([chart(Series(name, 0, [1, 2, 3], EPOCHS), Series("b", 1, [2, 2, 2], EPOCHS))]))
    assert shown in texts(confusion_matrix([name, "b"], [(0, 1, 2)]))


def test_one_warning_names_the_characters_that_the_font_lacks() -> None:
    figure = rows(["ウグイス", "ウソ"], [Series("", 0, [1, 2])])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_svg(figure, "birds")
        to_png(figure)
    [warning] = caught
    assert re.search("show boxes for [ウグイスソ]{5}, which the font lacks", str(warning.message))


# ------------------------------------------------------------------------------------------------------------ series


def test_methods_keep_their_slots_and_series_differ_in_more_than_colour() -> None:
    assert slots(["basic", "isda", "learnable"]) == [*slots(["learnable", "basic", "isda"])[1:], 1]
    assert slots(["isda", "isda", "unknown"]) == [0, 1, 2]
    looks = [Series("", slot, ()).look for slot in range(8)]
    assert len({look["marker"] for look in looks}) == len({look["color"] for look in looks}) == 8
    assert len({str(look["ls"]) for look in looks}) == 6
    assert len({to_svg(swatch(slot), "") for slot in range(8)}) == 8


# ------------------------------------------------------------------------------------------------------------- lines


def test_few_curves_are_labelled_at_their_ends_and_many_have_a_legend() -> None:
    few = [Series(f"run {i}", i, [1, 2, 2.0 + i / 100], EPOCHS) for i in range(3)]
    [axes] = lines([chart(*few)]).axes
    heights = sorted(text.get_position()[1] for text in axes.texts if str(text.get_text()).startswith("run"))
    assert len(heights) == 3
    assert min(b - a for a, b in pairwise(heights)) > 0.08, "labels overlap"
    many = lines([chart(*(Series(f"run {i}", i, [1, 2, 3], EPOCHS) for i in range(7)))])
    assert [text.get_text() for text in many.legends[0].get_texts()] == [f"run {i}" for i in range(7)]
    assert not lines([chart(few[0])]).legends


def test_missing_values_are_left_out_and_a_chart_without_values_is_empty() -> None:
    gaps = Series("run", 0, [1.0, None, 3.0], EPOCHS, [0.5, None, None])
    assert chart().points(gaps) == [(1.0, 1.0, 0.5), (3.0, 3.0, 0.0)]
    assert chart(log_y=True).points(Series("run", 0, [1.0, 0.0, -1.0], EPOCHS)) == [(1.0, 1.0, 0.0)]
    assert chart(Series("run", 0, [None] * 3, EPOCHS)).empty
    [axes] = lines([chart(gaps)]).axes
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert axes.collections, "the band of the spread"


def test_settings_have_names_and_error_bars_and_shares_are_in_percent() -> None:
    series = Series("isda", 0, [0.1, 0.3], [0, 2], [0.01, None])
    shown = texts(lines([chart(series, ticks=["few", "some", "many"], percent=True)], titles=False))
    assert {"few", "some", "many", "10 %", "30 %"} <= set(shown)
    assert "title" not in shown


def test_a_band_does_not_cross_zero() -> None:
    [axes] = lines([chart(Series("run", 0, [1.0, 1.0, 1.0], EPOCHS, [9.0, 9.0, 9.0]))]).axes
    assert axes.collections[0].get_paths()[0].vertices[:, 1].min() == 0.0


# -------------------------------------------------------------------------------------------------- rows and matrices


def test_bars_have_their_values_and_texts() -> None:
    bars = [
        Series("a", 0, [0.5, None], spread=[0.1, None]),
        Series("b", 1, [0.25, None], texts=["a quarter", "failed"]),
    ]
    figure = rows(["one", LONG], bars, text=percent, limits=(0, 1), longest=10, reference=0.5)
    [axes] = figure.axes
    assert [patch.get_width() for patch in axes.patches] == [0.5, 0.25]
    assert {"one", LONG[:9] + "…", "50 %", "a quarter", "failed"} <= set(texts(figure))
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([0.4, 0.6])


def test_dots_of_a_row_are_on_one_line() -> None:
    figure = rows(["one"], [Series("ours", 0, [80.0]), Series("the paper", 1, [81.0], hollow=True)], dots=True)
    dots = [line for line in figure.axes[0].lines if line.get_marker() not in ("None", "")]
    assert len({float(line.get_ydata()[0]) for line in dots}) == 1
    assert [line.get_xdata()[0] for line in dots] == [80.0, 81.0]
    assert {"ours", "the paper"} <= set(texts(figure))


def test_a_confusion_matrix_has_counts_and_colours_right_and_wrong_answers() -> None:
    figure = confusion_matrix(["cat", "dog"], [(0, 0, 9), (0, 1, 1), (1, 1, 4)])
    assert {"cat", "dog", "9", "1", "4", "true class", "predicted class"} <= set(texts(figure))
    cells = figure.axes[0].images[0].get_array()
    blue, orange, empty, right = cells[0, 0], cells[0, 1], cells[1, 0], cells[1, 1]
    assert blue[2] > blue[0]
    assert orange[0] > orange[2]
    assert (empty == 1).all()
    assert right.sum() < blue.sum(), "a larger share is darker"
    assert "class 7" not in texts(confusion_matrix([f"class {i}" for i in range(60)], [(7, 7, 1)]))


# -------------------------------------------------------------------------------------------------------- in a browser

PROBE = """<script>onload = () => {
  const texts = [...document.querySelectorAll("svg text")];
  const cut = texts.filter(text => {
    const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
    return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1;
  });
  document.title = JSON.stringify([texts.length, cut.map(text => text.textContent)]);
}</script>"""
CHARTS: dict[str, Callable[[], Any]] = {
    "tiny numbers": lambda: lines([chart(Series("run", 0, [-0.0000101, 0.0000112, 0.0000125], EPOCHS))]),
    "labelled": lambda: lines([chart(*(Series("W" * 20, i, [i] * 3, EPOCHS) for i in range(2)))]),
    "legend": lambda: lines([chart(*(Series(LONG + str(i), i, [i] * 3, EPOCHS) for i in range(3)))]),
    "settings": lambda: lines([chart(Series("a", 0, [1, 2], [0, 1]), ticks=["a", "DenseNet-161, WIDE"])]),
    "bars": lambda: rows([LONG, "W" * 80, "short"], [Series("run", 0, [1.0, 0.5, 0.1234])], limits=(0, 1)),
    "dots": lambda: rows([LONG], [Series("ours", 0, [12.0]), Series("paper", 1, [9.0], hollow=True)], dots=True),
    "matrix": lambda: confusion_matrix([LONG, "W" * 80], [(0, 0, 3), (1, 0, 2)]),
}


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_no_text_of_a_chart_is_cut_off(tmp_path: Path) -> None:
    planted = '<svg width="100" viewBox="0 0 100 20"><text x="60" y="12">planted and too long</text></svg>'
    drawn = "".join(to_svg(draw(), name) for name, draw in CHARTS.items())
    (tmp_path / "charts.html").write_text(f"<!doctype html><title></title>{drawn}{planted}{PROBE}")
    html, _ = browse(tmp_path / "charts.html", tmp_path / "profile", "--dump-dom")
    count, cut = json.loads(title_of(html))
    assert count > 40
    assert cut == ["planted and too long"]
