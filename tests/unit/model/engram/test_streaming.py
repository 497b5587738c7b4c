"""Rows of a sequence in pieces are those of the whole, however it is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engram.hashing import HashGeometry, hash_multipliers, hash_primes, hash_rows
from model.engram.streaming import StreamingHasher

PAD = 2


def geometry(max_ngram: int) -> HashGeometry:
    primes = hash_primes(layers=2, ngram_sizes=max_ngram - 1, heads=2, start=1000)
    multipliers = [
        hash_multipliers(n, max_ngram=max_ngram, compressed_vocab_size=50) for n in (1, 3)
    ]
    return HashGeometry(
        layer_ids=(1, 3),
        primes=primes,
        offsets=np.cumsum(primes, axis=1) - primes,
        multipliers=np.array(multipliers),
        rows_per_layer=tuple(int(n) for n in primes.sum(1)),
        compressed_vocab_size=50,
    )


@st.composite
def sequences(draw):
    """Ids, documents with padding between them, image spans, and where to cut."""
    size = draw(st.integers(1, 40))
    few = st.integers(0, 4)  # so that n-grams repeat and a wrong look-back shows
    ids = np.array(draw(st.lists(few, min_size=size, max_size=size)), dtype=np.int64)
    seq_ids, number = [], 0
    while len(seq_ids) < size:
        number += 1
        seq_ids += [number] * draw(st.integers(1, 12)) + [0] * draw(st.integers(0, 2))
    live = np.ones(size, dtype=bool)
    for start in draw(st.lists(st.integers(0, size - 1), max_size=3)):
        live[start : start + draw(st.integers(1, 6))] = False
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=size)))
    return ids, np.array(seq_ids[:size], dtype=np.int64), live, [0, *cuts, size]


@settings(max_examples=150, deadline=None)
@given(sequences(), st.integers(2, 5))
def test_any_cutting_gives_the_rows_of_the_whole(sequence, max_ngram: int) -> None:
    ids, seq_ids, live, cuts = sequence
    own = geometry(max_ngram)
    hasher = StreamingHasher(own, pad_id=PAD)
    parts = [
        hasher.extend(ids[a:b], seq_ids=seq_ids[a:b], live=live[a:b]) for a, b in pairwise(cuts)
    ]
    whole = hash_rows(own, ids, seq_ids=seq_ids, live=live, pad_id=PAD)
    assert np.array_equal(np.concatenate(parts), whole)


def test_one_document_needs_no_documents_named() -> None:
    own, ids = geometry(4), np.arange(30) % 7
    hasher = StreamingHasher(own, pad_id=PAD)
    token_by_token = [hasher.extend(ids[t : t + 1]) for t in range(30)]
    assert np.array_equal(np.concatenate(token_by_token), hash_rows(own, ids, pad_id=PAD))


def test_an_id_out_of_range_is_refused_and_forgotten() -> None:
    own = geometry(4)
    hasher = StreamingHasher(own, pad_id=PAD)
    hasher.extend(np.array([3, 4]))
    with pytest.raises(ValueError, match="outside engram_compressed_vocab_size=50"):
        hasher.extend(np.array([50]))
    wanted = hash_rows(own, np.array([3, 4, 5]), pad_id=PAD)[2:]
    assert np.array_equal(hasher.extend(np.array([5])), wanted)
