"""Token ids to Engram rows: the token map and the hash of one model, ready for the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.tokenizer import load_token_map
from model.engram.hashing import HashGeometry, hash_rows
from model.engram.token_map import compress

if TYPE_CHECKING:
    from model.config import ModelConfig


@dataclass(frozen=True)
class RowHasher:
    """Computes a batch's Engram rows from token ids; plain arrays, so it travels to workers.

    pad_id is the compressed id of the model's Engram pad token.
    """

    geometry: HashGeometry
    token_map: np.ndarray
    pad_id: int

    @classmethod
    def for_model(cls, model: ModelConfig, *, tokenizer: str) -> RowHasher | None:
        """None for a model without Engram layers."""
        if not model.engram_layers:
            return None
        token_map = load_token_map(tokenizer)
        pad = compress(token_map, np.array([model.engram_pad_token_id]))
        return cls(HashGeometry.from_config(model), token_map, int(pad[0]))

    def rows(self, input_ids: np.ndarray, *, seq_ids: np.ndarray, live: np.ndarray) -> np.ndarray:
        """int64 [B, S, L, C] for token ids [B, S]; seq_ids and live as in `hash_rows`."""
        compressed = compress(self.token_map, input_ids)
        return hash_rows(self.geometry, compressed, seq_ids=seq_ids, live=live, pad_id=self.pad_id)
