"""The batch: one micro-batch of packs, with everything that depends on documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.corpus import PackedSet
from data.packing import ranges

NO_LABEL = -100
TEXT = -1
PADDING_PACK = -1


@dataclass(frozen=True, eq=False)
class PackLayout:
    """The documents of a batch as intervals, over its B rows laid end to end.

    Document i has cu_seqlens[i + 1] - cu_seqlens[i] real tokens, and they stand at flat
    positions from cu_seqlens_padded[i] on. Its share of the padded lengths holds the padding
    behind it, up to the next document or the end of the row, so cu_seqlens_padded runs from 0 to
    B * S. A row of padding alone counts as one document without tokens. Both int32 [n + 1];
    max_seqlen counts real tokens.
    """

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int

    @classmethod
    def from_seq_ids(cls, seq_ids: np.ndarray) -> PackLayout:
        """Derived from seq_ids [B, S]; 0 is padding."""
        assert seq_ids.size < 2**31
        opens = np.zeros(seq_ids.shape, dtype=bool)
        opens[:, :1] = True
        opens[:, 1:] = (seq_ids[:, 1:] != seq_ids[:, :-1]) & (seq_ids[:, 1:] != 0)
        starts = np.flatnonzero(opens)
        lengths = np.add.reduceat((seq_ids != 0).ravel(), starts, dtype=np.int32)
        return cls(
            cu_seqlens=torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
            cu_seqlens_padded=torch.from_numpy(np.append(starts, seq_ids.size).astype(np.int32)),
            max_seqlen=int(lengths.max()),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """B packs of S tokens, on the CPU.

    input_ids, labels (the next token of the same document, -100 where there is none),
    position_ids (from 0 in each document) and seq_ids (1, 2, ... along a row, 0 = padding) are
    int64 [B, S]; token_types int8 [B, S], -1 = text; engram_rows int64 [B, S, L, C] for L Engram
    layers and C rows a token, hashed on whole documents. sample_ids are the rows' global pack
    indices, -1 for a row of padding.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    seq_ids: Tensor
    token_types: Tensor
    engram_rows: Tensor
    sample_ids: tuple[int, ...]
    layout: PackLayout

    @property
    def valid_tokens(self) -> int:
        """Positions with a label."""
        return int((self.labels != NO_LABEL).sum())

    @property
    def real_tokens(self) -> int:
        """Positions that are no padding."""
        return int((self.seq_ids > 0).sum())


def collate(packs: PackedSet, indices: np.ndarray, *, sample_ids: tuple[int, ...]) -> Batch:
    """The batch of the given packs, a row each; index PADDING_PACK gives a row of padding."""
    plan, rows, length = packs.plan, len(indices), packs.pack_length
    assert len(sample_ids) == rows
    real = np.flatnonzero(indices != PADDING_PACK)
    first = plan.pack_offsets[indices[real]]
    counts = plan.pack_offsets[indices[real] + 1] - first
    pieces = ranges(first, counts)
    lengths = plan.lengths[pieces]
    places = ranges(np.repeat(real, counts) * length + plan.columns[pieces], lengths)
    tokens = packs.tokens[ranges(plan.starts[pieces], lengths)]
    following = np.append(tokens[1:], 0).astype(np.int64)
    following[np.cumsum(lengths) - 1] = NO_LABEL

    def filled(fill: int, values: np.ndarray) -> np.ndarray:
        out = np.full(rows * length, fill, dtype=np.int64)
        out[places] = values
        return out.reshape(rows, length)

    input_ids = filled(packs.pad_token_id, tokens)
    seq_ids = filled(0, np.repeat(ranges(np.ones_like(counts), counts), lengths))
    if packs.hasher is None:
        engram_rows = np.zeros((rows, length, 0, 0), dtype=np.int64)
    else:
        engram_rows = packs.hasher.rows(input_ids, seq_ids=seq_ids, live=seq_ids != 0)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(filled(NO_LABEL, following)),
        position_ids=torch.from_numpy(filled(0, ranges(np.zeros_like(lengths), lengths))),
        seq_ids=torch.from_numpy(seq_ids),
        token_types=torch.full((rows, length), TEXT, dtype=torch.int8),
        engram_rows=torch.from_numpy(engram_rows),
        sample_ids=sample_ids,
        layout=PackLayout.from_seq_ids(seq_ids),
    )
