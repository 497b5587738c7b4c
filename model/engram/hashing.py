"""Engram hashing: which table rows a token reads, from the compressed ids of its last n-grams.

Row ids depend on token ids alone, so the data loader computes them on whole documents, before the
sequence is cut or a model exists. All arithmetic is int64: multipliers have up to 47 bits and row
ids pass 2^24, so neither int32 nor float32 holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from model.config import ModelConfig

INT64_MAX = 2**63 - 1
SEED_PER_LAYER = 10007
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class HashGeometry:
    """The constants of the hash for L Engram layers and C = (max_ngram - 1) * heads columns.

    Columns run n-gram-major, head-minor. `primes`, `offsets`: int64 [L, C], the size of each
    column's part of the table and where it starts. `multipliers`: int64 [L, max_ngram], odd.
    `rows_per_layer`: rows of each layer's table, the sum of its primes.
    """

    layer_ids: tuple[int, ...]
    primes: np.ndarray
    offsets: np.ndarray
    multipliers: np.ndarray
    rows_per_layer: tuple[int, ...]
    compressed_vocab_size: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> HashGeometry:
        """Geometry of the Engram layers that the model has (config.engram_layers).

        ValueError when config.engram_num_embeddings are not the sums of the primes.
        """
        every_layer = config.engram_layer_ids
        primes = hash_primes(
            layers=len(every_layer),
            ngram_sizes=config.engram_max_ngram_size - 1,
            heads=config.engram_n_heads,
            start=config.engram_vocab_size,
        )
        sums = tuple(int(row.sum()) for row in primes)
        if sums != tuple(config.engram_num_embeddings):
            raise ValueError(
                f"engram_num_embeddings={list(config.engram_num_embeddings)} do not fit "
                f"engram_vocab_size={config.engram_vocab_size}, "
                f"engram_max_ngram_size={config.engram_max_ngram_size} and "
                f"engram_n_heads={config.engram_n_heads}, whose primes give {list(sums)} rows; "
                f"set engram_num_embeddings={list(sums)}"
            )
        kept = len(config.engram_layers)
        assert config.engram_layers == every_layer[:kept]
        multipliers = [
            hash_multipliers(
                layer,
                max_ngram=config.engram_max_ngram_size,
                compressed_vocab_size=config.engram_compressed_vocab_size,
            )
            for layer in config.engram_layers
        ]
        primes = primes[:kept]
        return cls(
            layer_ids=config.engram_layers,
            primes=primes,
            offsets=np.cumsum(primes, axis=1) - primes,
            multipliers=np.array(multipliers, dtype=np.int64).reshape(
                kept, config.engram_max_ngram_size
            ),
            rows_per_layer=sums[:kept],
            compressed_vocab_size=config.engram_compressed_vocab_size,
        )

    @property
    def columns(self) -> int:
        """Rows read per token and layer."""
        return self.primes.shape[1]


def hash_primes(*, layers: int, ngram_sizes: int, heads: int, start: int) -> np.ndarray:
    """int64 [layers, ngram_sizes * heads]: the primes >= start in order, none used twice.

    Every (layer, n-gram size) asks for the next `heads` primes from `start` that nobody took
    before, which deals the primes out in one increasing run.
    """
    wanted = layers * ngram_sizes * heads
    found: list[int] = []
    candidate = start
    while len(found) < wanted:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return np.array(found, dtype=np.int64).reshape(layers, ngram_sizes * heads)


def hash_multipliers(layer_id: int, *, max_ngram: int, compressed_vocab_size: int) -> np.ndarray:
    """Odd int64 multipliers [max_ngram] of one layer; times any compressed id they fit int64."""
    bound = max(1, INT64_MAX // compressed_vocab_size // 2)
    rng = np.random.default_rng(SEED_PER_LAYER * layer_id)
    return rng.integers(0, bound, size=max_ngram, dtype=np.int64) * 2 + 1


def hash_rows(
    geometry: HashGeometry,
    compressed: np.ndarray,
    *,
    seq_ids: np.ndarray | None = None,
    live: np.ndarray | None = None,
    pad_id: int,
) -> np.ndarray:
    """Table rows of every position: int64 [..., S, L, C].

    compressed: int64 [..., S], compressed token ids. seq_ids [..., S]: the document of each
    position, 0 = padding; None = one document. live bool [..., S]: False for tokens that are no
    text (padding, image); None = all live. pad_id: the COMPRESSED id of the pad token.

    Position t reads c_0..c_{n-1}, with c_k the id at t-k. From the first k on where t-k lies
    before the row, in another document or at a dead token, c_k is pad_id; all are where t itself
    is dead. The n-gram of size n hashes to XOR of c_k * multiplier_k over k < n, then modulo each
    of its heads' primes, plus the column's offset.
    """
    compressed = np.asarray(compressed)
    if compressed.dtype != np.int64:
        raise ValueError(f"compressed ids must be int64, not {compressed.dtype}: products overflow")
    size = geometry.compressed_vocab_size
    low, high = (int(compressed.min()), int(compressed.max())) if compressed.size else (0, -1)
    if low < 0 or high >= size:
        raise ValueError(
            f"compressed ids run from {low} to {high}, outside engram_compressed_vocab_size={size};"
            " take them from the token map of the model's tokenizer"
        )
    assert 0 <= pad_id < size
    shape = compressed.shape
    alive = np.ones(shape, dtype=bool) if live is None else np.array(live, dtype=bool)
    if seq_ids is not None:
        alive &= seq_ids != 0
    blocked = ~alive
    look_back = [_padded(compressed, blocked, pad_id).reshape(-1)]
    for k in range(1, geometry.multipliers.shape[1]):
        blocked |= _blocks_at(k, alive, seq_ids)
        earlier = _padded(_shifted(compressed, k, fill=pad_id), blocked, pad_id)
        look_back.append(earlier.reshape(-1))
    rows = np.empty((compressed.size, *geometry.primes.shape), dtype=np.int64)
    for first in range(0, len(rows), TOKENS_AT_ONCE):
        here = slice(first, first + TOKENS_AT_ONCE)
        _mix(geometry, [ids[here] for ids in look_back], out=rows[here])
    return rows.reshape(*shape, *geometry.primes.shape)


def _mix(geometry: HashGeometry, look_back: list[np.ndarray], *, out: np.ndarray) -> None:
    """Rows [T, L, C] of T positions from the ids that each reads: look_back[k] [T] is c_k.

    Few enough positions that all stays in the processor's cache. The remainder is taken as
    x - x // p * p of unsigned numbers with one divisor a call, which numpy does by multiplication:
    several times faster than its remainder, and as exact.
    """
    layers, max_ngram = geometry.multipliers.shape
    heads = geometry.columns // (max_ngram - 1)
    rows = np.empty((geometry.columns, len(out)), dtype=np.uint64)
    for layer in range(layers):
        mixed = look_back[0] * geometry.multipliers[layer, 0]
        primes = geometry.primes[layer].astype(np.uint64)
        offsets = geometry.offsets[layer].astype(np.uint64)
        for k in range(1, max_ngram):
            mixed ^= look_back[k] * geometry.multipliers[layer, k]
            dividend = mixed.view(np.uint64)  # products are below 2^63, and so is their XOR
            for column in range((k - 1) * heads, k * heads):
                row, prime = rows[column], primes[column]
                np.floor_divide(dividend, prime, out=row)
                np.multiply(row, prime, out=row)
                np.subtract(dividend, row, out=row)
                np.add(row, offsets[column], out=row)
        out[:, layer] = rows.view(np.int64).T


def _padded(ids: np.ndarray, blocked: np.ndarray, pad_id: int) -> np.ndarray:
    return np.where(blocked, np.int64(pad_id), ids)


def _shifted(values: np.ndarray, k: int, *, fill: int | bool) -> np.ndarray:
    """values[..., t - k] at t; `fill` for t < k."""
    out = np.full_like(values, fill)
    out[..., k:] = values[..., : max(0, values.shape[-1] - k)]
    return out


def _blocks_at(k: int, alive: np.ndarray, seq_ids: np.ndarray | None) -> np.ndarray:
    """Where position t - k is outside the row, dead, or in another document than t."""
    blocks = ~_shifted(alive, k, fill=False)
    if seq_ids is not None:
        blocks |= _shifted(seq_ids, k, fill=0) != seq_ids
    return blocks


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    return n % 2 == 1 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))
