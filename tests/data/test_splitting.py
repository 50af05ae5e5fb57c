"""Saved splits: stratified, groups on one side, the same on every machine, and read by every command."""

import csv
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold

from fuzzing import examples
from photos import photo_folder
from semaug.cli.main import main
from semaug.data.readers import read_data, split_validation
from semaug.data.samples import embedded_birds
from semaug.data.splitting import SplitRow, draw_groups


def chosen_groups(labels: Iterable[int], groups: Iterable[str], fraction: float, seed: int) -> set[str]:
    images = zip(labels, groups, strict=True)
    return draw_groups([SplitRow(Path(), str(label), "train", group) for label, group in images], fraction, seed)


@examples(300)
@given(
    images=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=60),
    fraction=st.floats(0.05, 0.6),
    seed=st.integers(0, 9),
)
def test_every_class_keeps_a_group_and_gives_one_if_it_can(
    images: list[tuple[int, int]], fraction: float, seed: int
) -> None:
    labels, groups = [label for label, _ in images], [f"g{group}" for _, group in images]
    chosen = chosen_groups(labels, groups, fraction, seed)
    inside = {label for label, group in zip(labels, groups, strict=True) if group in chosen}
    outside = {label for label, group in zip(labels, groups, strict=True) if group not in chosen}
    assert outside == set(labels)
    members = {label: {g for own, g in zip(labels, groups, strict=True) if own == label} for label in set(labels)}
    pure = {
        label for label in members if not any(members[label] & members[other] for other in members if other != label)
    }
    assert {label for label in pure if len(members[label]) > 1} <= inside
    shuffled = sorted(zip(labels, groups, strict=True), key=lambda pair: hash((pair, seed)))
    assert chosen_groups([label for label, _ in shuffled], [g for _, g in shuffled], fraction, seed) == chosen


def test_single_images_are_chosen_as_validation_images_are() -> None:
    samples = embedded_birds(4, 13, 1, size=32).splits["train"]
    names = [samples.name(i) for i in range(len(samples))]
    _, held_out = split_validation(samples, None, 0.2, 3)
    assert chosen_groups(samples.labels, names, 0.2, 3) == {held_out.name(i) for i in range(len(held_out))}


def test_shares_of_classes_are_as_even_as_those_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    group_class = random.integers(0, 10, 400)
    groups = random.integers(0, 400, 4000)
    labels = group_class[groups]
    share = 0.2 * np.bincount(labels, minlength=10)

    def unevenness(inside: np.ndarray) -> float:
        return float(np.abs(np.bincount(labels[inside], minlength=10) - share).max() / share.mean())

    chosen = chosen_groups(labels.tolist(), [str(g) for g in groups], 0.2, 0)
    ours = unevenness(np.array([str(g) in chosen for g in groups]))
    folds = StratifiedGroupKFold(5, shuffle=True, random_state=0).split(labels, labels, groups)
    theirs = max(unevenness(test) for _, test in folds)
    assert ours <= theirs
    assert ours < 0.1


@pytest.fixture
def individuals(tmp_path: Path) -> Path:
    """Photos below CLASS/INDIVIDUAL."""
    flat = photo_folder(tmp_path / "flat", species=3, train=12, test=1, size=32) / "train"
    folder = tmp_path / "animals"
    for species in sorted(flat.iterdir()):
        for i, file in enumerate(sorted(species.iterdir())):
            place = folder / species.name / f"animal{i // 3}"
            place.mkdir(parents=True, exist_ok=True)
            shutil.move(file, place / file.name)
    return folder


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


