"""Engram rows against the released numbers and an independent reference in Python integers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from model.config import ModelConfig
from model.engram.hashing import HashGeometry, hash_multipliers, hash_primes, hash_rows

GOLDEN = Path(__file__).parents[3] / "golden" / "hash_released"


def model(**changes) -> ModelConfig:
    """A small backbone with the released Engram sizes, unless changed."""
    sizes: dict[str, Any] = {
        "vocab_size": 129280,
        "hidden_size": 64,
        "num_hidden_layers": 15,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": (0,) * 15,
        "kv_source_layer_ids": (),
        "index_source_layer_ids": (),
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "engram_layer_ids": (1, 14),
        "engram_num_embeddings": (384006168, 384016682),
    }
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "hash.safetensors")


@pytest.fixture(scope="module")
def released() -> HashGeometry:
    return HashGeometry.from_config(model())


def slow_rows(geometry, compressed, seq_ids, live, pad):
    """One row of tokens, position by position, in Python's unbounded integers."""
    layers, max_ngram = geometry.multipliers.shape
    heads = geometry.primes.shape[1] // (max_ngram - 1)
    out = []
    for t in range(len(compressed)):
        ids, blocked = [], False
        for k in range(max_ngram):
            blocked = (
                blocked
                or t - k < 0
                or not live[t - k]
                or seq_ids[t - k] == 0
                or seq_ids[t - k] != seq_ids[t]
            )
            ids.append(pad if blocked else int(compressed[t - k]))
        token = []
        for layer in range(layers):
            columns = []
            for size in range(2, max_ngram + 1):
                mixed = 0
                for k in range(size):
                    product = ids[k] * int(geometry.multipliers[layer, k])
                    assert product < 2**63
                    mixed ^= product
                for head in range(heads):
                    column = (size - 2) * heads + head
                    offset = sum(int(p) for p in geometry.primes[layer, :column])
                    columns.append(mixed % int(geometry.primes[layer, column]) + offset)
            token.append(columns)
        out.append(token)
    return np.array(out, dtype=np.int64).reshape(len(compressed), layers, -1)


@pytest.mark.parametrize("name", ["primes", "offsets", "multipliers"])
def test_released_constants(golden, released, name):
    found = getattr(released, name)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, golden[name])


def test_released_row_counts(released):
    assert released.rows_per_layer == (384006168, 384016682)
    assert released.columns == 24


@pytest.mark.parametrize(
    ("name", "packed", "masked"),
    [
        ("rows_plain", False, False),
        ("rows_packed", True, False),
        ("rows_masked", False, True),
        ("rows_packed_masked", True, True),
    ],
)
def test_released_rows(golden, released, name, packed, masked):
    rows = hash_rows(
        released,
        golden["token_map"][golden["input_ids"]].astype(np.int64),
        seq_ids=golden["sequence_ids"] if packed else None,
        live=golden["token_mask"] if masked else None,
        pad_id=2,
    )
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(rows, golden[name])


@st.composite
def hashed_rows(draw):
    """A geometry, and one row of ids with documents, padding anywhere and dead tokens."""
    max_ngram, heads = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 14), min_size=1, max_size=3))))
    vocab, start = draw(st.integers(1, 129280)), draw(st.integers(2, 10**6))
    columns = (max_ngram - 1) * heads
    primes = hash_primes(layers=len(layers), ngram_sizes=max_ngram - 1, heads=heads, start=start)
    assert primes.shape == (len(layers), columns)
    geometry = HashGeometry.from_config(
        model(
            engram_layer_ids=layers,
            engram_num_embeddings=tuple(int(row.sum()) for row in primes),
            engram_max_ngram_size=max_ngram,
            engram_n_heads=heads,
            engram_vocab_size=start,
            engram_compressed_vocab_size=vocab,
        )
    )
    size = draw(st.integers(1, 24))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    runs = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    live = draw(st.lists(st.booleans() | st.just(True), min_size=size, max_size=size))
    pad = draw(st.integers(0, vocab - 1))
    return (
        geometry,
        np.array(tokens),
        np.array(sorted(runs) if draw(st.booleans()) else runs),
        np.array(live),
        pad,
    )


