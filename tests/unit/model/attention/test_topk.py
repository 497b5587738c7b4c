"""Top-k against python's sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.topk import chosen_positions, ordered, positions_of

VALUES = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf]


def slow(scores: list[float], position: list[int], k: int) -> list[int]:
    live = [(-s, p) for s, p in zip(scores, position, strict=True) if s != -math.inf]
    chosen = sorted(p for _, p in sorted(live)[:k])
    return chosen + [-1] * (k - len(chosen))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(st.lists(st.sampled_from(VALUES), min_size=7, max_size=7), min_size=1),
    k=st.integers(1, 9),
    first=st.sampled_from([0, 5, 2**31 - 20]),
)
def test_like_a_sort(rows: list[list[float]], k: int, first: int) -> None:
    position = list(range(first, first + 7))
    found = chosen_positions(torch.tensor(rows), torch.tensor(position), k)
    assert found.dtype == torch.int64
    assert found.tolist() == [slow(row, position, k) for row in rows]


def test_positions_need_not_be_in_order_nor_shared() -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0], [2.0, 5.0, 5.0, 5.0]])
    position = torch.tensor([[9, 3, 7, 1], [4, 8, 6, 2]])
    assert chosen_positions(scores, position, 2).tolist() == [[3, 7], [2, 6]]


def test_random_scores_many_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (50, 40), generator=generator).float()
    scores.masked_fill_(torch.rand(50, 40, generator=generator) < 0.3, -torch.inf)
    found = chosen_positions(scores, torch.arange(40), 12)
    assert found.tolist() == [slow(row, list(range(40)), 12) for row in scores.tolist()]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_order_like_scores_and_give_positions_back(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(300, generator=generator).to(kind)
    position = torch.randperm(300, generator=generator)
    keys = ordered(scores, position)
    assert keys.unique().numel() == 300
    wanted = sorted(zip(scores.tolist(), (-position).tolist(), strict=True))
    assert positions_of(keys.sort().values).tolist() == [-p for _, p in wanted]


def test_the_smallest_step_of_a_float_counts() -> None:
    above = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    scores = torch.tensor([[1.0, above]])
    assert chosen_positions(scores, torch.arange(2), 1).tolist() == [[1]]


def test_both_zeros_tie() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0], [0.0, -0.0, 0.0]])
    assert chosen_positions(scores, torch.arange(3), 1).tolist() == [[0], [0]]
    assert chosen_positions(scores, torch.arange(3), 2).tolist() == [[0, 1], [0, 1]]
