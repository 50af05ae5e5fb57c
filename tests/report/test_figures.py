"""The figures of real runs: their numbers against independent computations, and the files."""

import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from semaug.data.readers import read_data
from semaug.data.samples import embedded_birds
from semaug.inference.classifier import load_classifier
from semaug.inference.manifest import sign
from semaug.inference.runs import read_metrics
from semaug.report import figures
from semaug.report.figures import Figure, augmentations, confusions, diagnostics, neighbours, tsne
from semaug.report.figures.augmentations import _kept_share
from semaug.report.figures.neighbours import _nearest_images, _queries
from semaug.report.figures.runs import FigureRun, choose_images, compute_features, open_runs, run_images
from semaug.report.figures.tsne import _comparison, _turned, separation, tsne_plane
from semaug.training import checkpoints as checkpoint
from semaug.util.errors import RunError, SemaugError
from semaug.util.files import write_json
from semaug.util.untrusted import read_json

Runs = dict[str, Path]
Drawn = dict[str, Figure]
LAST = {"constant": 5.0, "isda": 5.0, "learnable": 5.0}  # λ in the second of two epochs


def opened(run: Path, *options: Any) -> FigureRun:
    [only] = open_runs({"own": run}, *options)
    return only


def features(run: FigureRun, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    computed = compute_features(run_images(run.classifier), range(count), run.classifier, {"own": run.features})
    return computed.features["own"], computed.labels


@pytest.mark.parametrize("name", figures.FIGURES)
def test_each_form_of_a_figure_is_what_it_claims_to_be(drawn: Drawn, name: str) -> None:
    figure = drawn[name]
    with Image.open(io.BytesIO(figure.png)) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 200
        border = np.asarray(picture.convert("L"))
        assert all((edge > 250).all() for edge in (border[:6], border[-6:], border[:, :6], border[:, -6:])), "cut off"
    assert (figure.svg is None) == (name in ("neighbours", "cam", "confusions", "parts")), (
        "photos are no vector graphics"
    )
    if figure.svg is not None:
        assert ElementTree.fromstring(figure.svg).tag.endswith("svg")
    parser = HTMLParser()
    parser.feed(figures.page([figure]))
    parser.close()
    assert "http" not in figure.html.replace("http://www.w3.org", "")
    json.dumps(figure.numbers)
    assert figure.title
    assert figure.caption.endswith(".")


# ------------------------------------------------------------------------------------------------------------- features


def test_features_are_what_the_head_sees(runs: Runs) -> None:
    figure_run = opened(runs["basic"])
    samples = run_images(figure_run.classifier)
    computed = compute_features(samples, range(7), figure_run.classifier, {"own": figure_run.features})
    pixels = torch.from_numpy(np.stack([figure_run.classifier.preprocessing.pixels(samples.load(i)) for i in range(7)]))
    expected = load_classifier(runs["basic"]).probabilities(pixels)
    assert torch.allclose(figure_run.network.head(computed.features["own"]).softmax(1), expected, atol=1e-5)
    assert computed.thumbnails.shape == (7, 96, 96, 3)
    assert computed.labels.tolist() == list(samples.labels)[:7]


def test_images_are_those_that_the_run_was_evaluated_and_trained_on(runs: Runs, photos: Path) -> None:
    classifier = load_classifier(runs["basic"])
    assert len(run_images(classifier)) == read_json(runs["basic"] / "evaluation.json")["count"] == 30
    assert len(run_images(classifier, "train")) == 30  # six of each species, less one for validation
    test = read_data(str(photos)).splits["test"]
    assert [run_images(classifier).name(i) for i in range(30)] == [test.name(i) for i in range(30)]


def test_a_choice_of_images_keeps_all_classes() -> None:
    samples = embedded_birds(5, 1, 10).splits["test"]
    chosen = choose_images(samples, 12, seed=3)
    assert len(chosen) == 12
    assert sorted(np.bincount([samples.labels[i] for i in chosen])) == [2, 2, 2, 3, 3]
    assert choose_images(samples, 12, seed=3) == chosen != choose_images(samples, 12, seed=4)
    assert choose_images(samples, 99, 0, [1, 4]) == [*range(10, 20), *range(40, 50)]


# ------------------------------------------------------------------------------------------------------------------- Σ


@pytest.mark.parametrize("method", ["constant", "isda", "learnable"])
def test_the_covariance_is_that_of_the_best_epoch(runs: Runs, method: str) -> None:
    figure_run = opened(runs[method], "run")
    assert figure_run.strength == read_metrics(runs[method])[-1]["strength"] == LAST[method]
    state = checkpoint.load(runs[method] / "checkpoints" / "best")
    assert state is not None
    assert figure_run.source is not None
    source = figure_run.source.state_dict()
    assert source.keys() == state["source"].keys()
    assert all(torch.equal(source[name], value) for name, value in state["source"].items())
    now = figure_run.classifier.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in state["model"].items())


