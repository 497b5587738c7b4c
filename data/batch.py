"""The batch: one micro-batch of packs, with everything that depends on documents."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

NO_LABEL = -100


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
class Images:
    """The images of a batch, in the row-major order of their spans over [B, S].

    patches: [P, 3 * patch_size^2], channel first inside a patch, each image's patches row by row,
    one image after another. grids: int64 [images, 2], patch rows and columns of each.
    """

    patches: Tensor
    grids: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """B packs of S tokens, on the CPU.

    input_ids, labels (the next token of the same document, -100 where there is none or it is not
    to be learnt), position_ids (from 0 in each document) and seq_ids (1, 2, ... along a row, 0 =
    padding) are int64 [B, S]; token_types int8 [B, S]: -1 = text, 0..3 = start, image, newline and
    end of an image span; engram_rows int64 [B, S, L, C] for L Engram layers and C rows a token,
    hashed on whole documents. images: None when the batch has none. sample_ids are the rows'
    global pack indices, -1 for a row of padding.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    seq_ids: Tensor
    token_types: Tensor
    engram_rows: Tensor
    images: Images | None
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

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from where a GPU copies without waiting."""
        pinned = {
            f.name: value.pin_memory()
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        images = self.images
        if images is not None:
            images = Images(images.patches.pin_memory(), images.grids.pin_memory())
        return replace(self, **pinned, images=images)
