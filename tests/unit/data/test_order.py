"""The order of samples depends on the seed and the global index alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import (
    SourceOrder,
    permutation,
    rank_indices,
    sharing_problems,
    split_documents,
)


class Windows:
    """Windows with given counts of packs; notes which were asked for."""

    def __init__(self, *packs: int, known: bool = True) -> None:
        self.counts, self.known = packs, known
        self.asked: list[int] = []

    @property
    def total(self) -> int | None:
        return len(self.counts) if self.known else None

    def packs(self, window: int) -> int | None:
        self.asked.append(window)
        if window < len(self.counts):
            return self.counts[window]
        self.known = True
        return None


def order(windows: Windows, *, seed: int = 3, source: int = 0, arrival: bool = False):
    return SourceOrder(windows, seed=seed, source=source, arrival=arrival)


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)


@settings(deadline=None)
@given(COUNTS, st.integers(0, 99), st.booleans())
def test_every_epoch_has_each_pack_once_window_by_window(counts, seed, arrival):
    windows = Windows(*counts, known=not arrival)
    found = order(windows, seed=seed, arrival=arrival)
    every = [(w, p) for w, packs in enumerate(counts) for p in range(packs)]
    for epoch in range(3):
        first = epoch * len(every)
        here = [found.locate(first + i) for i in range(len(every))]
        assert {e for e, _, _ in here} == {epoch}
        assert sorted((w, p) for _, w, p in here) == every
        changes = [w for i, (_, w, _) in enumerate(here) if not i or here[i - 1][1] != w]
        assert len(changes) == len(set(changes))
        if arrival and epoch == 0:
            assert changes == sorted(changes)


@settings(deadline=None)
@given(COUNTS, st.integers(0, 99), st.booleans(), st.lists(st.integers(0, 100), min_size=1))
def test_a_number_stands_for_one_pack_however_it_is_asked_for(counts, seed, arrival, numbers):
    used = order(Windows(*counts), seed=seed, arrival=arrival)
    for number in numbers:
        fresh = order(Windows(*counts), seed=seed, arrival=arrival)
        assert used.locate(number) == fresh.locate(number)


def test_epochs_seeds_and_sources_differ():
    def sequence(epoch=0, **changes):
        found = order(Windows(40, 40, 40), **changes)
        return [found.locate(epoch * 120 + i)[1:] for i in range(120)]

    variants = [sequence(), sequence(1), sequence(2), sequence(seed=4), sequence(source=1)]
    assert len({tuple(v) for v in variants}) == len(variants)


def test_only_windows_that_are_needed_are_asked_for():
    windows = Windows(10, 10, 10, 10)
    found = order(windows)
    found.locate(9)
    assert len(windows.asked) == 1
    found.locate(10)
    assert len(windows.asked) == 2
    arriving = Windows(10, 10, known=False)
    order(arriving, arrival=True).locate(9)
    assert arriving.asked == [0]


def test_the_window_that_comes_next_is_known():
    found = order(Windows(2, 2, 2))
    sequence = [found.locate(i)[1] for i in range(12)]
    for i in range(6):
        found.locate(i)
        later = [w for w in sequence[i:6] if w != sequence[i]]
        assert found.next_window(i) == (later[0] if later else None)
    found.locate(6)
    assert found.next_window(6) == sequence[8]
    arriving = order(Windows(2, 2, known=False), arrival=True)
    arriving.locate(1)
    assert arriving.next_window(1) == 1


def test_no_pack_at_all_is_refused():
    with pytest.raises(ValueError, match="no pack"):
        order(Windows(0, 0)).locate(0)


def test_the_order_is_the_one_that_earlier_runs_saw():
    found = order(Windows(5, 3), seed=7)
    assert [found.locate(i)[1:] for i in range(10)] == [
        *[(0, 2), (0, 1), (0, 4), (0, 3), (0, 0), (1, 1), (1, 0), (1, 2)],
        *[(0, 0), (0, 1)],
    ]
    assert split_documents(20, holdout=0.2, seed=7)[1].tolist() == [3, 7, 12, 17]


def test_permutations_are_even():
    """Each pack comes to each place about equally often over seeds."""
    counts = np.zeros((5, 5))
    for seed in range(4000):
        counts[np.arange(5), permutation(5, seed, 3)] += 1
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
def test_the_split_follows_seed_and_window(count):
    def held(seed, window):
        return split_documents(count, holdout=0.1, seed=seed, window=window)[1].tolist()

    assert held(1, 0) == held(1, 0)
    assert len({tuple(held(*which)) for which in ((1, 0), (2, 0), (1, 1))}) == 3
