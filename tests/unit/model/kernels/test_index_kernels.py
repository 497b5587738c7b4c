"""The kernel's choice of entries against torch's, on scores without ties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.attention.indexer import Candidates, Indexer
from model.config import ModelConfig
from model.kernels.library import without_kernels
from model.layout import VisibleRange

LENGTHS = [3, 40, 1, 77]  # entries of documents, one a token


def seen() -> tuple[VisibleRange, Tensor]:
    low, high, origin, at = [], [], [], 0
    for n in LENGTHS:
        low += [at] * n
        high += range(at + 1, at + n + 1)
        origin += [at] * n
        at += n
    low[-2:] = high[-2:] = [0, 0]  # padding
    return VisibleRange(torch.tensor(low), torch.tensor(high)), torch.tensor(origin)


@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (8, 32), (9, 64)])
def test_as_torchs_operators(
    ran: list[str], threads: int, make_config, heads: int, dim: int
) -> None:
    config: ModelConfig = make_config()
    sizes = {"index_n_heads": heads, "index_head_dim": dim, "index_topk": 6}
    blocks = {"candidate_block_size": 5, "candidate_topk_blocks": 3}
    indexer = Indexer(replace(config, **sizes, **blocks), makes_keys=False)
    generator = torch.Generator().manual_seed(heads)
    view, origin = seen()
    tokens = len(origin)
    q = torch.randn(tokens, heads, dim, generator=generator)
    weights = torch.randn(tokens, heads, generator=generator)
    keys = torch.randn(tokens, dim, generator=generator)

    def choices() -> list[Tensor]:
        first, pool = indexer.select(q, weights, keys, view, origin=origin)
        assert pool is not None
        again, same = indexer.select(q, weights, keys, view, pool=pool)
        assert same is pool
        return [first, again, padded(pool)]

    def padded(pool: Candidates) -> Tensor:
        extra = indexer.blocks - pool.first.shape[1]
        return torch.nn.functional.pad(pool.first, (0, extra), value=-1)

    with without_kernels():
        wanted = choices()
    assert not ran
    found = choices()
    assert ran == ["choose_entries"] * 2
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert (wanted[0] >= 0).sum(1).tolist()[-5:-2] == [6, 6, 6]
