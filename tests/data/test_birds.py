"""The embedded birds: reproducible, with species that differ in their small traits only."""

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semaug.data import birds
from semaug.data.birds import MAX_SPECIES, SPLITS, TRAITS, VALUES, Birds, Species, draw, species
from semaug.data.brush import COLOURS

SOURCE = str(Path(birds.__file__).parents[2])


def distance(one: Species, two: Species) -> int:
    return sum(a != b for a, b in zip(one.traits, two.traits, strict=True))


def with_value(kind: Species, trait: int, value: str) -> Species:
    return Species("Test_Bird", (*kind.traits[:trait], value, *kind.traits[trait + 1 :]))


# ---------------------------------------------------------------------------------------------------------- species


def test_500_species_are_distinct_and_their_names_fit_folders():
    kinds = species(500)
    assert len({kind.traits for kind in kinds}) == len({kind.name for kind in kinds}) == 500
    assert all(kind.name.replace("_", "").isalpha() and 2 <= len(kind.name.split("_")) <= 3 for kind in kinds)
    assert all(value in VALUES[trait] for kind in kinds for trait, value in zip(TRAITS, kind.traits, strict=True))


def test_every_combination_can_be_reached():
    kinds = species(MAX_SPECIES)
    assert len({kind.traits for kind in kinds}) == len({kind.name for kind in kinds}) == MAX_SPECIES


def test_fewer_species_are_a_prefix_and_seeds_differ():
    assert species(10)[:5] == species(5)
    assert species(20, seed=1) != species(20, seed=2)


@pytest.mark.parametrize("count", [2, 20, 200])
def test_species_have_look_alikes_one_trait_away(count):
    kinds = species(count, seed=3)
    nearest = [min(distance(kind, other) for other in kinds if other is not kind) for kind in kinds]
    assert np.median(nearest) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_value_of_a_trait_is_common_to_most_species(seed):
    for values in zip(*(kind.traits for kind in species(20, seed)), strict=True):
        assert max(Counter(values).values()) <= 10


# ------------------------------------------------------------------------------------------------------ determinism

DIGEST = """
import hashlib
from semaug.data.birds import draw, species
drawings = [draw(kind, 3, seed=5, size=64, split="val") for kind in species(4)]
print(hashlib.sha256(b"".join(d.image.tobytes() + d.visibility.tobytes() for d in drawings)).hexdigest())
"""


