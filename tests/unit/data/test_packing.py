"""Best fit against a slow search, and the plan's promises."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import best_fit, plan_packs, ranges


def slow_best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Items of each bin, by looking at every bin for every item."""
    bins: list[list[int]] = []
    free: list[int] = []
    changed: list[int] = []  # bins by their last change: of the equally full, the latest is taken
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [b for b in changed if free[b] >= sizes[item]]
        if fitting:
            least = min(free[b] for b in fitting)
            chosen = [b for b in fitting if free[b] == least][-1]
            changed.remove(chosen)
        else:
            chosen = len(bins)
            bins.append([])
            free.append(capacity)
        changed.append(chosen)
        bins[chosen].append(item)
        free[chosen] -= sizes[item]
    return bins


@settings(deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))
    )
)
def test_best_fit_is_what_a_slow_search_finds(case):
    capacity, sizes = case
    bins = best_fit(np.array(sizes, dtype=np.int64), capacity=capacity)
    expected = slow_best_fit(sizes, capacity)
    assert [sorted(np.flatnonzero(bins == b)) for b in range(len(expected))] == [
        sorted(items) for items in expected
    ]


documents = st.tuples(
    st.lists(st.integers(2, 90), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5),
)


@settings(deadline=None)
@given(documents, st.data())
def test_every_piece_stands_once_aligned_inside_its_row(case, data):
    lengths, alignment, groups = case
    pack_length = alignment * groups * 2
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    chosen = np.array(
        sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))), dtype=np.int64
    )
    plan = plan_packs(offsets, chosen, pack_length=pack_length, alignment=alignment)

    expected = []
    for document in chosen.tolist():
        start, left = int(offsets[document]), lengths[document]
        while left > 0:
            expected.append((start, min(left, pack_length)))
            start, left = start + pack_length, left - pack_length
    found = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    assert sorted(found) == sorted(expected)

    assert plan.pack_offsets[0] == 0
    assert plan.pack_offsets[-1] == len(plan.starts)
    for pack in range(len(plan)):
        here = slice(int(plan.pack_offsets[pack]), int(plan.pack_offsets[pack + 1]))
        taken = 0
        assert plan.columns[here].size
        for column, length in zip(plan.columns[here], plan.lengths[here], strict=True):
            assert column % alignment == 0
            assert taken <= column < taken + alignment
            taken = column + length
        assert taken <= pack_length


def test_the_plan_is_deterministic_and_tight():
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 20_000).astype(np.int64).clip(2)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    every = np.arange(len(lengths))
    one = plan_packs(offsets, every, pack_length=4096, alignment=2)
    two = plan_packs(offsets, every, pack_length=4096, alignment=2)
    for name in ("pack_offsets", "starts", "lengths", "columns"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert lengths.sum() / (len(one) * 4096) > 0.99


@pytest.mark.parametrize("capacity", [2048, 32768])
def test_a_hundred_thousand_documents_take_seconds(capacity):
    sizes = np.random.default_rng(1).integers(1, capacity + 1, 100_000)
    begin = time.perf_counter()
    bins = best_fit(sizes, capacity=capacity)
    assert time.perf_counter() - begin < 5  # 0.2 s on an idle core
    assert np.bincount(bins, weights=sizes).max() <= capacity
    assert (bins.max() + 1) * capacity < sizes.sum() * 1.01


def test_no_document_gives_no_pack():
    plan = plan_packs(np.array([0, 5]), np.array([], dtype=np.int64), pack_length=8, alignment=2)
    assert len(plan) == 0


def test_ranges():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
