"""Shares of a mixture hold over every stretch, and an index is found without counting."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.mixture import PERIOD, Mixture

WEIGHTS = st.lists(st.floats(0.001, 100), min_size=1, max_size=12).map(tuple)


@settings(deadline=None, max_examples=8)
@given(WEIGHTS, st.integers(0, 3 * PERIOD))
@example((1.0, 1e-9, 3.0), 17)
@example((0.1, 0.2, 0.3, 0.4), 0)
def test_any_thousand_packs_have_their_shares(weights, begin):
    mixture = Mixture.of(weights)
    sources = np.array([mixture.locate(i)[0] for i in range(begin, begin + 1000)])
    counts = np.bincount(sources, minlength=len(weights))
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts / 1000 - shares).max() < 0.01


@settings(deadline=None, max_examples=8)
@given(WEIGHTS)
def test_packs_of_a_source_are_numbered_without_gaps(weights):
    mixture = Mixture.of(weights)
    seen = [0] * len(weights)
    for index in range(PERIOD + 500):
        source, number = mixture.locate(index)
        assert number == seen[source]
        seen[source] += 1
    assert min(seen) > 0
    assert mixture.used(PERIOD + 500) == seen


def test_an_index_far_out_is_found_at_once():
    source, number = Mixture.of((3.0, 1.0)).locate(10**15)
    assert abs(number / 10**15 - (0.75, 0.25)[source]) < 1e-9


def test_one_source_has_every_pack():
    assert Mixture.of((7.0,)).locate(123) == (0, 123)
