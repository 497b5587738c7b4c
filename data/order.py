"""Which samples a step sees: a function of the seed and a global index, of nothing else.

Neither the count of ranks nor of workers, nor how often a run was resumed, moves a sample. The
random numbers are computed from counters here, so that no library's next version reorders a run.
"""

from __future__ import annotations

import functools

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
HOLDOUT, EPOCH = 1, 2  # what random numbers are for; each use has a sequence of its own


def pack_indices(global_indices: np.ndarray, *, seed: int, packs: int) -> np.ndarray:
    """The pack that each global index stands for: int64, same shape.

    Index i is place i % packs of epoch i // packs, and every epoch is a new permutation.
    """
    epochs, places = np.divmod(np.asarray(global_indices, dtype=np.int64), packs)
    out = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        out[here] = _epoch_order(seed, epoch, packs)[places[here]]
    return out


def rank_indices(step: int, *, packs_per_step: int, rank: int, ranks: int) -> np.ndarray:
    """Global indices of one rank in one step: its contiguous slice of the step's share."""
    share = packs_per_step // ranks
    first = step * packs_per_step + rank * share
    return np.arange(first, first + share, dtype=np.int64)


def sharing_problems(*, packs_per_step: int, packs_per_micro_batch: int, ranks: int) -> list[str]:
    """Why a step cannot be dealt out evenly, with the fix; empty when it can."""
    share = packs_per_micro_batch * ranks
    if packs_per_step % share == 0:
        return []
    up = -(-packs_per_step // share) * share
    return [
        f"train.packs_per_step={packs_per_step} cannot be dealt out evenly to {ranks} rank(s) in "
        f"micro-batches of train.packs_per_micro_batch={packs_per_micro_batch}; "
        f"use packs_per_step={up} or another multiple of {share}"
    ]


def split_documents(count: int, *, holdout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) document numbers, each ascending int64.

    The round(holdout * count) documents with the smallest random numbers are held out: at least
    one when holdout > 0 and there is another to train on, never all.
    """
    wanted = round(holdout * count)
    if holdout > 0:
        wanted = max(1, wanted)
    wanted = min(wanted, count - 1)
    held = np.zeros(count, dtype=bool)
    held[np.argsort(_random(seed, HOLDOUT, 0, count), kind="stable")[:wanted]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, packs: int) -> np.ndarray:
    return np.argsort(_random(seed, EPOCH, epoch, packs), kind="stable")


def _random(seed: int, use: int, number: int, count: int) -> np.ndarray:
    """uint64 [count], uniform, a function of the arguments and each place alone (splitmix64)."""
    state = 0
    for part in (seed, use, number):
        state = int(_scramble(np.array([(state + part + GOLDEN) & MASK], dtype=np.uint64))[0])
    steps = np.arange(1, count + 1, dtype=np.uint64)
    return _scramble(np.uint64(state) + steps * np.uint64(GOLDEN))


def _scramble(z: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: a bijection of uint64; wraps modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
