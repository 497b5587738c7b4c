"""Rows of matrices that come together on one rank each, and go back: threads stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.parallel.group import Group
from trainer.muon_exchange import Exchange


class Post:
    """What `size` threads send each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.letters: dict[tuple[int, int], Tensor] = {}


@dataclass(frozen=True)
class Threads(Group):
    post: Post | None = None

    def all_to_all_rows(
        self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        assert self.post is not None
        for target, rows in enumerate(tensor.split(list(send))):
            self.post.letters[self.rank, target] = rows
        self.post.barrier.wait()
        found = [self.post.letters[source, self.rank] for source in range(self.size)]
        assert [len(rows) for rows in found] == list(receive)
        self.post.barrier.wait()
        return torch.cat(found)


@st.composite
def divided(draw: st.DrawFn) -> tuple[int, list[list[int]], int]:
    """(rows of a matrix, by matrix the rows on each rank, where the first one goes)."""
    ranks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    matrices = []
    for _ in range(draw(st.integers(1, 6))):
        edges = sorted(draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
        edges = [0, *edges, rows]
        matrices.append([high - low for low, high in pairwise(edges)])
    return rows, matrices, draw(st.integers(0, 7))


@given(divided())
@settings(max_examples=40, deadline=None)
def test_matrices_come_together_and_every_row_finds_its_way_back(case) -> None:
    rows, held, start = case
    ranks, columns = len(held[0]), 3
    whole = torch.arange(len(held) * rows * columns).view(len(held), rows, columns).float()
    post = Post(ranks)

    def one(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        low = [sum(heights[:rank]) for heights in held]
        mine = torch.cat([m[a : a + h[rank]] for m, a, h in zip(whole, low, held, strict=True)])
        group = Threads(rank, ranks, post=post)
        exchange = Exchange(held, group, start=start, device=torch.device("cpu"))
        together = exchange.gather(mine)
        return mine, together, exchange.scatter(together * 2)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(one, range(ranks)))
    for rank, (mine, together, back) in enumerate(found):
        own = [m for j, m in enumerate(whole) if (start + j) % ranks == rank]
        assert torch.equal(together, torch.cat(own) if own else whole[:0].flatten(0, 1))
        assert torch.equal(back, 2 * mine)