def test_another_process_in_another_order_draws_the_same():
    command = [sys.executable, "-c", DIGEST]
    other = subprocess.run(
        command, env={"PYTHONPATH": SOURCE, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    backwards = [draw(kind, 3, seed=5, size=64, split="val") for kind in reversed(species(4))]
    parts = [drawing.image.tobytes() + drawing.visibility.tobytes() for drawing in reversed(backwards)]
    assert other.stdout.strip() == hashlib.sha256(b"".join(parts)).hexdigest()


def test_global_random_state_is_neither_used_nor_changed():
    torch.manual_seed(1), np.random.seed(1)
    first, state = draw(species(2)[0], 0).image, np.random.get_state()[1].copy()
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    torch.manual_seed(2), np.random.seed(2)
    np.testing.assert_array_equal(draw(species(2)[0], 0).image, first)


def test_pinned_fingerprint():
    """Means over 24 x 24 blocks, so that a pixel rounded the other way does not matter and a change of drawing does."""
    image = draw(species(2)[1], 7, seed=1).image.astype(np.float64)
    means = image.reshape(4, 24, 4, 24, 3).mean((1, 3, 4))
    np.testing.assert_allclose(means, FINGERPRINT, atol=0.5)


FINGERPRINT = [
    [186.0, 183.5, 164.2, 158.3],
    [175.0, 134.1, 160.2, 171.6],
    [163.5, 129.5, 119.0, 157.5],
    [160.2, 148.0, 127.2, 131.6],
]


def test_splits_indices_and_seeds_give_different_images():
    kind = species(2)[0]
    images = [draw(kind, index, seed=seed, size=32, split=s) for s in SPLITS for index in (0, 1) for seed in (0, 1)]
    assert len({drawing.image.tobytes() for drawing in images}) == len(images)


# ------------------------------------------------------------------------------------------------------------ traits


@pytest.mark.parametrize("trait", range(len(TRAITS)))
def test_look_alikes_in_the_same_scene_differ_only_where_the_trait_is_visible(trait):
    base = species(2)[0]
    for index in range(4):
        drawings = [
            draw(with_value(base, trait, value), index, scene=base, split="test") for value in VALUES[TRAITS[trait]]
        ]
        absent = drawings[0]
        for drawing in drawings[1:]:
            np.testing.assert_array_equal(drawing.visibility, absent.visibility)
            change = np.abs(drawing.image.astype(int) - absent.image).max(2)
            assert change[absent.visibility[trait] == 0].max() == 0
            # Light, cast and contrast multiply a colour by 1.7 at most, and rounding adds one level.
            assert (change <= 1.7 * 255 * absent.visibility[trait] + 1).all()


@pytest.mark.parametrize("trait", range(len(TRAITS)))
def test_traits_are_visible_and_show_their_colour(trait):
    base, values = species(2)[0], VALUES[TRAITS[trait]]
    seen, changed, areas = 0, 0, []
    for index in range(30):
        value = values[1 + index % (len(values) - 1)]
        drawing, absent = (draw(with_value(base, trait, v), index, scene=base) for v in (value, "absent"))
        mask = drawing.masks[trait]
        areas.append(mask.sum())
        if mask.sum() >= 5:
            seen += 1
            change = np.abs(drawing.image[mask].astype(float).mean(0) - absent.image[mask].mean(0))
            changed += change.max() > 12
    assert seen >= 27
    assert changed >= 0.85 * seen
    assert np.median(areas) >= 9


def test_the_colour_inside_the_mask_is_the_colour_of_the_trait():
    base, colours = species(2)[0], {name: COLOURS[name] for name in VALUES["wing_bar"][1:]}
    hits = 0
    for index in range(40):
        value = list(colours)[index % len(colours)]
        drawing = draw(with_value(base, TRAITS.index("wing_bar"), value), index, scene=base)
        mean = drawing.image[drawing.masks[TRAITS.index("wing_bar")]].mean(0)
        tints = {name: np.array(colour) / sum(colour) for name, colour in colours.items()}  # light changes brightness
        hits += value == min(tints, key=lambda name: float(((mean / mean.sum() - tints[name]) ** 2).sum()))
    assert hits >= 24  # chance is 10


def test_traits_do_not_overlap_and_masks_follow_visibility():
    drawing = draw(species(2)[0], 0)
    assert drawing.masks.sum(0).max() <= 1
    assert drawing.visibility.sum(0).max() <= 1 + 1e-5
    assert drawing.masks.shape == drawing.visibility.shape == (len(TRAITS), 96, 96)


def test_nuisance_tells_nothing_about_the_species():
    """Nearest class means on 4 x 4 thumbnails, in which the traits drown, do not beat chance (10 %) by much."""
    kinds = species(10)

    def thumbnails(split):
        images = [[draw(kind, index, size=32, split=split).image for index in range(12)] for kind in kinds]
        return np.array(images, float).reshape(10, 12, 4, 8, 4, 8, 3).mean((3, 5)).reshape(10, 12, -1)

    means = thumbnails("train").mean(1)
    guesses = ((thumbnails("test")[:, :, None] - means) ** 2).sum(-1).argmin(-1)
    assert (guesses == np.arange(10)[:, None]).mean() < 0.2


# ---------------------------------------------------------------------------------------------------- shapes, errors


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(32, 130),
    count=st.integers(2, 60),
    seed=st.integers(-(2**70), 2**70),
    index=st.integers(0, 10**9),
    split=st.sampled_from(SPLITS),
)
def test_any_drawing_is_well_formed(size, count, seed, index, split):
    drawing = draw(species(count, seed)[-1], index, seed=seed, size=size, split=split)
    assert drawing.image.shape == (size, size, 3)
    assert drawing.image.dtype == np.uint8
    assert drawing.visibility.shape == (len(TRAITS), size, size)
    assert drawing.visibility.dtype == np.float32
    assert drawing.masks.dtype == np.bool_
    assert drawing.visibility.min() >= 0
    assert drawing.visibility.max() <= 1 + 1e-5
    assert drawing.image.std() > 3


def test_dataset_items_labels_and_drawings():
    data = Birds(num_species=3, per_species=4, split="val", size=40, seed=2)
    assert len(data) == 12
    assert data.labels == [0] * 4 + [1] * 4 + [2] * 4
    assert data.classes == [kind.name for kind in species(3, seed=2)]
    image, label = data[6]
    assert image.shape == (3, 40, 40)
    assert image.dtype == torch.uint8
    assert label == 1
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), data.drawing(6).image)
    np.testing.assert_array_equal(data.drawing(6).image, draw(data.species[1], 2, seed=2, size=40, split="val").image)
    assert torch.equal(data[-1][0], data[11][0])
    assert data[-1][1] == 2
    with pytest.raises(IndexError):
        data[12]


def test_dataset_transform_is_applied():
    data = Birds(2, 1, size=32, transform=lambda image: image.float().mean().item())
    assert isinstance(data[0][0], float)
    assert len([label for _, label in data]) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: species(1), "count must be between 2"),
        (lambda: species(MAX_SPECIES + 1), "count must be between 2"),
        (lambda: draw(species(2)[0], 0, size=31), "size must be at least 32"),
        (lambda: draw(species(2)[0], 0, split="dev"), "split must be one of train, val, test"),
        (lambda: draw(species(2)[0], -1), "index must be at least 0"),
        (lambda: Birds(num_species=1), "count must be between 2"),
        (lambda: Birds(per_species=0), "per_species must be at least 1"),
        (lambda: Birds(size=8), "size must be at least 32"),
        (lambda: Birds(split="dev"), "split must be one of"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert ". " not in str(error.value)