def test_folders_stay_together_and_training_takes_the_table(
    individuals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "splits" / "split.csv"
    assert main(["data", "split", str(individuals), "--output", str(output), "--group-by", "folder"]) == 0
    assert "train: 18 images of 3 classes in 6 groups, 50.0 %" in capsys.readouterr().out
    rows = rows_of(output)
    assert len(rows) == 36
    sides = {row["group"]: set[str]() for row in rows}
    for row in rows:
        sides[row["group"]].add(row["split"])
    assert all(len(side) == 1 for side in sides.values())
    data = read_data(str(output))
    assert {split: len(samples) for split, samples in data.splits.items()} == dict(Counter(r["split"] for r in rows))
    assert np.asarray(data.splits["val"].load(0)).shape == (32, 32, 3)
    again = ["data", "split", str(output), "--output", str(tmp_path / "b.csv"), "--group-by", "group", "--seed", "4"]
    assert main(again) == 0  # the test split stays, and groups come from the column
    kept = {Path(row["path"]).name for row in rows_of(tmp_path / "b.csv") if row["split"] == "test"}
    assert kept == {Path(row["path"]).name for row in rows if row["split"] == "test"}
    config = ["train", "--data", str(output), "--model", "small", "--dry-run", "--device", "cpu"]
    assert main([*config, "--output", str(tmp_path / "run"), "--resize", "40", "--crop", "32"]) == 0


def test_a_table_behind_a_link_names_the_same_images(individuals: Path, tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    output = tmp_path / "link" / "split.csv"
    assert main(["data", "split", str(individuals), "--output", str(output)]) == 0
    files = {(output.parent / row["path"]).resolve() for row in rows_of(output)}
    assert files == {file.resolve() for file in individuals.rglob("*.png")}
    (tmp_path / "alias").symlink_to(individuals)  # a table beside its images can be moved with them
    output = tmp_path / "alias" / "split.csv"
    assert main(["data", "split", str(tmp_path / "alias"), "--output", str(output)]) == 0
    assert not any(row["path"].startswith("..") for row in rows_of(output))


def test_an_image_in_two_groups_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = photo_folder(tmp_path / "photos", species=2, train=4, test=1, size=32) / "train"
    lines = [f"{file},{file.parent.name},{i}" for i, file in enumerate(sorted(photos.rglob("*.png")))]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,animal", *lines, lines[0][:-1] + "7"]))
    command = ["data", "split", str(tmp_path / "t.csv"), "--output", str(tmp_path / "x.csv"), "--group-by", "animal"]
    assert main(command) == 2
    assert "is listed twice, in the groups '0' and '7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--group-by", "animal"], "is not a table with a column animal"),
        (["--val-fraction", "0.9", "--test-fraction", "0.2"], "their sum below 1"),
        (["--val-fraction", "-0.1"], "must be at least 0 and below 1"),
    ],
)
def test_mistakes_are_one_sentence(
    individuals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["data", "split", str(individuals), "--output", str(tmp_path / "x.csv"), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()


def test_what_cannot_be_divided_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = photo_folder(tmp_path / "photos", species=2, train=4, test=1, size=32)
    table = tmp_path / "t.csv"
    table.write_text("path,label,split,animal\n" + "".join(
        f"photos/train/{file.parent.name}/{file.name},{file.parent.name},{split},x\n"
        for split, file in zip(["train", "test"] * 9, sorted((photos / "train").rglob("*.png")), strict=False)
    ))  # fmt: skip
    for arguments, sentence in (
        ([str(photos), "--test-fraction", "0.2"], "has a test split, which is not changed; leave out --test-fraction"),
        ([str(photos), "--group-by", "folder"], "are in one folder, so --group-by folder divides nothing"),
        (["birds"], "are inside of other files; a split needs image files"),
        (
            [str(table), "--group-by", "lens"],
            "has no column 'lens'; its columns are: 'path', 'label', 'split', 'animal'",
        ),
        ([str(table), "--group-by", "animal"], "groups of the test split of t have other images too: 'x'"),
    ):
        assert main(["data", "split", *arguments, "--output", str(tmp_path / "x.csv")]) == 2
        assert sentence in capsys.readouterr().err
    for name in ("crow", "crow "):  # a table of them would have one class
        shutil.copytree(next((photos / "train").iterdir()), tmp_path / "alike" / name)
    assert main(["data", "split", str(tmp_path / "alike"), "--output", str(tmp_path / "x.csv")]) == 2
    assert "classes of alike differ only in spaces around their names" in capsys.readouterr().err
    assert main(["data", "split", str(photos), "--output", str(tmp_path / "x.txt")]) == 2
    assert "--output must end with .csv" in capsys.readouterr().err
