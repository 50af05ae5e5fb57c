"""The canonical order of parts against a plain search over all permutations."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semaug.p2p.alignment import PartAlignment, _normalised_gram, reordered

seeds = st.integers(0, 10**6)


def aligner(seed, parts=4, d=6):
    torch.manual_seed(seed)
    alignment = PartAlignment(parts, d).double()
    first = torch.randn(5, parts, d, dtype=torch.float64)
    alignment.update(first, alignment(first))
    return alignment


def plain_order(features, templates):
    """The permutation with the least squared distance of normalised Gram matrices, one at a time."""
    gram, target = features @ features.T, templates @ templates.T
    gram, target = gram / gram.max(), target / target.max()
    orders = list(itertools.permutations(range(len(features))))
    distances = [((target - gram[np.ix_(order, order)]) ** 2).sum() for order in orders]
    return list(orders[int(np.argmin(distances))])


@given(seed=seeds, parts=st.integers(2, 5))
def test_order_equals_a_plain_search(seed, parts):
    alignment = aligner(seed, parts)
    features = torch.randn(3, parts, 6, dtype=torch.float64)
    expected = [plain_order(image.numpy(), alignment.templates.numpy()) for image in features]
    assert alignment(features).tolist() == expected


@given(seed=seeds, shuffle=st.permutations(range(4)))
def test_the_order_of_the_input_does_not_matter(seed, shuffle):
    alignment = aligner(seed)
    features = torch.randn(3, 4, 6, dtype=torch.float64)
    shuffled = features[:, shuffle]
    aligned = reordered(features, alignment(features))
    torch.testing.assert_close(reordered(shuffled, alignment(shuffled)), aligned, rtol=0, atol=0)


@given(seed=seeds, shuffle=st.permutations(range(4)), scale=st.floats(0.1, 10))
def test_shuffled_templates_are_put_back_in_order(seed, shuffle, scale):
    alignment = aligner(seed)
    features = scale * alignment.templates[shuffle][None]
    torch.testing.assert_close(reordered(features, alignment(features))[0], scale * alignment.templates)


def test_before_the_first_update_the_order_is_the_identity():
    alignment = PartAlignment(4, 6)
    assert alignment(torch.randn(3, 4, 6)).tolist() == [[0, 1, 2, 3]] * 3


def test_templates_are_decayed_means_of_ordered_features():
    alignment = PartAlignment(3, 2).double()
    mean, seen = np.zeros((3, 2)), 0
    for count in (4, 2, 5):
        features = torch.randn(count, 3, 2, dtype=torch.float64)
        order = torch.stack([torch.randperm(3) for _ in range(count)])
        alignment.update(features, order)
        ordered = np.stack([f[o] for f, o in zip(features.numpy(), order.numpy(), strict=True)])
        mean = (0.9 * seen * mean + ordered.sum(0)) / (0.9 * seen + count)
        seen += count
    np.testing.assert_allclose(alignment.templates.numpy(), mean)
    assert int(alignment.seen) == 11
    assert set(alignment.state_dict()) == {"templates", "seen"}


def test_computing_the_order_changes_no_buffer():
    alignment = aligner(0)
    before = {name: value.clone() for name, value in alignment.state_dict().items()}
    alignment(torch.randn(3, 4, 6, dtype=torch.float64))
    for name, value in alignment.state_dict().items():
        assert torch.equal(value, before[name])


def test_zero_features_have_a_zero_gram_matrix():
    assert torch.equal(_normalised_gram(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 4))


def test_too_many_parts_are_refused():
    with pytest.raises(ValueError, match="parts must be in 2 … 6, not 7"):
        PartAlignment(7, 3)
