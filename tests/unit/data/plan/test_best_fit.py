"""Best fit against a slow search, and how tight and fast it is."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.plan.best_fit import best_fit


def slow_bins(sizes: list[int], capacity: int) -> list[list[int]]:
    """The sizes in each bin, by the rule itself: looking at every item and every pair."""
    left, bins = sorted(sizes), []
    while left:
        space, taken = capacity, []
        while fitting := [size for size in left if size <= space]:
            chosen = [fitting[-1]]
            if space <= 2 * left[-1]:
                pairs = [(x, y) for x, y in combinations(left, 2) if x + y == space]
                if space in left:
                    chosen = [space]
                elif pairs:
                    chosen = list(max(pairs))  # of equal sums, the one with the largest smaller
            for size in chosen:
                left.remove(size)
                taken.append(size)
                space -= size
        bins.append(sorted(taken))
    return bins


CASES = st.integers(1, 40).flatmap(
    lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=40))
)


@settings(deadline=None)
@given(CASES | st.tuples(st.just(5000), st.lists(st.integers(1, 5000), max_size=40)))
def test_bins_hold_what_a_slow_search_puts_in_them(case):
    capacity, sizes = case
    order, bins = best_fit(np.array(sizes, dtype=np.int64), capacity=capacity)
    assert order.tolist() == sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    found = [
        sorted(np.array(sizes)[order[bins == b]].tolist()) for b in range(max(bins, default=-1) + 1)
    ]
    assert found == slow_bins(sizes, capacity)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean", [5.0, 6.0, 7.0])
def test_log_normal_sizes_leave_hardly_a_gap_but_in_the_last_bin(mean, seed):
    sizes = np.random.default_rng(seed).lognormal(mean, 1.0, 30_000).astype(np.int64)
    sizes = sizes[sizes <= 8192].clip(1)
    _, bins = best_fit(sizes, capacity=8192)
    assert bins.max() + 1 == -(-sizes.sum() // 8192)


@pytest.mark.parametrize("capacity", [2048, 2**13])
def test_a_hundred_thousand_items_take_a_second(capacity):
    sizes = np.random.default_rng(1).integers(1, capacity + 1, 100_000)
    begin = time.thread_time()
    order, bins = best_fit(sizes, capacity=capacity)
    assert time.thread_time() - begin < 1.2  # 5 million a minute; 0.1 s when written
    fills = np.bincount(bins, weights=sizes[order])
    assert fills.max() <= capacity
    assert len(fills) * capacity < sizes.sum() * 1.01
