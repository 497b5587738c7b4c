"""Figures about packs against plain counting."""

import numpy as np
import pytest

from data.collate import collate
from data.documents import Document
from data.packs import Place
from data.statistics import SourceStatistics, engram_reuse, stretches


@pytest.fixture(scope="module")
def masked(random_documents):
    dice = np.random.default_rng(1)
    lengths = dice.integers(2, 70, 60).tolist()
    return [Document(d.tokens, dice.random(len(d.tokens)) < 0.4) for d in random_documents(lengths)]


@pytest.mark.parametrize("on_long", ["split", "drop"])
@pytest.mark.parametrize("with_mask", [True, False])
def test_counts_are_those_of_the_batches(make_packs, masked, on_long, with_mask):
    documents = masked if with_mask else [Document(d.tokens) for d in masked]
    packs = make_packs(
        documents,
        masked=with_mask,
        on_long_document=on_long,
        holdout=0.2,
        window_documents=25,
    )
    [source] = packs.sources
    found = SourceStatistics.of(source)
    lengths = np.array([len(d.tokens) for d in documents])
    kept = lengths[lengths <= 32] if on_long == "drop" else lengths
    assert found.documents == 60
    assert found.dropped == 60 - len(kept)
    too_long = [f"made-up:{i + 1}" for i in np.flatnonzero(lengths > 32).tolist()]
    assert found.dropped_first == (tuple(too_long[:10]) if on_long == "drop" else ())
    assert found.tokens == kept.sum()
    assert found.cuts == sum((length - 1) // 32 for length in kept.tolist())
    assert found.longest == lengths.max()
    for bits in range(1, 8):
        low, high = 2 ** (bits - 1), 2**bits
        assert found.lengths[bits] == ((lengths >= low) & (lengths < high)).sum()
    places = [
        Place(0, window, pack)
        for window in range(3)
        for pack in range(len(source.plans.plan(window)))
    ]
    batch = collate(packs, places, sample_ids=tuple(range(len(places))))
    assert found.packs + found.held_out == len(places)
    assert found.labels == batch.valid_tokens
    assert found.positions == batch.labels.numel()
    assert found.padding == found.positions - batch.real_tokens
    ends = batch.layout.cu_seqlens.diff()
    assert found.slots == int((-ends % 4).sum())


def test_engram_rows_are_counted_by_step(make_packs, masked, hasher):
    packs = make_packs([Document(d.tokens) for d in masked])
    found = engram_reuse(packs, packs_per_step=2, steps=3)
    assert [layer.layer for layer in found] == list(hasher.geometry.layer_ids)
    rows = []
    for step in range(3):
        here = range(2 * step, 2 * step + 2)
        batch = collate(packs, [packs.place(i) for i in here], sample_ids=tuple(here))
        rows.append(batch.engram_rows[batch.seq_ids > 0].numpy())
    for number, layer in enumerate(found):
        every = np.concatenate([r[:, number] for r in rows]).ravel().tolist()
        assert layer.looked_up == len(every)
        assert layer.distinct == len(set(every))
        distinct = [len(set(r[:, number].ravel().tolist())) for r in rows]
        assert layer.per_step == pytest.approx(sum(distinct) / 3)
        counts = sorted((every.count(row) for row in set(every)), reverse=True)
        assert layer.top[0] == (100, pytest.approx(sum(counts[:100]) / len(every)))
    assert (
        engram_reuse(make_packs([masked[0]], hasher=None, masked=True), packs_per_step=1, steps=1)
        == []
    )


def test_a_pack_is_its_documents_with_their_origin(make_packs):
    first = Document(np.arange(10, 60, dtype=np.int32))
    second = Document(np.arange(70, 75, dtype=np.int32), np.array([1, 0, 1, 1, 0], dtype=bool))
    packs = make_packs([first, second], masked=True)
    found = [s for pack in range(2) for s in stretches(packs, Place(0, 0, pack))]
    by_start = {int(s.tokens[0]): s for s in found}
    assert by_start[10].where == "made-up:1"
    assert by_start[42].where == "made-up:1, from its token 32 on"
    assert by_start[70].where == "made-up:2"
    assert by_start[70].learnt.tolist() == [False, False, True, True, False]
    assert by_start[10].learnt.tolist() == [False] + [True] * 31
