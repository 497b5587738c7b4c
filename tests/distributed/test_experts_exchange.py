"""Experts divided over ranks give each token what they give it on one rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.moe.experts import Experts, MoE
from model.moe.router import Routing
from model.parallel.group import Group
from model.parallel.mesh import build_mesh
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

GOLDEN = Path(__file__).parents[1] / "golden"
EXPERTS, K, TOKENS = 8, 3, 29
WHOLE = 1 << 30  # a workspace that takes all experts at once


def small() -> ModelConfig:
    document = json.loads((GOLDEN / "tiny_text/config.json").read_text())
    base = ModelConfig.from_released(document)
    return dataclasses.replace(base, n_routed_experts=EXPERTS, num_experts_per_tok=K)


@dataclass(frozen=True)
class Recorded(Group):
    """Notes the rows of width `width` that this rank sends to each other rank."""

    width: int = 0
    sent: list[list[int]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def all_to_all_rows(self, tensor: Tensor, *, send, receive) -> Tensor:
        if tensor.ndim == 2 and tensor.shape[1] == self.width:
            self.sent.append(list(send))
            self.received.append(sum(receive))
        return super().all_to_all_rows(tensor, send=send, receive=receive)


@dataclass(frozen=True)
class Case:
    """Which experts the tokens of every rank choose, and how they are run.

    among: by rank, the experts that its tokens choose from. dead: ranks that hold padding alone.
    """

    among: list[list[int]]
    workspace: int = WHOLE
    known: bool = False
    dtype: torch.dtype = torch.float32
    dead: tuple[int, ...] = ()

    def rank(self, rank: int) -> tuple[Tensor, Routing, Tensor]:
        """x, routing and the gradient of y, of one rank; every fifth token is padding."""
        draw = torch.Generator().manual_seed(100 + rank)
        mine = torch.tensor(self.among[rank])
        chosen = mine[torch.rand(TOKENS, len(mine), generator=draw).argsort(-1)[:, :K]]
        chosen[4::5] = EXPERTS
        if rank in self.dead:
            chosen[:] = EXPERTS
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS + 1)[None, :EXPERTS]
        weights = torch.rand(TOKENS, chosen.shape[1], generator=draw) + 0.1
        width = small().hidden_size
        x, grad = torch.randn(2, TOKENS, width, generator=draw).to(self.dtype)
        return x, Routing(chosen, weights, counts), grad


def whole_experts(case: Case, ep: Group = Group()) -> Experts:  # noqa: B008, frozen
    own = Experts(small(), ep=ep)
    own.workspace_bytes = case.workspace
    draw = torch.Generator().manual_seed(1)
    for p in own.parameters():
        p.data = (torch.randn(p.shape, generator=draw) * 0.3).to(case.dtype)
    return own


def outcome(
    own: Experts, x: Tensor, routing: Routing, grad: Tensor, known: Tensor | None
) -> dict[str, Tensor]:
    x, weights = x.requires_grad_(), routing.weights.requires_grad_()
    y = own(x, routing, known=known)
    found = torch.autograd.grad(y, [x, weights, own.w13, own.w2], grad)
    return dict(zip(("y", "x", "weights", "w13", "w2"), (y.detach(), *found), strict=True))


def one_rank(case: Case) -> dict[str, Tensor]:
    """All ranks' tokens on one."""
    parts = [case.rank(rank) for rank in range(len(case.among))]
    routing = Routing(
        torch.cat([r.experts for _, r, _ in parts]),
        torch.cat([r.weights for _, r, _ in parts]),
        sum((r.counts for _, r, _ in parts), torch.zeros(1, EXPERTS, dtype=torch.int64)),
    )
    x, grad = torch.cat([x for x, _, _ in parts]), torch.cat([g for _, _, g in parts])
    return outcome(whole_experts(case), x, routing, grad, None)


def exchanged(case: Case) -> tuple[dict[str, Tensor], list[list[int]], list[int]]:
    """This rank's part, the rows that it has sent in each message, and those received."""
    n = len(case.among)
    ep = build_mesh(dp_shard=n, ep=n).ep
    recorded = Recorded(ep.rank, n, ep.process_group, width=small().hidden_size)
    own = whole_experts(case, recorded)
    cut(own, ep)
    x, routing, grad = case.rank(ep.rank)
    known = None
    if case.known:
        with torch.no_grad():
            known = own(x, routing)
        recorded.sent.clear()
        recorded.received.clear()
    return outcome(own, x, routing, grad, known), recorded.sent, recorded.received


def cut(own: Experts, ep: Group) -> None:
    for name in ("w13", "w2"):
        whole = getattr(own, name).data
        setattr(own, name, nn.Parameter(whole.chunk(ep.size)[ep.rank].clone()))


