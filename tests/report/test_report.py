"""The report: one file that opens anywhere, whatever the runs hold or lack."""

import base64
import io
import json
import math
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from browser import CHROMIUM, POLICY, browse, title_of
from semaug.data import birds, destruction
from semaug.data.images import Preprocessing
from semaug.data.samples import embedded_birds
from semaug.inference.evaluation import ConfusedPair, Evaluation, Mistake, score
from semaug.inference.manifest import sign
from semaug.inference.pictures import sample_pictures
from semaug.report import page, write_report
from semaug.report.page import headline, settings
from semaug.report.reading import read_runs
from semaug.util.errors import SemaugError

HOSTILE = "<script>alert(1)</script>"
NAMES = [kind.name for kind in birds.species(20)]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


# ---------------------------------------------------------------------------------------------- synthetic runs


def make_run(
    folder: Path,
    method: str = "learnable",
    *,
    names: list[str] = NAMES,
    data: str = "birds",
    epochs: int = 12,
    done: int | None = None,
    skill: float = 0.6,
    split: str = "test",
    pictures: bool = True,
) -> Path:
    """A run directory as training leaves it; `done` epochs of an unfinished run."""
    folder.mkdir(parents=True)
    config = {
        "format": 1, "version": "0.1.0", "started": "2026-01-02T03:04:05+00:00", "data": data, "model": "test_resnet",
        "method": method, "epochs": epochs, "seed": 0, "lr": 0.03, "batch_size": 64,
        "preprocessing": {"resize": 96, "crop": 88, "mean": [0.5, 0.5, 0.5]}, "augmentation": {"strength": 10.0},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "classes.json").write_text(json.dumps(names))
    rows = [metrics_row(method, epoch, epochs, skill) for epoch in range(1, (done or epochs) + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if done is None:
        result = make_evaluation(names, skill)
        (folder / "evaluation.json").write_text(json.dumps({"split": split, "best_epoch": epochs, **result.to_json()}))
        if pictures:
            (folder / "samples.json").write_text(json.dumps(make_samples(names)))
    return folder


def metrics_row(method: str, epoch: int, epochs: int, skill: float) -> dict[str, float]:
    part = epoch / epochs
    row = {
        "epoch": epoch, "lr": 0.015 * (1 + math.cos(math.pi * part)), "strength": 0.0,
        "train_loss": 3 - 2 * part * skill, "train_accuracy": part * skill, "val_top1": skill * part**0.5,
        "val_loss": 3 - 1.5 * part, "seconds": 2.5, "augmentation_share": 0.0, "images_per_second": 320.0,
    }  # fmt: skip
    if method in ("isda", "learnable"):
        row |= {
            "strength": 10 * part, "augmentation_share": 0.3 * part, "variance_mean": 0.5 + 0.1 * part,
            "variance_std_samples": 0.05 * part, "variance_std_dims": 0.1 * part,
        }  # fmt: skip
    if method == "learnable":
        row |= {"drift": 0.02 * part, "meta_loss": 3 - part, "meta_gradient_norm": 10 ** (-1 - 2 * part)}
    return row


def make_evaluation(names: list[str], skill: float, per_class: int = 20) -> Evaluation:
    generator = torch.Generator().manual_seed(round(100 * skill))
    labels = torch.arange(len(names)).repeat_interleave(per_class)
    logits = torch.randn(len(labels), len(names), generator=generator)
    logits[torch.arange(len(labels)), labels] += 6 * skill
    neighbour = (labels + 1) % len(names)
    logits[torch.arange(len(labels)), neighbour] += 1.5
    scores = score(logits.softmax(1), labels)
    errors = [(t, p, n) for t, p, n in scores.confusion.tolist() if t != p][:15]
    pairs = tuple(ConfusedPair(names[t], names[p], n, 0.1) for t, p, n in errors)
    mistakes = tuple(Mistake(f"test/{names[t]}/{t}", names[t], names[p], 0.9) for t, p, _ in errors)
    return Evaluation(len(labels), tuple(names), scores, pairs, mistakes)


def make_samples(names: list[str], count: int = 10) -> list[dict[str, object]]:
    kinds = birds.species(20)
    samples: list[dict[str, object]] = []
    for i in range(count):
        buffer = io.BytesIO()
        Image.fromarray(birds.draw(kinds[i % 20], i, split="test").image).save(buffer, "JPEG")
        true, predicted = names[i % len(names)], names[(i + i % 2) % len(names)]
        uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
        samples.append(
            {"image": uri, "name": f"test/{true}/{i}", "true": true, "predicted": predicted, "probability": 0.8}
        )
    return samples


@pytest.fixture(scope="module", autouse=True)
def _small_measurement():
    """The destruction of cues on a few birds, measured once for all reports."""
    rows = destruction.measure(num_species=4, per_species=2)
    page._measured_destruction.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destruction, "measure", lambda num_species: rows)
        yield
    page._measured_destruction.cache_clear()


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return [
        make_run(folder / "one", "basic", skill=0.45),
        make_run(folder / "two", "isda", skill=0.5),
        make_run(folder / "three", "learnable", skill=0.7),
    ]


@pytest.fixture(scope="module")
def three(three_runs, tmp_path_factory):
    """The report of three runs."""
    output = tmp_path_factory.mktemp("report") / "report.html"
    write_report(three_runs, output)
    return output


# -------------------------------------------------------------------------------------------------- the page itself


class Page(HTMLParser):
    """What a test asks of a page: its elements with attributes, and its text by element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def sections(self) -> set[str]:
        return {str(attributes["id"]) for tag, attributes in self.elements if tag == "section"}


def report(runs: list[Path], output: Path) -> Page:
    write_report(runs, output)
    return Page(output.read_text(encoding="utf-8"))


SECTIONS = {"settings", "results", "curves", "augmentation", "classes", "confusion", "pictures", "destruction"}


def test_three_runs_have_all_sections(three):
    shown = Page(three.read_text(encoding="utf-8"))
    assert shown.sections == SECTIONS
    assert shown.count("svg") > 20
    assert shown.count("img") == 30 + 3 * 7, "predictions, and three for each augmentation"
    for text in ("3 runs on birds", "learnable classifies", "ISDA", "Meta-gradient", "RandomResizedCrop"):
        assert text in shown.text
    assert all(name in shown.text for name in NAMES)


def test_nothing_is_fetched(three):
    html = three.read_text(encoding="utf-8")
    for tag, attributes in Page(html).elements:
        for key in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert str(attributes.get(key, "data:")).startswith(("data:", "#")), (tag, attributes)
    html = re.sub(r"data:image/[^\"]*", "", html).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in html.replace("http-equiv", "")


def test_the_same_runs_give_the_same_file(three, three_runs, tmp_path):
    write_report(three_runs, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == three.read_bytes()


def test_the_best_run_is_marked_and_the_numbers_are_those_of_the_evaluation(three, three_runs):
    shown = Page(three.read_text(encoding="utf-8"))
    top1 = json.loads((three_runs[2] / "evaluation.json").read_text())["top1"]
    assert f"{100 * top1:.2f} ±" in shown.text
    assert [attributes.get("class") for tag, attributes in shown.elements if tag == "tr"].count("best") == 1


def test_settings_that_do_not_identify_a_run_are_hidden(tmp_path):
    run = make_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    hidden = {"workers": 3, "cache": "folder", "resume": True, "output": "here", "format": 1}
    (run / "config.json").write_text(json.dumps({**config, **hidden, "device": "cpu", "label_smoothing": 0.1}))
    common, differing = settings(read_runs([run]))
    shown = {key for part in common.values() for key, _ in part}
    assert {"device", "label_smoothing", "augmentation.strength"} <= shown
    assert not shown & set(hidden)
    assert not differing


def test_hostile_names_are_text(tmp_path):
    names = [
        HOSTILE,
        '"><img src=x onerror=alert(2)>',
        "{{ 7 * 7 }}",
        "</style></script>",
        "\x1b[0m",
        "ordinary",
    ]
    run = make_run(tmp_path / "<b>run", HOSTILE, names=names, data="' onload='alert(3)")
    shown = report([run], tmp_path / "report.html")
    assert HOSTILE in shown.text
    assert "{{ 7 * 7 }}" in shown.text
    assert shown.count("script") == 1
    assert not any(key.startswith("on") for _, attributes in shown.elements for key in attributes)
    assert all(str(attributes["src"]).startswith("data:") for tag, attributes in shown.elements if tag == "img")


def test_an_unfinished_run_is_shown_as_far_as_it_is(tmp_path):
    shown = report([make_run(tmp_path / "run", done=5)], tmp_path / "report.html")
    assert shown.sections == SECTIONS - {"classes", "confusion", "pictures"}
    assert "training has not finished (epoch 5 of 12)" in shown.text
    assert "The run has not been evaluated" in shown.text


def test_a_run_that_has_just_begun(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    assert report([run], tmp_path / "report.html").sections == {"settings", "results"}


def test_damaged_files_are_named_and_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "evaluation.json").write_text('{"top1":')
    (run / "samples.json").write_text("{}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 13, "train_loss": NaN, "val_top1": null}\n{"epoch": 14, "trai')
    shown = report([run], tmp_path / "report.html")
    assert "cannot read" in shown.text
    assert "a line of metrics.jsonl" in shown.text
    assert "nan" not in "".join(str(a.get("d")) for _, a in shown.elements).lower()


@pytest.mark.parametrize(
    "odd", [None, "text", 3, 10**400, -1e300, [], [None], {"a": 1}, [[1, 2]], [[0, 0, 10**30]], [{"name": ["list"]}]]
)
def test_files_that_hold_something_else_do_not_break_the_report(tmp_path, odd):
    run = tmp_path / "run"
    run.mkdir()
    keys = ("classes", "confusion", "most_confused", "worst_mistakes", "top1", "count", "split")
    (run / "config.json").write_text(json.dumps({"method": odd, "epochs": odd, "data": odd, "augmentation": odd}))
    (run / "evaluation.json").write_text(json.dumps(dict.fromkeys(keys, odd)))
    (run / "metrics.jsonl").write_text(json.dumps(dict.fromkeys(("epoch", "strength", "train_loss"), odd)))
    for name in ("classes.json", "samples.json"):
        (run / name).write_text(json.dumps(odd))
    assert {"settings", "results"} <= report([run], tmp_path / "report.html").sections


def test_many_classes_are_a_choice_and_other_data_has_no_section_on_the_birds(tmp_path):
    run = make_run(tmp_path / "run", data="cub", names=[f"class {i}" for i in range(60)])
    shown = report([run], tmp_path / "report.html")
    assert shown.sections == SECTIONS - {"destruction"}
    assert "The 45 hardest of 60" in shown.text.replace("\n", " ")


def test_pictures_from_elsewhere_are_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    samples = [{"image": "https://example.org/a.jpg"}, {"image": "data:image/svg+xml;base64,AAAA"}, "not a sample"]
    (run / "samples.json").write_text(json.dumps(samples))
    [read] = read_runs([run])
    assert read.samples == []
    assert "there are no pictures" in read.notes


def test_runs_are_named_by_method_or_else_by_directory(tmp_path):
    runs = [make_run(tmp_path / "seed-0", "isda"), make_run(tmp_path / "seed-1", "isda", done=1)]
    assert [run.label for run in read_runs(runs)] == ["seed-0", "seed-1"]
    assert [run.label for run in read_runs([runs[0], make_run(tmp_path / "b", "basic")])] == ["ISDA", "basic"]
    same = make_run(tmp_path / "other" / "seed-0", "isda")
    assert [run.label for run in read_runs([runs[0], same])] == [str(runs[0]), str(same)]


def test_the_headline_does_not_make_much_of_small_differences(tmp_path):
    runs = {skill: make_run(tmp_path / str(skill), "basic", skill=skill) for skill in (0.3, 0.5, 0.51)}
    other = make_run(tmp_path / "isda", "isda", skill=0.5)
    summaries = {skill: headline(read_runs([run, other]))[1] for skill, run in runs.items()}
    assert "more than" in summaries[0.3]
    assert "as many as" in summaries[0.5]
    assert [skill for skill, summary in summaries.items() if "may be chance" in summary] == [0.51]


def test_the_headline_compares_only_runs_evaluated_on_the_same_images(tmp_path):
    test, val = make_run(tmp_path / "a", "basic"), make_run(tmp_path / "b", "isda", split="val")
    unfinished = make_run(tmp_path / "c", "learnable", done=1)
    assert "cannot be compared" in headline(read_runs([test, val]))[1]
    assert any("the data has no test split" in note for note in read_runs([val])[0].notes)
    assert "no other run has been evaluated" in headline(read_runs([test, unfinished]))[1]
    assert headline(read_runs([unfinished, unfinished]))[1] == "No run has been evaluated yet."


def test_the_headline_knows_other_images_of_the_same_name_and_number(tmp_path):
    def comparable(split, *others):
        runs = [make_run(tmp_path / f"{split}-{len(list(tmp_path.iterdir()))}" / "r", split=split) for _ in others]
        for run, (base, data, held_out) in zip(runs, others, strict=True):
            config = json.loads((run / "config.json").read_text())
            (run / "config.json").write_text(json.dumps({**config, "base": str(tmp_path / base), "data": "photos"}))
            (run / "split.json").write_text(held_out)
            sign(run, run="1", data=data)
        return "cannot be compared" not in headline(read_runs(runs))[1]

    assert comparable("test", ("here", "1", "{}"), ("here", "1", "[]"))
    assert comparable("test", ("here", "1", "{}"), ("here", "2", "{}"))  # training images were added
    assert comparable("test", ("here", "1", "{}"), ("moved", "1", "{}"))
    assert not comparable("test", ("here", "1", "{}"), ("there", "2", "{}"))  # another folder of the same name
    assert comparable("val", ("here", "1", "{}"), ("here", "1", "{}"))
    assert not comparable("val", ("here", "1", "{}"), ("here", "1", "[]"))  # each seed held out others


@pytest.mark.parametrize("prepare", [lambda run: None, lambda run: run.mkdir()])
def test_what_is_not_a_run_is_an_error_of_the_user(tmp_path, prepare):
    prepare(tmp_path / "run")
    with pytest.raises(SemaugError, match="run"):
        write_report([tmp_path / "run"], tmp_path / "report.html")
    with pytest.raises(SemaugError, match="at least one"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_sample_pictures_are_what_the_classifier_says():
    class Oracle:
        """Knows even images, and takes odd ones for the next class."""

        classes = ("a", "b", "c", "d")

        preprocessing = Preprocessing(96, 96)
        model = torch.nn.Flatten()  # without a feature map

        def __init__(self) -> None:
            self.answers = {drawn.load(i).tobytes(): (drawn.labels[i] + i % 2) % 4 for i in range(len(drawn))}

        def probabilities(self, pixels):
            places = [self.answers[image.numpy().tobytes()] for image in pixels]
            return torch.nn.functional.one_hot(torch.tensor(places), 4) * 0.8 + 0.05

    drawn = embedded_birds(4, 1, 10).splits["test"]
    samples = sample_pictures(Oracle(), drawn, wrong=5, right=7)
    assert [sample["true"] == sample["predicted"] for sample in samples] == [False] * 5 + [True] * 7
    assert all(sample["probability"] == 0.85 for sample in samples)
    picture = Image.open(io.BytesIO(base64.b64decode(samples[0]["image"].split(",")[1])))
    assert picture.size == (96, 96)


# -------------------------------------------------------------------------------------------------------- in a browser


def requests(log: Path) -> set[str]:
    """Addresses that the page asked for, by Chromium's network log; the browser's own requests have no origin."""
    events = [event.get("params") or {} for event in json.loads(log.read_text())["events"]]
    asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
    return {address for address in asked if not address.startswith(("file:", "data:"))}


@needs_chromium
def test_the_browser_tests_notice_errors_and_requests(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('planted'); nowhere()</script><img src='http://127.0.0.1:9/planted.png'>")
    _, console = browse(bad, tmp_path / "profile", "--dump-dom", f"--log-net-log={tmp_path / 'net.json'}")
    assert "planted" in console
    assert "nowhere is not defined" in console
    assert any("planted.png" in address for address in requests(tmp_path / "net.json"))


@needs_chromium
def test_the_report_opens_without_errors_or_requests(tmp_path):
    names = [HOSTILE, "<img src=http://127.0.0.1:9/x onerror=alert(2)>", *NAMES[2:]]
    runs = [make_run(tmp_path / method, method, names=names) for method in ("basic", "isda", "learnable")]
    write_report(runs, tmp_path / "report.html")
    log = tmp_path / "net.json"
    html, console = browse(tmp_path / "report.html", tmp_path / "profile", "--dump-dom", f"--log-net-log={log}")
    assert console == ""
    assert requests(log) == set()
    shown = Page(html)
    assert shown.count("svg") > 20
    assert shown.count("script") == 2, "to sort tables, and of the examples of destruction"
    assert HOSTILE in shown.text


@needs_chromium
def test_a_click_sorts_the_table(three, tmp_path):
    clicks = "<script>document.querySelectorAll('#results th button')[3].click()</script></body>"
    (tmp_path / "clicked.html").write_text(POLICY.sub("", three.read_text()).replace("</body>", clicks))
    html, console = browse(tmp_path / "clicked.html", tmp_path / "profile", "--dump-dom")
    assert console == ""
    order = re.findall(r'<td class="n top" data-value="([0-9.]+)"', html)
    assert [float(value) for value in order] == sorted(map(float, order), reverse=True)
    assert float(order[0]) > float(order[-1])


@needs_chromium
def test_the_page_is_not_wider_than_the_screen(tmp_path):
    names = ["A" * 120, *NAMES[1:]]
    runs = [make_run(tmp_path / (method + "-" * 90), method, names=names) for method in ("isda", "learnable")]
    write_report(runs, tmp_path / "report.html")
    html = escape(POLICY.sub("", (tmp_path / "report.html").read_text()))
    widths = (340, 800, 1500)
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{html}"></iframe>' for width in widths)
    measure = "[...document.querySelectorAll('iframe')].map(frame => frame.contentDocument.body.scrollWidth)"
    (tmp_path / "frame.html").write_text(f"{frames}<script>onload = () => {{ document.title = {measure} }}</script>")
    shown, _ = browse(tmp_path / "frame.html", tmp_path / "profile", "--dump-dom")
    measured = [int(width) for width in title_of(shown).split(",")]
    assert all(0 < own <= width for own, width in zip(measured, widths, strict=True)), measured


@needs_chromium
def test_dark_mode_is_dark(three, tmp_path):
    brightness = {}
    for mode, options in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        picture = tmp_path / f"{mode}.png"
        shot = ("--hide-scrollbars", "--window-size=1200,1600", f"--screenshot={picture}")
        browse(three, tmp_path / mode, *shot, *options)
        brightness[mode] = np.asarray(Image.open(picture).convert("L")).mean()
    assert brightness["light"] > 200
    assert brightness["dark"] < 70