@settings(max_examples=150, deadline=None)
@given(hashed_rows())
def test_rows_equal_the_slow_reference(case):
    geometry, tokens, seq_ids, live, pad = case
    rows = hash_rows(geometry, tokens, seq_ids=seq_ids, live=live, pad_id=pad)
    np.testing.assert_array_equal(rows, slow_rows(geometry, tokens, seq_ids, live, pad))
    batch = hash_rows(
        geometry,
        np.stack([tokens, tokens[::-1]]),
        seq_ids=np.stack([seq_ids, seq_ids[::-1]]),
        live=np.stack([live, live[::-1]]),
        pad_id=pad,
    )
    np.testing.assert_array_equal(batch[0], rows)
    ones = np.ones_like(tokens)
    every = np.ones_like(live)
    np.testing.assert_array_equal(
        hash_rows(geometry, tokens, pad_id=pad), slow_rows(geometry, tokens, ones, every, pad)
    )


@settings(max_examples=50, deadline=None)
@given(hashed_rows(), st.data())
def test_rows_of_a_prefix_are_the_first_rows(case, data):
    geometry, tokens, seq_ids, live, pad = case
    cut = data.draw(st.integers(1, len(tokens)))
    whole = hash_rows(geometry, tokens, seq_ids=seq_ids, live=live, pad_id=pad)
    part = hash_rows(geometry, tokens[:cut], seq_ids=seq_ids[:cut], live=live[:cut], pad_id=pad)
    np.testing.assert_array_equal(part, whole[:cut])


def test_a_document_has_the_rows_it_has_alone(released):
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 99092, 40)
    seq_ids = np.repeat([1, 0, 2, 3, 0], [11, 3, 1, 20, 5])
    rows = hash_rows(released, tokens, seq_ids=seq_ids, pad_id=2)
    for document in (1, 2, 3):
        here = seq_ids == document
        np.testing.assert_array_equal(rows[here], hash_rows(released, tokens[here], pad_id=2))


# c_0..c_3 that reach the very last row of each table; found by search.
@pytest.mark.parametrize(
    ("layer", "ids"),
    [(0, (85796, 98955, 98765, 99091)), (1, (26746, 99023, 98765, 99091))],
)
def test_the_last_row_of_a_table_is_exact(released, layer, ids):
    tokens = np.array(ids[::-1], dtype=np.int64)
    rows = hash_rows(released, tokens, pad_id=2)
    assert rows[-1, layer, -1] == released.rows_per_layer[layer] - 1
    assert rows[-1, layer, -1] > 2**24
    every = np.ones(4)
    np.testing.assert_array_equal(rows, slow_rows(released, tokens, every, every, 2))


def test_rows_at_the_largest_ids_and_products(released):
    tokens = np.full(8, 99091, dtype=np.int64)
    assert 99091 * int(released.multipliers.max()) > 2**62
    rows = hash_rows(released, tokens, pad_id=99091)
    every = np.ones(8)
    np.testing.assert_array_equal(rows, slow_rows(released, tokens, every, every, 99091))
    assert (rows >= released.offsets).all()
    assert (rows < released.offsets + released.primes).all()


@pytest.mark.parametrize("vocab", [1, 2, 323, 99092, 129280, 2**31])
def test_products_never_overflow(vocab):
    multipliers = hash_multipliers(14, max_ngram=64, compressed_vocab_size=vocab)
    assert (multipliers > 0).all()
    assert (multipliers % 2 == 1).all()
    assert int(multipliers.max()) * (vocab - 1) < 2**63


def test_primes_are_the_next_ones_and_used_once():
    primes = hash_primes(layers=2, ngram_sizes=3, heads=2, start=2)
    assert primes.tolist() == [[2, 3, 5, 7, 11, 13], [17, 19, 23, 29, 31, 37]]


def test_wrong_row_counts_name_the_right_ones():
    config = model(engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(ValueError, match=r"384016683.*set engram_num_embeddings=.*384016682"):
        HashGeometry.from_config(config)


def test_layers_past_the_models_end_are_left_out():
    whole = HashGeometry.from_config(model())
    short = HashGeometry.from_config(
        replace(model(), num_hidden_layers=4, compress_ratios=(0,) * 4)
    )
    assert short.layer_ids == (1,)
    assert short.rows_per_layer == whole.rows_per_layer[:1]
    np.testing.assert_array_equal(short.primes, whole.primes[:1])
    np.testing.assert_array_equal(short.multipliers, whole.multipliers[:1])


def test_narrow_ids_are_refused(released):
    with pytest.raises(ValueError, match="int64"):
        hash_rows(released, np.zeros(4, dtype=np.int32), pad_id=2)


@pytest.mark.parametrize("bad", [-1, 99092])
def test_ids_outside_the_compressed_vocabulary_are_refused(released, bad):
    with pytest.raises(ValueError, match="99092"):
        hash_rows(released, np.array([0, bad]), pad_id=2)
