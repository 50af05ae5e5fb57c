"""Class-activation maps as pictures: in the figure, the report, and the answers of the page."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from semaug.inference.classifier import load_classifier
from semaug.inference.pictures import HEAT, SIDE, overlay, sample_pictures
from semaug.report.figures import Figure
from semaug.report.figures.runs import run_images
from semaug.report.page import write_report


def test_bright_colours_are_where_the_map_is_large() -> None:
    class_map = torch.tensor([[-5.0, 0.0], [1.0, 4.0]])
    drawn = overlay(np.full((64, 64, 3), 100, dtype=np.uint8), class_map, 4.0)
    assert drawn.shape == (64, 64, 3)
    assert drawn[0, 0].tolist() == [50, 50, 50]  # nothing speaks for the class: half of the grey photo
    assert drawn[-1, -1].tolist() == [round(50 + part / 2) for part in HEAT[-1]]
    assert drawn[-1, 0].sum() < drawn[-1, -1].sum()
    assert overlay(np.zeros((8, 8, 3), dtype=np.uint8), torch.zeros(2, 2), 0.0).max() == 0


def test_the_figure_shows_wrong_answers_first_with_the_probabilities_of_the_run(
    runs: dict[str, Path], drawn: dict[str, Figure]
) -> None:
    numbers = drawn["cam"].numbers
    classifier = load_classifier(runs["basic"])
    samples = run_images(classifier)
    files = [samples.name(i) for i in range(len(samples))]
    wrong = [row["true"] != row["predicted"] for row in numbers["images"]]
    assert len(wrong) == 4
    assert wrong == sorted(wrong, reverse=True)
    for row in numbers["images"]:
        i = files.index(row["file"])
        pixels = torch.tensor(classifier.preprocessing.pixels(samples.load(i)))[None]
        values, classes = classifier.probabilities(pixels)[0].sort(descending=True)
        assert row["true"] == classifier.classes[samples.labels[i]]
        assert [row["predicted"], row["second"]] == [classifier.classes[k] for k in classes[:2].tolist()]
        assert abs(row["probability"] - float(values[0])) < 1e-5


def test_wrong_answers_of_the_report_have_maps(runs: dict[str, Path], tmp_path: Path) -> None:
    samples = json.loads((runs["basic"] / "samples.json").read_text())
    for sample in samples:
        assert ("map" in sample) == (sample["true"] != sample["predicted"])
    maps = [sample["map"] for sample in samples if "map" in sample]
    write_report([runs["basic"]], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert maps
    assert page.count('class="map"') == len(maps)
    with Image.open(io.BytesIO(base64.b64decode(maps[0].partition(",")[2]))) as image:
        assert image.size == (SIDE, SIDE)


def test_a_network_without_a_feature_map_has_pictures_without_maps(runs: dict[str, Path]) -> None:
    classifier = load_classifier(runs["basic"])
    samples = run_images(classifier)
    classifier.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 6))
    pictures = sample_pictures(classifier, samples, wrong=2, right=0)
    assert len(pictures) == 2
    assert not any("map" in picture for picture in pictures)