@pytest.mark.parametrize("method", ["constant", "isda", "learnable"])
def test_draws_have_the_covariance_of_the_run(runs: Runs, method: str) -> None:
    figure_run = opened(runs[method], "run")
    own, labels = (values[[0, 9]] for values in features(figure_run, 10))
    draws = figure_run.draws(own, labels, 20_000, torch.Generator().manual_seed(1))
    assert figure_run.source is not None
    variance = LAST[method] * figure_run.source(own, labels).diagonal()
    moved = (draws - own).double()
    scale = variance.mean().sqrt()
    assert torch.allclose(moved.mean(0) / scale, torch.zeros_like(moved[0]), atol=0.1)
    assert torch.allclose(moved.var(0).float(), variance, rtol=0.06, atol=1e-6)
    correlation = torch.corrcoef(moved[:, 0, variance[0] > 0].T).fill_diagonal_(0)
    assert correlation.abs().max() < 0.05


def test_checkpoints_are_not_needed_and_the_covariance_is(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["learnable"], run)
    shutil.rmtree(run / "checkpoints")
    assert opened(run, "run").source is not None
    (run / "source.safetensors").unlink()
    with pytest.raises(RunError, match=r"has no source.safetensors"):
        opened(run, "run")


def test_class_statistics_are_computed_and_the_caption_says_so(runs: Runs) -> None:
    run = runs["isda"]
    figure_run = opened(run, "classwise")
    samples = run_images(figure_run.classifier, "train")
    computed = compute_features(samples, range(len(samples)), figure_run.classifier, {"own": figure_run.features})
    features, labels = computed.features["own"].double(), computed.labels
    variances = torch.stack([features[labels == label].var(0, correction=0) for label in range(6)])
    assert figure_run.source is not None
    result = figure_run.source(computed.features["own"], computed.labels).diagonal().double()
    assert torch.allclose(result, variances[labels], rtol=1e-4, atol=1e-7)
    assert "30 training images" in figure_run.notes[0]
    assert "30 training images" in neighbours({"isda": run}, queries=1, count=1, covariance="classwise").caption


def test_any_run_gives_class_statistics_when_asked(runs: Runs) -> None:
    assert opened(runs["basic"], "classwise").strength == 1.0
    assert opened(runs["isda"], "classwise", 0.5).strength == 0.5


