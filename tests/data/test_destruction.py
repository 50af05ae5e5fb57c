"""How often augmentation destroys the cue: the measure against cases whose answer is known."""

import numpy as np
import pytest
import torch

from semaug.data import destruction
from semaug.data.birds import TRAITS
from semaug.data.destruction import (
    AUGMENTATIONS,
    LEFT,
    OURS,
    Pair,
    augment_all,
    cut_square,
    difference_left,
    look_alike_pairs,
    measure,
)


@pytest.fixture(scope="module")
def pairs():
    return look_alike_pairs(num_species=8, per_species=5)


@pytest.fixture(scope="module")
def measured():
    return {row.name: row for row in measure(num_species=8, per_species=5)}


def share_destroyed(pairs, augmentation):
    augmented = augment_all(pairs, augmentation)
    return np.mean([difference_left(pair, result) < LEFT for pair, result in zip(pairs, augmented, strict=True)])


def difference(pictures):
    """The difference of a pair, pixel by pixel in plain Python numbers."""
    levels = pictures.tolist()
    return sum(
        max(0, max(abs(levels[0][c][y][x] - levels[1][c][y][x]) for c in range(3)) - destruction.GRAIN)
        for y in range(pictures.shape[2])
        for x in range(pictures.shape[3])
    )


def test_pairs_differ_inside_their_box_only(pairs):
    assert len(pairs) > 30
    for pair in pairs:
        left, top, right, bottom = pair.box
        outside = (pair.pictures[0].int() - pair.pictures[1].int()).abs().amax(0) > destruction.GRAIN
        outside[top:bottom, left:right] = False
        assert not outside.any()
        assert pair.trait in TRAITS
        assert pair.values[0] != pair.values[1]


def test_identity_destroys_nothing(pairs):
    assert share_destroyed(pairs, lambda pictures, other: pictures) == 0
    assert all(difference_left(pair, pair.pictures) == 1 for pair in pairs)


def test_blanking_the_cue_destroys_all(pairs):
    def blank(pictures, other):
        change = (pictures[0].int() - pictures[1].int()).abs().amax(0) > 0
        return torch.where(change, torch.zeros_like(pictures), pictures)

    assert share_destroyed(pairs, blank) == 1


def test_pasting_all_of_another_image_or_removing_all_contrast_destroys_all(pairs):
    assert share_destroyed(pairs, lambda pictures, other: other.expand_as(pictures)) == 1
    assert share_destroyed(pairs, lambda pictures, other: pictures // 64 * 0 + 100) == 1


def test_blanking_everything_else_destroys_nothing(pairs):
    def only_the_cue(pictures, other):
        change = (pictures[0].int() - pictures[1].int()).abs().amax(0) > 0
        return torch.where(change, pictures, torch.zeros_like(pictures))

    assert share_destroyed(pairs, only_the_cue) == 0


def test_a_known_box_leaves_the_difference_outside_of_it(pairs):
    pair = pairs[0]
    left, top, right, bottom = pair.box
    row, column = (top + bottom) // 2 + 24, (left + right) // 2  # its upper edge runs through the cue
    cut = cut_square(pair.pictures, row, column)
    levels = pair.pictures.clone()
    for y in range(96):
        for x in range(96):
            if row - 24 <= y < row + 24 and column - 24 <= x < column + 24:
                levels[:, :, y, x] = 0
    expected = difference(levels) / difference(pair.pictures)
    assert 0 < expected < 1
    assert difference_left(pair, cut) == pytest.approx(expected, abs=1e-6)


def test_cutout_destroys_as_often_as_its_geometry_says():
    """For a cue of one pixel: the share of the 32 × 32 positions of the square that cover it."""
    pictures = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    pictures[1, :, 3, 17] = 200
    one = Pair(pictures, "eye_ring", ("white", "buff"), (17, 3, 18, 4))
    covering = [difference_left(one, cut_square(pictures, y, x)) < LEFT for y in range(32) for x in range(32)]
    assert sum(covering) == 12 * 16  # centres in rows 0 … 11 and columns 10 … 25
    chance = sum(covering) / 32**2
    measured = share_destroyed([one] * 2000, AUGMENTATIONS["Cutout"][1])
    assert measured == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 2000) ** 0.5)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_both_pictures_of_a_pair_get_the_same_augmentation(name, pairs):
    """Equal pictures stay equal, and keep their type."""
    twins = [Pair(pair.pictures[:1].expand(2, -1, -1, -1), pair.trait, pair.values, pair.box) for pair in pairs[:10]]
    for pictures in augment_all(twins, AUGMENTATIONS[name][1]):
        assert pictures.dtype == torch.uint8
        assert torch.equal(pictures[0], pictures[1])


def test_measure_is_reproducible_and_restores_the_random_state(measured):
    state = torch.get_rng_state()
    torch.manual_seed(5)
    again = measure(num_species=8, per_species=5)
    assert torch.initial_seed() == 5
    torch.set_rng_state(state)
    assert [row.share for row in again] == [row.share for row in measured.values()]
    for row in again:
        assert np.array_equal(row.example.augmented, measured[row.name].example.augmented)
    assert [row.share for row in measure(8, 5, seed=1)] != [row.share for row in again]


def test_images_lose_their_cue_and_features_do_not(measured):
    assert list(measured) == [*AUGMENTATIONS, OURS]
    assert measured[OURS].share == measured[OURS].standard_error == 0
    assert np.array_equal(measured[OURS].example.augmented, measured[OURS].example.original)
    for name in ("RandomResizedCrop", "CutMix", "Cutout", "Random Erasing", "Random crop"):
        row = measured[name]
        assert 0.05 < row.share < 0.6
        assert row.standard_error == pytest.approx((row.share * (1 - row.share) / row.count) ** 0.5)
        assert row.example.destroyed
