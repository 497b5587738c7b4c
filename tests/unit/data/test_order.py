"""The order of samples depends on the seed and the global index alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.order import pack_indices, rank_indices, sharing_problems, split_documents


def test_every_epoch_is_another_permutation():
    found = pack_indices(np.arange(300), seed=3, packs=100).reshape(3, 100)
    for epoch in found:
        assert sorted(epoch) == list(range(100))
    assert (found[0] != found[1]).any()
    assert (found[1] != found[2]).any()
    assert (pack_indices(np.arange(100), seed=4, packs=100) != found[0]).any()


def test_the_order_is_the_one_that_earlier_runs_saw():
    assert pack_indices(np.arange(16), seed=7, packs=8).tolist() == [
        *[2, 7, 5, 1, 0, 6, 4, 3],
        *[7, 1, 5, 4, 2, 6, 3, 0],
    ]
    assert split_documents(20, holdout=0.2, seed=7)[1].tolist() == [3, 7, 12, 17]


@given(st.integers(-(2**63), 2**64), st.integers(1, 50), st.lists(st.integers(0, 500), min_size=1))
def test_an_index_stands_for_one_pack_however_it_is_asked_for(seed, packs, indices):
    together = pack_indices(np.array(indices), seed=seed, packs=packs)
    alone = [int(pack_indices(np.array([i]), seed=seed, packs=packs)[0]) for i in indices]
    assert together.tolist() == alone


def test_permutations_are_even():
    """Each pack comes to each place about equally often over seeds."""
    counts = np.zeros((5, 5))
    for seed in range(4000):
        counts[np.arange(5), pack_indices(np.arange(5), seed=seed, packs=5)] += 1
    # 16 degrees of freedom; 40 is passed once in 1,300 by chance, and the seeds are fixed.
    assert ((counts - 800) ** 2 / 800).sum() < 40


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4))
def test_ranks_take_neighbouring_slices_of_a_step(step, ranks, share):
    total = ranks * share
    slices = [rank_indices(step, packs_per_step=total, rank=r, ranks=ranks) for r in range(ranks)]
    assert np.concatenate(slices).tolist() == list(range(step * total, (step + 1) * total))
    assert {len(s) for s in slices} == {share}


def test_uneven_shares_name_the_fix():
    assert sharing_problems(packs_per_step=12, packs_per_micro_batch=2, ranks=3) == []
    [problem] = sharing_problems(packs_per_step=10, packs_per_micro_batch=2, ranks=3)
    assert "packs_per_step=10" in problem
    assert "use packs_per_step=12 or another multiple of 6" in problem


@given(st.integers(1, 300), st.floats(0, 0.999), st.integers(0, 1000))
def test_the_split_has_its_share_and_both_sides(count, holdout, seed):
    train, held = split_documents(count, holdout=holdout, seed=seed)
    assert sorted([*train, *held]) == list(range(count))
    assert len(train) >= 1
    if holdout == 0 or count == 1:
        assert len(held) == 0
    else:
        assert len(held) >= 1
        assert abs(len(held) - holdout * count) <= 1


@pytest.mark.parametrize("count", [50, 1000])
def test_the_split_follows_the_seed(count):
    one, two = (split_documents(count, holdout=0.1, seed=s)[1].tolist() for s in (1, 2))
    assert one != two
    assert one == split_documents(count, holdout=0.1, seed=1)[1].tolist()
