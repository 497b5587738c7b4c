"""Windows of distinct rows: the same whatever way their micro-batches are put together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.engram.distinct import Distinct, agreed_windows, merged
from model.parallel.group import Group


def micro_batches(seed: int, shapes: list[int]) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 30, (1, length, 2, 3), generator=dice) for length in shapes]


def windows_of(rows: list[Tensor], most: int | None, counts=(30, 30)) -> list[Distinct]:
    return agreed_windows(rows, layers=(1, 3), counts=counts, most=most, world=Group())


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 99), st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 60))
def test_windows_hold_each_row_once_and_give_every_read(seed, shapes, most) -> None:
    rows = micro_batches(seed, shapes)
    windows = windows_of(rows, most)
    number = 0
    for window in windows:
        sizes = []
        for layer in range(2):
            ids = window.ids[layer].tolist()
            assert ids == sorted(set(ids))
        read: list[set[int]] = [set(), set()]
        for inverses in window.inverses:
            distinct = 0
            for layer in range(2):
                asked = rows[number][:, :, layer]
                assert torch.equal(window.ids[layer][inverses[layer]], asked)
                read[layer] |= set(asked.flatten().tolist())
                distinct += len(asked.unique())
            sizes.append(distinct)
            number += 1
        assert [set(ids.tolist()) for ids in window.ids] == read
        assert len(sizes) == 1 or sum(sizes) <= most
    assert number == len(rows)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 99), st.lists(st.integers(1, 6), min_size=2, max_size=6), st.data())
def test_merging_in_any_order_gives_one_window(seed, shapes, data) -> None:
    rows = micro_batches(seed, shapes)
    parts = [Distinct.of([batch]) for batch in rows]
    cut = data.draw(st.integers(1, len(parts) - 1))
    whole, halves = merged(parts), merged([merged(parts[:cut]), merged(parts[cut:])])
    for other in (halves, Distinct.of(rows)):
        assert all(torch.equal(*pair) for pair in zip(whole.ids, other.ids, strict=True))
        for one, two in zip(whole.inverses, other.inverses, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_windows_are_as_large_as_they_may_be() -> None:
    rows = [torch.arange(6 * n, 6 * n + 6).view(1, 1, 2, 3) for n in range(5)]

    def lengths(most: int | None) -> list[int]:
        return [len(window.inverses) for window in windows_of(rows, most, counts=(99, 99))]

    assert lengths(6) == lengths(1) == [1] * 5
    assert lengths(12) == lengths(17) == [2, 2, 1]
    assert lengths(29) == [4, 1]
    assert lengths(30) == lengths(None) == [5]


@pytest.mark.parametrize("bad", [-1, 30, 2**40])
def test_rows_outside_a_table_are_named(bad: int) -> None:
    rows = micro_batches(0, [4, 4])
    rows[1][0, 2, 1, 1] = bad
    for most in (None, 1):
        with pytest.raises(ValueError, match=rf"layer 3 reach from .*{bad}.*another geometry"):
            windows_of(rows, most)