def relative(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double() - wanted.double()).norm()
    return 0.0 if difference == 0 else float(difference / wanted.double().norm())


ALL = list(range(EXPERTS))
CASES = {
    "two ranks": Case([ALL, ALL]),
    "uneven": Case([[0, 1, 2, 5], [0, 1, 2]]),
    "one without live tokens": Case([ALL, ALL], dead=(1,)),
    "none has live tokens": Case([ALL, ALL], dead=(0, 1)),
    "all to one expert": Case([[6], [6]]),
    "small workspace": Case([ALL, ALL], workspace=20_000),
    "known": Case([ALL, ALL], workspace=20_000, known=True),
    "bfloat16": Case([ALL, ALL], dtype=torch.bfloat16),
    "four ranks": Case([ALL, [0, 1, 2], ALL, [3, 7, 5]]),
    "four ranks, all tokens to the last": Case([[6, 7]] * 4, workspace=1),
    "four ranks, known": Case([[0, 1, 4]] * 4, workspace=1, known=True, dead=(2,)),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_rank(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    wanted = one_rank(case)
    found = [part for part, _, _ in ranks.run(len(case.among), exchanged, case)]
    together = {key: torch.cat([part[key] for part in found]) for key in found[0]}
    for key in ("y", "x", "weights"):
        assert torch.equal(together[key], wanted[key]), key
    for key in ("w13", "w2"):  # sums over tokens, whose order is another
        assert together[key].dtype == case.dtype
        assert relative(together[key], wanted[key]) < (
            1e-6 if case.dtype == torch.float32 else 1e-2
        )
    if not case.dead:
        assert wanted["w13"].any()
        assert wanted["y"].any()


def visits(case: Case, rank: int) -> tuple[list[int], list[int]]:
    """By destination: this rank's tokens with an expert there, and its slots there."""
    n = len(case.among)
    experts = case.rank(rank)[1].experts.tolist()
    homes = [[e * n // EXPERTS for e in chosen if e < EXPERTS] for chosen in experts]
    tokens = [sum(to in there for there in homes) for to in range(n)]
    return tokens, [sum(there.count(to) for there in homes) for to in range(n)]


@pytest.mark.parametrize("name", ["two ranks", "four ranks", "small workspace", "known"])
def test_a_row_goes_once_to_a_rank(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    n, fewer = len(case.among), 0
    for rank, (_, sent, _) in enumerate(ranks.run(n, exchanged, case)):
        tokens, _ = visits(case, rank)
        back = [visits(case, other)[1][rank] for other in range(n)]
        forward = [] if case.known else [tokens, back]
        again = [] if case.workspace == WHOLE else [tokens]  # x, whose rows have not been kept
        assert sent == [*forward, *again, tokens, back]
        fewer += sum(visits(case, rank)[1]) - sum(tokens)
    assert fewer > 0, "some tokens have two experts on a rank"


def test_a_rank_that_all_tokens_go_to_takes_them_in_rounds(ranks: Ranks) -> None:
    case = CASES["four ranks, all tokens to the last"]
    slots = sum(visits(case, 0)[1])
    received = [rows for _, _, rows in ranks.run(4, exchanged, case)]
    assert len({len(rows) for rows in received}) == 1
    assert all(max(rows) <= 2 * slots for rows in received)


def loads() -> tuple[Tensor, Tensor, Tensor]:
    """Of a router and experts over two ranks: y and counts of this rank, and those of one rank."""
    ep = build_mesh(dp_shard=2, ep=2).ep
    divided, single = MoE(small(), ep=ep), MoE(small())
    draw = torch.Generator().manual_seed(3)
    for one, other in zip(divided.parameters(), single.parameters(), strict=True):
        one.data = torch.randn(one.shape, generator=draw) * 0.3
        other.data = one.data.clone()
    cut(divided.experts, ep)
    draw = torch.Generator().manual_seed(ep.rank)
    x = torch.randn(TOKENS, small().hidden_size, generator=draw)
    live, image = torch.rand(2, TOKENS, generator=draw) < 0.6
    out, alone = divided(x, live, image), single(x, live, image)
    assert torch.equal(out.y, alone.y)
    return (
        out.counts,
        alone.counts,
        torch.tensor([int((live & ~image).sum()), int((live & image).sum())]),
    )


def test_a_rank_counts_its_own_tokens(ranks: Ranks) -> None:
    """A step adds up the ranks' counts: received tokens must not be in them."""
    for counts, alone, tokens in ranks.run(2, loads):
        assert torch.equal(counts, alone)
        assert counts.sum(1).tolist() == [K * int(t) for t in tokens]