def test_runs_that_cannot_be_drawn_from_are_one_sentence(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match="'basic' and has no Σ"):
        neighbours({"basic": runs["basic"]})
    with pytest.raises(SemaugError, match="no Σ"):
        augmentations({"basic": runs["basic"]})
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs["isda"], unfinished)
    (unfinished / "model.safetensors").unlink()
    for draw in (
        lambda: tsne({"isda": unfinished}),
        lambda: neighbours({"isda": unfinished}),
        lambda: confusions(unfinished),
    ):
        with pytest.raises(SemaugError, match="has not finished"):
            draw()
    with pytest.raises(SemaugError, match="there is no run directory"):
        tsne({"isda": tmp_path / "nowhere"})
    with pytest.raises(SemaugError, match="at least one run"):
        tsne({})
    with pytest.raises(SemaugError, match="positive"):
        augmentations({"isda": runs["isda"]}, strength=0.0)
    early = tmp_path / "early"
    shutil.copytree(runs["isda"], early)
    rows = [{**row, "strength": 0.0} for row in read_metrics(early)]
    (early / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sign(early)
    with pytest.raises(SemaugError, match="λ was 0"):
        neighbours({"isda": early})


def test_runs_of_other_classes_are_not_compared(runs: Runs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs["basic"], other)
    names = json.loads((other / "classes.json").read_text())
    (other / "classes.json").write_text(json.dumps(names[::-1]))
    sign(other)
    with pytest.raises(SemaugError, match="same classes"):
        tsne({"basic": runs["basic"], "other": other})


# ---------------------------------------------------------------------------------------------------------- neighbours


def test_nearest_images_agree_with_brute_force() -> None:
    dice = np.random.default_rng(0)
    gallery, same = dice.normal(size=(40, 7)), [bytes([i]) for i in range(40)]
    same[11] = same[5]  # two images with the same pixels
    gallery[11] = gallery[5]
    feature = gallery[5] + 0.01
    near, far = (_nearest_images(torch.from_numpy(feature), torch.from_numpy(gallery), same, q, 6) for q in (3, 11))
    order = sorted((i for i in range(40) if i not in (3, 11)), key=lambda i: np.sum((gallery[i] - feature) ** 2))
    assert near == order[:6]
    assert near[0] == 5
    assert 5 not in far, "the query's own pixels"


def test_the_figure_of_neighbours(runs: Runs, drawn: Drawn) -> None:
    figure = drawn["neighbours"]
    numbers = figure.numbers
    assert (numbers["queries"], numbers["images"], len(numbers["shown"])) == (30, 30, 3)
    assert len({name.split("/")[1] for name in numbers["shown"]}) == 3
    assert numbers["chance"] == pytest.approx(4 / 29)
    for label, row in numbers["runs"].items():
        assert all(0 <= row[key] <= 1 for key in ("same_class", "unmoved_same_class", "kept"))
        assert row["shift"] > 0
        assert f"{label} {100 * row['same_class']:.0f} %" in figure.caption
    # the shares, all over again: of the nearest images to each feature, and to one augmented version of it
    figure_run = opened(runs["isda"], "run")
    own, labels = features(figure_run, 30)
    order = _queries(labels.tolist(), 3, 0)
    own, labels = own[order], labels[order]
    [moved] = figure_run.draws(own, labels, 1, torch.Generator().manual_seed(0))
    for measure, near in (("unmoved_same_class", own), ("same_class", moved)):
        distances = torch.cdist(near.double(), own.double()).fill_diagonal_(torch.inf)
        share = (labels[distances.argsort(dim=1)[:, :4]] == labels[:, None]).double().mean()
        assert numbers["runs"]["isda"][measure] == pytest.approx(float(share))


# ------------------------------------------------------------------------------------------------------ t-SNE


def test_separation_agrees_with_a_computation_by_hand() -> None:
    dice = np.random.default_rng(1)
    labels = np.array([0] * 5 + [2] * 7 + [5] * 4)
    features = dice.normal(size=(16, 3)) + labels[:, None]
    result = separation(features, labels)
    centres = {c: features[labels == c].mean(0) for c in (0, 2, 5)}
    own = [np.sqrt(np.sum((a - centres[c]) ** 2)) for a, c in zip(features, labels, strict=True)]
    between = [np.sqrt(np.sum((centres[a] - centres[b]) ** 2)) for a, b in ((0, 2), (0, 5), (2, 5))]
    assert result["intra"] == pytest.approx(np.mean(own))
    assert result["inter"] == pytest.approx(np.mean(between))
    assert result["separability"] == pytest.approx(np.mean(between) / np.mean(own))
    spread = np.sqrt(np.mean(np.sum((features - features.mean(0)) ** 2, axis=1)))
    assert result["compactness"] == pytest.approx(np.mean(own) / spread)
    coefficients = []
    for i, (a, c) in enumerate(zip(features, labels, strict=True)):
        distance = np.linalg.norm(features - a, axis=1)
        inside = distance[(labels == c) & (np.arange(16) != i)].mean()
        outside = min(distance[labels == k].mean() for k in (0, 2, 5) if k != c)
        coefficients.append((outside - inside) / max(outside, inside))
    assert result["silhouette"] == pytest.approx(np.mean(coefficients))


def test_separation_does_not_divide_by_zero() -> None:
    result = separation(np.repeat(np.eye(2), 3, axis=0), np.repeat([0, 1], 3))
    assert result["separability"] is None
    assert result["silhouette"] == 1.0
    assert separation(np.ones((3, 2)), np.zeros(3, dtype=np.int64))["compactness"] is None


def test_turning_the_plane_keeps_distances() -> None:
    places = np.random.default_rng(5).normal(size=(30, 2)) * [9, 1]
    turned = _turned(places)
    assert np.allclose(
        np.linalg.norm(turned[:, None] - turned, axis=2), np.linalg.norm(places[:, None] - places, axis=2)
    )
    assert np.ptp(turned, axis=0).max() < 0.85 * np.ptp(places, axis=0).max()


def test_t_sne_of_features_that_coincide_is_finite() -> None:
    assert np.isfinite(tsne_plane(np.ones((6, 3)), seed=0)).all()
    with pytest.raises(SemaugError, match="at least 4"):
        tsne_plane(np.ones((3, 3)), seed=0)
    with pytest.raises(SemaugError, match="perplexity"):
        tsne_plane(np.ones((6, 3)), seed=0, perplexity=0)


def test_the_figure_of_look_alike_classes(runs: Runs, drawn: Drawn) -> None:
    figure = drawn["tsne"]
    [group] = figure.numbers["groups"]
    assert (group["group"], group["images"]) == ("finch", 20), "no group has more than five classes: the largest"
    figure_run = opened(runs["basic"])
    samples = run_images(figure_run.classifier)
    members = [i for i, name in enumerate(figure_run.classes) if name.endswith("Finch")]
    chosen = choose_images(samples, 99, 0, members)
    computed = compute_features(samples, chosen, figure_run.classifier, {"own": figure_run.features})
    expected = separation(computed.features["own"].double().numpy(), computed.labels.numpy())
    measured = figure.numbers["runs"]["basic"]
    assert {key: measured[key] for key in expected} == pytest.approx(expected)
    assert 0 <= measured["top1"] <= 1
    assert figure.html.count('class="point') == 40


def test_no_run_is_named_best_if_measures_disagree() -> None:
    rows = {"basic": {"separability": 0.75, "silhouette": 0.1, "top1": 0.67}}
    rows["learnable"] = {"separability": 0.77, "silhouette": None, "top1": 0.29}
    groups = [{"images": 20, "runs": rows}]
    assert "do not agree on which run separates the classes best" in _comparison({"runs": rows, "groups": groups})
    rows["basic"]["top1"] = 0.29
    assert "separated best by learnable (0.77; basic 0.75)" in _comparison({"runs": rows, "groups": groups})


def test_every_large_group_of_look_alike_classes_is_shown(runs: Runs, tmp_path: Path) -> None:
    names = opened(runs["basic"]).classes
    table = tmp_path / "groups.csv"
    table.write_text("class,group\n" + "".join(f"{name},{'ABABAC'[i]}\n" for i, name in enumerate(names)))
    both = {label: runs[label] for label in ("basic", "isda")}
    figure = tsne(both, groups=table, more_than=1)
    first, second = figure.numbers["groups"]
    assert [first["group"], first["classes"]] == ["A", [names[0], names[2], names[4]]]
    assert [second["group"], second["classes"]] == ["B", [names[1], names[3]]]
    assert figure.html.count('class="point') == 2 * (15 + 10)
    assert figure.html.count("<h3>") == 2 * (2 + 1)
    for label, row in figure.numbers["runs"].items():
        alone = [tsne({label: runs[label]}, groups=table, group=name).numbers["runs"][label] for name in "AB"]
        assert row == pytest.approx({key: np.mean([one[key] for one in alone]) for key in row})
    assert "2 groups of more than 1 classes of the same group in groups.csv" in figure.caption
    [only] = tsne(both, groups=table, more_than=2).numbers["groups"]
    assert only["group"] == "A"


def test_figures_are_the_same_for_the_same_seed(runs: Runs) -> None:
    one, two = (tsne({"isda": runs["isda"]}, seed=3, limit=10) for _ in range(2))
    assert one == two
    assert one.numbers["groups"][0]["images"] == 10
    state = torch.get_rng_state()
    first, again, other = (augmentations({"isda": runs["isda"]}, seed=seed, limit=8, copies=1) for seed in (1, 1, 2))
    assert first == again
    assert first.numbers != other.numbers
    assert torch.equal(torch.get_rng_state(), state)
    near = [neighbours({"isda": runs["isda"]}, queries=1, count=2, seed=2) for _ in range(2)]
    assert near[0] == near[1]


def test_other_images_can_be_given(runs: Runs, photos: Path) -> None:
    train_images = read_data(str(photos)).splits["train"]
    assert tsne({"basic": runs["basic"]}, train_images).numbers["groups"][0]["images"] == 24
    few = embedded_birds(2, 1, 3, size=48).splits["test"]
    assert tsne({"basic": runs["basic"]}, few).numbers["groups"][0]["images"] in (3, 6)


# ------------------------------------------------------------------------------------------------------ augmentations


def test_the_kept_share_is_that_of_the_nearest_centre() -> None:
    dice = np.random.default_rng(2)
    features, centres, labels = dice.normal(size=(50, 4)), dice.normal(size=(3, 4)), dice.integers(3, size=50)
    hits = [np.argmin([np.linalg.norm(a - c) for c in centres]) == y for a, y in zip(features, labels, strict=True)]
    result = _kept_share(torch.from_numpy(features), torch.from_numpy(labels), torch.from_numpy(centres))
    assert result == pytest.approx(np.mean(hits))


def test_the_figure_of_augmentations(drawn: Drawn) -> None:
    figure = drawn["augmentations"]
    parts = figure.numbers["augmentations"]
    assert list(parts) == ["Random Erasing", "RandAugment", "Semantic augmentation"]
    assert all(0 <= row["kept"] <= 1 for row in parts.values())
    assert 0.2 < parts["Random Erasing"]["altered"] < 0.8  # as in training: half of the images
    assert all(0 <= row["kept_of_altered"] <= 1 for row in parts.values())
    assert parts["RandAugment"]["altered"] > 0.7
    assert 0 <= figure.numbers["original"] <= 1
    assert figure.html.count('class="point') == 3 * 20 * 4
    tags = re.findall(r"<[^>]* class=.point.[^>]*>", figure.html)
    marks = [dict(re.findall(r'([\w-]+)="([^"]*)"', tag)) for tag in tags]
    colours = {(mark["data-class"], mark["fill"]) for mark in marks if "augmented" not in mark["data-hint"]}
    assert len(colours) == len({colour for _, colour in colours}) == 4, "each class has its colour"
    hollow = {(mark["data-class"], mark["stroke"]) for mark in marks if mark["fill"] == "none"}
    assert hollow == colours, "and augmented features are hollow"


def test_augmented_features_are_those_of_one_network_with_the_covariance_of_another(runs: Runs, drawn: Drawn) -> None:
    numbers = drawn["augmentations"].numbers
    network, source = opened(runs["basic"]), opened(runs["learnable"], "run").source
    assert source is not None
    members = [i for i, name in enumerate(network.classes) if name.endswith("Finch")]
    own, labels = features(network, 30)
    wanted = torch.isin(labels, torch.tensor(members))
    own, labels = own[wanted], labels[wanted]
    place = torch.searchsorted(torch.tensor(members), labels)
    centres = torch.stack([own[labels == label].mean(0) for label in members])
    assert numbers["original"] == pytest.approx(_kept_share(own, place, centres))
    moved = source(own, labels).sample(own, 3, LAST["learnable"], torch.Generator().manual_seed(0)).detach()
    kept = _kept_share(moved.flatten(0, 1), place.repeat(3), centres)
    assert numbers["augmentations"]["Semantic augmentation"]["kept"] == pytest.approx(kept)
    assert "the network of basic" in drawn["augmentations"].caption
    assert "the Σ of learnable" in drawn["augmentations"].caption


def test_runs_whose_features_and_covariance_do_not_fit_are_refused(
    runs: Runs, photos: Path, train_small: Callable[..., Path], tmp_path: Path
) -> None:
    wide = train_small(photos, tmp_path / "wide", method="basic", model="test_resnet", epochs=1)
    with pytest.raises(SemaugError, match=r"is for 64 features and does not fit the \d+ of"):
        augmentations({"basic": wide, "isda": runs["isda"]})
    with pytest.raises(SemaugError, match="one run, or one for the features and one for Σ, not 3"):
        augmentations({label: runs[label] for label in ("basic", "isda", "learnable")})


def test_weak_draws_stay_near_their_features(runs: Runs) -> None:
    numbers = augmentations({"isda": runs["isda"]}, strength=1e-12, limit=12, copies=1).numbers
    assert numbers["augmentations"]["Semantic augmentation"]["kept"] == numbers["original"]


# ------------------------------------------------------------------------------------- training, mistakes, destruction


def test_the_figure_of_the_covariance_during_training(runs: Runs, drawn: Drawn) -> None:
    figure = drawn["diagnostics"]
    assert list(figure.numbers["runs"]) == ["constant", "isda", "learnable"]
    assert "not shown: basic" in figure.caption
    rows = read_metrics(runs["learnable"])
    assert figure.numbers["runs"]["learnable"]["drift"] == {"first": rows[0]["drift"], "last": rows[-1]["drift"]}
    last = rows[-1]
    slope = last["meta_gradient_norm"] / ((rows[-2]["lr"] + last["lr"]) / 2 * last["strength"])
    assert figure.numbers["runs"]["learnable"]["meta_slope"]["last"] == pytest.approx(slope)
    with pytest.raises(SemaugError, match="there is no Σ to show"):
        diagnostics({"basic": runs["basic"]})


def test_the_figure_of_confusions_agrees_with_the_evaluation(runs: Runs, drawn: Drawn) -> None:
    figure = drawn["confusions"]
    evaluation = read_json(runs["basic"] / "evaluation.json")
    names = [row["name"] for row in evaluation["classes"]]
    counts = {(names[t], names[p]): n for t, p, n in evaluation["confusion"]}
    assert figure.numbers["top1"] == pytest.approx(evaluation["top1"])
    pairs = figure.numbers["pairs"]
    assert 1 <= len(pairs) <= 3
    for pair in pairs:
        assert pair["a_as_b"] == counts.get((pair["a"], pair["b"]), 0)
        assert pair["b_as_a"] == counts.get((pair["b"], pair["a"]), 0)
    totals = [pair["a_as_b"] + pair["b_as_a"] for pair in pairs]
    worst = max(counts.get((a, b), 0) + counts.get((b, a), 0) for a in names for b in names if a < b)
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == worst


def test_the_chart_of_destruction(drawn: Drawn) -> None:
    figure = drawn["destruction"]
    shares = [row["share"] for row in figure.numbers["augmentations"].values()]
    assert shares == sorted(shares, reverse=True)
    assert figure.numbers["augmentations"]["Semantic augmentation"]["share"] == 0


def test_names_stay_text(runs: Runs, tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>_\x1b_Finch"  # half a character is refused when the file is read
    run = tmp_path / "run"
    shutil.copytree(runs["isda"], run)
    names = json.loads((run / "classes.json").read_text())
    (run / "classes.json").write_text(json.dumps([hostile, *names[1:]]))
    sign(run)
    samples = run_images(load_classifier(runs["isda"]))
    for figure in (
        tsne({"<b>": run}, samples, limit=8),
        neighbours({"<b>": run}, samples, queries=6, count=1),
        confusions(run, samples, pairs=15, images=1),
    ):
        assert "<script>alert" not in figure.html
        assert "<b>isda" not in figure.html
        assert figure.html.count("<script>") == 1


@pytest.mark.parametrize("change", [{"method": "nobody's"}, {"method": None}, {"augmentation": {"width": "wide"}},
                                    {"augmentation": None}, {"augmentation": {"width": 3}}])  # fmt: skip
def test_settings_of_unknown_origin_end_in_a_sentence(runs: Runs, tmp_path: Path, change: dict[str, Any]) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["learnable"], run)
    write_json(run / "config.json", {**read_json(run / "config.json"), **change})
    sign(run)
    with pytest.raises(
        SemaugError, match="has no Σ|does not fit the settings|method should be text|should be an object"
    ):
        neighbours({"run": run})
