"""Batches cut for the ranks of a context group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch, PackLayout, Stretch
from data.images.spread import spread
from data.loader import batches, eval_batches

PAD = 2
FILLED = {
    "input_ids": PAD,
    "labels": -100,
    "position_ids": 0,
    "seq_ids": 0,
    "token_types": -1,
}


def batch_of(seq_ids: torch.Tensor) -> Batch:
    shape = tuple(seq_ids.shape)
    return Batch(
        input_ids=torch.arange(seq_ids.numel()).view(shape) + 10,
        labels=torch.arange(seq_ids.numel()).view(shape) % 7,
        position_ids=torch.arange(shape[1]).expand(shape),
        seq_ids=seq_ids,
        token_types=(seq_ids - 2).to(torch.int8),
        engram_rows=torch.arange(seq_ids.numel() * 6).view(*shape, 2, 3) + 1,
        images=None,
        sample_ids=tuple(range(shape[0])),
        layout=PackLayout.from_seq_ids(seq_ids.numpy()),
    )


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 9),
    ranks=st.integers(2, 5),
    alignment=st.sampled_from([1, 2, 4]),
)
def test_shards_are_the_batch_and_padding(rows, groups, ranks, alignment) -> None:
    width = groups * alignment
    batch = batch_of(torch.randint(0, 4, (rows, width)))
    shards = [
        batch.shard(Stretch(rank, ranks, alignment), pad_token_id=PAD) for rank in range(ranks)
    ]
    share = shards[0].labels.shape[1]
    assert share % alignment == 0
    assert share * ranks < width + ranks * alignment
    for name, fill in FILLED.items():
        parts = [getattr(shard, name) for shard in shards]
        assert {part.shape for part in parts} == {(rows, share)}
        found = torch.cat(parts, dim=1)
        assert torch.equal(found[:, :width], getattr(batch, name))
        assert (found[:, width:] == fill).all()
        for shard in shards if name in ("position_ids", "seq_ids", "token_types") else ():
            assert torch.equal(getattr(shard.whole, name), found)
    hashed = torch.cat([shard.engram_rows for shard in shards], dim=1)
    assert torch.equal(hashed[:, :width], batch.engram_rows)
    # No table row is read for padding that is not read anyway.
    assert torch.equal(hashed.unique(), batch.engram_rows.unique())
    assert sum(shard.valid_tokens for shard in shards) == batch.valid_tokens
    assert sum(shard.real_tokens for shard in shards) == batch.real_tokens
    assert all(shard.sample_ids == batch.sample_ids for shard in shards)


def test_one_rank_has_the_batch_as_it_is() -> None:
    batch = batch_of(torch.ones(1, 5, dtype=torch.int64))
    assert batch.shard(Stretch(), pad_token_id=PAD) is batch


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    ranks=st.integers(1, 6),
)
def test_images_are_spread_evenly_by_their_patches(sizes: list[int], ranks: int) -> None:
    owner = spread(torch.tensor([[size, 1] for size in sizes]), ranks=ranks)
    loads = torch.zeros(ranks, dtype=torch.int64).index_add_(0, owner, torch.tensor(sizes))
    assert int(loads.max() - loads.min()) <= max(sizes)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_cuts(make_packs: Callable, random_documents: Callable, workers: int) -> None:
    packs = make_packs(random_documents([9, 30, 14, 25, 31, 6]))
    options: dict[str, Any] = {
        "first_step": 0,
        "steps": 2,
        "packs_per_step": 2,
        "packs_per_micro_batch": 1,
    }
    options |= {"rank": 1, "ranks": 2}
    stretch = Stretch(2, 3, 4)
    whole = list(batches(packs, **options, workers=0))
    cut = list(batches(packs, **options, workers=workers, stretch=stretch))
    for (one,), (other,) in zip(whole, cut, strict=True):
        wanted = one.shard(stretch, pad_token_id=PAD)
        assert torch.equal(other.input_ids, wanted.input_ids)
        assert other.whole is not None
        assert wanted.whole is not None
        assert torch.equal(other.whole.seq_ids, wanted.whole.seq_ids)
        assert other.sample_ids == one.sample_ids


def test_evaluation_cuts(make_packs: Callable, random_documents: Callable) -> None:
    packs = make_packs(random_documents([20] * 12), holdout=0.5, held_out=True)
    options: dict[str, Any] = {"count": 3, "packs_per_micro_batch": 2, "rank": 0, "ranks": 1}
    stretch = Stretch(1, 2, 4)
    cut = list(eval_batches(packs, **options, stretch=stretch))
    for one, other in zip(eval_batches(packs, **options), cut, strict=True):
        wanted = one.shard(stretch, pad_token_id=PAD)
        assert torch.equal(other.labels, wanted.labels)
    assert len(cut) == 2
