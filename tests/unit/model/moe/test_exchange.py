"""Any routing over any number of ranks gives what one rank gives. The ranks are threads here; real
processes are in tests/distributed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.moe.exchange import ExchangedExperts, Trip, plan
from model.moe.routed import ExpertWeights, RoutedExperts
from model.moe.router import Routing
from model.parallel.group import Group

# Whole vectors: what is left over at the end of a tensor is rounded otherwise by some kernels.
WIDTH, INNER, LIMIT = 32, 32, 1.0


@dataclass
class Board:
    """Where the threads leave messages for each other."""

    barrier: threading.Barrier
    messages: dict[int, Sequence[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Threads(Group):
    board: Board = field(default_factory=lambda: Board(threading.Barrier(1)))

    def _swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        self.board.messages[self.rank] = parts
        self.board.barrier.wait(30)
        found = [self.board.messages[rank][self.rank] for rank in range(self.size)]
        self.board.barrier.wait(30)
        return found

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._swap([tensor] * self.size))

    def all_to_all_rows(
        self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        found = self._swap(tensor.split(list(send)))
        assert [len(part) for part in found] == list(receive)
        return torch.cat(found)


@dataclass(frozen=True)
class Case:
    experts: int  # of each rank
    chosen: list[list[list[int]]]  # by rank and token; [] is a token of padding
    k: int
    workspace: int
    known: bool

    @property
    def total(self) -> int:
        return self.experts * len(self.chosen)

    def routing(self, rank: int) -> Routing:
        rows = [list(token) or [self.total] * self.k for token in self.chosen[rank]]
        experts = torch.tensor(rows)
        counts = torch.bincount(experts.flatten(), minlength=self.total + 1)[None, : self.total]
        draw = torch.Generator().manual_seed(rank)
        weights = torch.rand(experts.shape, generator=draw) + 0.1
        return Routing(experts, weights.requires_grad_(), counts)

    def tokens(self, rank: int) -> tuple[Tensor, Tensor]:
        """x and the gradient of y."""
        draw = torch.Generator().manual_seed(100 + rank)
        x, grad = torch.randn(2, len(self.chosen[rank]), WIDTH, generator=draw)
        return x.requires_grad_(), grad

    def weights(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(7)
        w13 = torch.randn(self.total, 2 * INNER, WIDTH, generator=draw)
        return w13, torch.randn(self.total, WIDTH, INNER, generator=draw)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, experts = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    total = ranks * experts
    k = draw(st.integers(1, total))
    choice = st.lists(st.integers(0, total - 1), min_size=k, max_size=k, unique=True)
    # Often all ranks' tokens like the same few experts.
    favourite = st.just(sorted(range(total), key=lambda e: -e)[:k])
    token = st.one_of(choice, favourite, favourite, st.just([]))
    rank = st.lists(token, min_size=1, max_size=9)
    return Case(
        experts=experts,
        chosen=draw(st.lists(rank, min_size=ranks, max_size=ranks)),
        k=k,
        workspace=draw(st.sampled_from([1, 30_000, 1 << 30])),
        known=draw(st.booleans()),
    )


def over_ranks(case: Case, run) -> list:
    n = len(case.chosen)
    board = Board(threading.Barrier(n))
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, [Threads(rank, n, None, board) for rank in range(n)]))


def one_rank(case: Case) -> list[Tensor]:
    n = len(case.chosen)
    routings, tokens = zip(*((case.routing(r), case.tokens(r)) for r in range(n)), strict=True)
    routing = Routing(
        torch.cat([r.experts for r in routings]),
        torch.cat([r.weights for r in routings]).detach().requires_grad_(),
        torch.stack([r.counts for r in routings]).sum(0),
    )
    x = torch.cat([x for x, _ in tokens]).detach().requires_grad_()
    w13, w2 = (w.requires_grad_() for w in case.weights())
    own = (LIMIT, case.workspace)
    y = RoutedExperts.apply(x, routing.weights, w13, w2, None, routing, own)
    assert isinstance(y, Tensor)
    grads = torch.autograd.grad(
        y, [x, routing.weights, w13, w2], torch.cat([grad for _, grad in tokens])
    )
    return [y, *grads]


@settings(max_examples=20, deadline=None)
@given(cases())
def test_any_routing_gives_what_one_rank_gives(case: Case) -> None:
    def run(ep: Group) -> list[Tensor]:
        routing, (x, grad) = case.routing(ep.rank), case.tokens(ep.rank)
        mine = [w.chunk(ep.size)[ep.rank].clone().requires_grad_() for w in case.weights()]
        leaves, known = [x, routing.weights, *mine], None
        own = (LIMIT, case.workspace)
        for _ in range(1 + case.known):
            y = ExchangedExperts.apply(*leaves, known, routing, own, ep)
            assert isinstance(y, Tensor)
            known = y.detach()
        return [y, *torch.autograd.grad(y, leaves, grad)]

    found = [torch.cat(parts) for parts in zip(*over_ranks(case, run), strict=True)]
    y, by_x, by_weights, by_w13, by_w2 = one_rank(case)
    for one, other in zip(found[:3], (y, by_x, by_weights), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[3:], (by_w13, by_w2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _plan(case: Case, experts: ExpertWeights, ep: Group) -> Trip:
    routing = case.routing(ep.rank)
    return plan(routing, routing.weights.detach(), experts, ep)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_rounds_carry_every_row_once_and_no_rank_more_than_its_share(case: Case) -> None:
    w13, w2 = case.weights()
    experts = ExpertWeights(w13, w2, LIMIT, case.workspace)
    trips = over_ranks(case, lambda ep: _plan(case, experts, ep))
    n, per = len(case.chosen), case.experts
    slots = [sum(map(len, tokens)) for tokens in case.chosen]
    room = max(2 * max(slots), case.workspace // (3 * WIDTH * 4))
    assert len({(len(trip.rounds), trip.whole) for trip in trips}) == 1
    for rank, trip in enumerate(trips):
        assert len(trip.slot) == slots[rank]
        for turn in trip.rounds:
            sent = turn.token.split(turn.rows.send)
            assert all(len(set(part.tolist())) == len(part) for part in sent)
            assert len(turn.slots.sizes) == 1 or sum(turn.outputs.receive) <= room
        for to in range(n):
            wanted = {
                t
                for t, chosen in enumerate(case.chosen[rank])
                if any(e // per == to for e in chosen)
            }
            sent = [turn.token.split(turn.rows.send)[to].tolist() for turn in trip.rounds]
            assert set().union(*sent) == wanted
