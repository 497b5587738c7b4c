"""The indexer against loops over documents, on whole numbers, where scores are exact and tie."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention.indexer import Candidates, Indexer
from model.layout import VisibleRange
from model.quantization.cache import mxfp4_fake_quant
from model.rope import rotate, rotation

pytestmark = pytest.mark.usefixtures("each_way")

WORKSPACES = [1, 3_000, 40_000, 1 << 24]


class Case(NamedTuple):
    q: Tensor
    weights: Tensor
    keys: Tensor
    seen: VisibleRange
    origin: Tensor
    places: list[tuple[int, int]]  # (first token, tokens), at multiples of the alignment
    ratio: int


def case(indexer: Indexer, lengths: list[int], *, ratio: int, step: int, seed: int = 0) -> Case:
    places, at = [], 0
    for n in lengths:
        places.append((at, n))
        at += -(-n // step) * step
    at += step  # padding at the end
    low, high = torch.zeros(at).long(), torch.zeros(at).long()
    origin = torch.arange(at // ratio)
    for first, n in places:
        low[first : first + n] = first // ratio
        high[first : first + n] = first // ratio + (torch.arange(n) + 1) // ratio
        # A group that the document's end cuts short is still its own.
        origin[first // ratio : -(-(first + n) // ratio)] = first // ratio
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    q, weights = whole(at, indexer.heads, indexer.dim), whole(at, indexer.heads)
    keys = whole(at // ratio, indexer.dim)
    return Case(q, weights, keys, VisibleRange(low, high), origin, places, ratio)


def score(c: Case, t: int, g: int) -> float:
    q, w, k = c.q[t].tolist(), c.weights[t].tolist(), c.keys[g].tolist()
    products = (sum(a * b for a, b in zip(head, k, strict=True)) for head in q)
    return sum(v * max(p, 0.0) for v, p in zip(w, products, strict=True))


def best(scores: dict[int, float], k: int) -> list[int]:
    """Ties keep the lower position."""
    return sorted(sorted(scores, key=lambda g: (-scores[g], g))[:k])


def slow(c: Case, *, topk: int, blocks: int, size: int) -> tuple[list, list, list]:
    """Of every token: the selection, its candidate positions, the selection among those."""
    tokens = c.q.shape[0]
    plain, pools, pooled = ([[] for _ in range(tokens)] for _ in range(3))
    for first, n in c.places:
        base = first // c.ratio
        for i in range(n):
            t, count = first + i, (i + 1) // c.ratio
            scores = {base + g: score(c, t, base + g) for g in range(count)}
            plain[t] = best(scores, topk)
            if not count:
                continue
            by_block = {
                b: max(scores[base + g] for g in range(b * size, min((b + 1) * size, count)))
                for b in range(-(-count // size))
            }
            by_block[(count - 1) // size] = float("inf")
            kept = best(by_block, blocks)
            pools[t] = [base + g for b in kept for g in range(b * size, min((b + 1) * size, count))]
            pooled[t] = best({g: scores[g] for g in pools[t]}, topk)
    return plain, pools, pooled


def filled(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


@pytest.fixture
def indexer(make_config: Callable) -> Indexer:
    config = make_config(
        index_n_heads=3, index_topk=5, candidate_block_size=3, candidate_topk_blocks=3
    )
    return Indexer(config, makes_keys=True)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize(
    ("lengths", "ratio", "step"),
    [
        ([1, 17, 8, 30, 2], 1, 1),
        ([1, 17, 8, 30, 2], 2, 2),
        ([4, 23, 1, 11, 3], 3, 6),
        ([60], 1, 1),
        ([1, 1, 1], 2, 2),
    ],
)
def test_selection_candidates_and_later_sources(
    indexer: Indexer, workspace: int, lengths: list[int], ratio: int, step: int
) -> None:
    indexer.workspace_bytes = workspace
    c = case(indexer, lengths, ratio=ratio, step=step)
    plain, pools, pooled = slow(c, topk=5, blocks=3, size=3)

    selected, none = indexer.select(c.q, c.weights, c.keys, c.seen)
    assert none is None
    assert selected.dtype == torch.int64
    assert selected.tolist() == filled(plain, 5)

    selected, made = indexer.select(c.q, c.weights, c.keys, c.seen, origin=c.origin)
    assert made is not None
    assert selected.tolist() == filled(plain, 5)
    tokens = c.q.shape[0]
    entries = made.entries(0, tokens, c.seen.high)
    assert [sorted(e for e in row if e >= 0) for row in entries.tolist()] == pools
    assert made.first.dtype == torch.int32

    selected, same = indexer.select(c.q, c.weights, c.keys, c.seen, pool=made)
    assert same is made
    assert selected.tolist() == filled(pooled, 5)


def test_the_newest_block_is_forced_in_and_others_give_way(indexer: Indexer) -> None:
    """Key g scores -g: the newest block is the worst, and takes the place of a better one."""
    c = case(indexer, [15], ratio=1, step=1)
    q, weights, keys = (torch.zeros_like(x) for x in (c.q, c.weights, c.keys))
    q[:, 0, 0], weights[:, 0] = 1.0, -1.0
    keys[:, 0] = torch.arange(len(keys))
    _, made = indexer.select(q, weights, keys, c.seen, origin=c.origin)
    assert made is not None
    assert made.first[14].tolist() == [0, 3, 12]
    assert made.first[4].tolist() == [0, 3, -1]
    # Token 12 sees one entry of the newest block.
    assert made.entries(12, 13, c.seen.high[12:13]).tolist() == [[0, 1, 2, 3, 4, 5, 12, -1, -1]]


def test_blocks_restart_in_every_document(indexer: Indexer) -> None:
    c = case(indexer, [5, 10], ratio=1, step=1)
    _, made = indexer.select(c.q, c.weights, c.keys, c.seen, origin=c.origin)
    assert made is not None
    assert made.first[14].tolist() == sorted(made.first[14].tolist())
    assert set(made.first[5:15].flatten().tolist()) <= {-1, 5, 8, 11, 14}
    assert set(made.first[:5].flatten().tolist()) == {-1, 0, 3}


def test_a_short_last_block_does_not_reach_into_the_next_document() -> None:
    pool = Candidates(torch.tensor([[0, 3], [0, -1]], dtype=torch.int32), 3)
    assert pool.entries(0, 2, torch.tensor([5, 2])).tolist() == [
        [0, 1, 2, 3, 4, -1],
        [0, 1, -1, -1, -1, -1],
    ]
    assert pool.entries(1, 2, torch.tensor([1])).tolist() == [[0, -1, -1, -1, -1, -1]]


def test_a_later_source_takes_nothing_outside_the_pool(indexer: Indexer) -> None:
    c = case(indexer, [12], ratio=1, step=1)
    first = torch.full((c.q.shape[0], 3), -1, dtype=torch.int32)
    first[11] = torch.tensor([3, 9, -1])
    selected, _ = indexer.select(c.q, c.weights, c.keys, c.seen, pool=Candidates(first, 3))
    inside = {g: score(c, 11, g) for g in (3, 4, 5, 9, 10, 11)}
    assert selected[11].tolist() == best(inside, 5)
    assert (selected[:11] == -1).all()


def test_padding_and_invisible_entries_are_never_chosen(indexer: Indexer) -> None:
    c = case(indexer, [3, 1], ratio=2, step=2)
    nothing = VisibleRange(c.seen.low, c.seen.low)
    selected, made = indexer.select(c.q, c.weights, c.keys, nothing, origin=c.origin)
    assert made is not None
    assert (selected == -1).all() and (made.first == -1).all()


def test_queries_keys_and_weights(make_config: Callable, relative: Callable) -> None:
    config = make_config()
    own = Indexer(config, makes_keys=True)
    generator = torch.Generator().manual_seed(3)
    for p in own.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.3
    x, latent = torch.randn(6, 64, generator=generator), torch.randn(6, 32, generator=generator)
    turn = rotation(torch.linspace(1, 0.01, 8), torch.arange(6))
    q, weights = own.queries(x, latent, turn)
    unturned = (latent.double() @ own.wq_b.weight.double().T).view(6, 8, 32)
    assert relative(q, rotate(unturned.float(), turn)) < 1e-6
    scaled = x.double() @ own.weights_proj.weight.double().T / (32 * 8) ** 0.5
    assert relative(weights, scaled) < 1e-6
    raw = latent.double() @ own.wk.weight.double().T
    normal = raw / raw.square().mean(-1, keepdim=True).sqrt() * own.k_norm.weight.double()
    keys = own.keys(latent, turn)
    assert relative(keys, rotate(normal.float(), turn)) < 1e-6
    own.quantised = True
    assert torch.equal(own.keys(latent, turn), mxfp4_fake_quant(keys))
    assert torch.equal(own.queries(x, latent, turn)[0], mxfp4_fake_quant(q))


def test_only_a_source_makes_keys(make_config: Callable) -> None:
    names = set(dict(Indexer(make_config(), makes_keys=False).named_parameters()))
    assert names == {"wq_b.weight", "weights_proj.weight"}


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_scores_never_exist_as_a_whole(indexer: Indexer) -> None:
    indexer.workspace_bytes = 1 << 19
    largest = []
    for tokens in (512, 1024):
        c = case(indexer, [tokens], ratio=1, step=1)
        with Largest() as mode:
            _, made = indexer.select(c.q, c.weights, c.keys, c.seen, origin=c.origin)
            indexer.select(c.q, c.weights, c.keys, c.seen, pool=made)
        largest.append(mode.numel)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 1024 * 1024 // 8
