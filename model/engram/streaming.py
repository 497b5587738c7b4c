"""Engram rows of a sequence that arrives in pieces: token by token while generating, or in chunks.

An n-gram looks back max_ngram - 1 tokens, so that is all that has to be remembered.
"""

from __future__ import annotations

import numpy as np

from model.engram.hashing import HashGeometry, hash_rows


class StreamingHasher:
    """Gives, piece by piece, the rows that `hash_rows` gives for the whole sequence at once.

    Remembers the compressed ids of the last max_ngram - 1 tokens, with their documents and whether
    they are live: a padding or image token, or another document, blocks looking back past it.
    pad_id: the COMPRESSED id of the pad token.
    """

    def __init__(self, geometry: HashGeometry, *, pad_id: int) -> None:
        self._geometry, self._pad_id = geometry, pad_id
        self._memory = geometry.multipliers.shape[1] - 1
        self._ids = np.zeros(0, dtype=np.int64)
        self._seq_ids = np.zeros(0, dtype=np.int64)
        self._live = np.zeros(0, dtype=bool)

    def extend(
        self,
        compressed: np.ndarray,
        *,
        seq_ids: np.ndarray | None = None,
        live: np.ndarray | None = None,
    ) -> np.ndarray:
        """Rows int64 [n, L, C] of the next n tokens; arguments [n], as for `hash_rows`.

        Without seq_ids the tokens belong to document 1.
        """
        count = len(compressed)
        ids = np.append(self._ids, compressed)
        seq_ids = np.append(self._seq_ids, np.ones_like(compressed) if seq_ids is None else seq_ids)
        alive = np.append(self._live, np.ones(count, dtype=bool) if live is None else live)
        rows = hash_rows(self._geometry, ids, seq_ids=seq_ids, live=alive, pad_id=self._pad_id)
        kept = max(0, len(ids) - self._memory)
        self._ids, self._seq_ids, self._live = ids[kept:], seq_ids[kept:], alive[kept:]
        return rows[len(rows) - count :]
