"""The batch: one micro-batch of packs, with everything that depends on documents."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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
    one image after another. grids: int64 [images, 2], patch rows and columns of each. ranks: None,
    or int64 [images], the rank of a context group that sees each image; patches are then those of
    one rank's images.
    """

    patches: Tensor
    grids: Tensor
    ranks: Tensor | None = None


@dataclass(frozen=True)
class Stretch:
    """The columns of every row that one rank of a context group takes: of `ranks` equal stretches,
    each a multiple of the model's alignment, that of its number."""

    rank: int = 0
    ranks: int = 1
    alignment: int = 1


WHOLE = Stretch()


@dataclass(frozen=True, eq=False)
class WholeRows:
    """What every rank of a context group knows of the rows they divide; as in Batch, over all
    columns."""

    position_ids: Tensor
    seq_ids: Tensor
    token_types: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """B packs of S tokens, on the CPU.

    input_ids, labels (the next token of the same document, -100 where there is none or it is not
    to be learnt), position_ids (from 0 in each document) and seq_ids (1, 2, ... along a row, 0 =
    padding) are int64 [B, S]; token_types int8 [B, S]: -1 = text, 0..3 = start, image, newline and
    end of an image span; engram_rows int64 [B, S, L, C] for L Engram layers and C rows a token,
    hashed on whole documents. images: None when the batch has none. sample_ids are the rows'
    global pack indices, -1 for a row of padding. whole: None unless the tensors are a stretch of
    columns; layout is that of whole rows all the same.
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
    whole: WholeRows | None = None

    @property
    def valid_tokens(self) -> int:
        """Positions with a label."""
        return int((self.labels != NO_LABEL).sum())

    @property
    def real_tokens(self) -> int:
        """Positions that are no padding."""
        return int((self.seq_ids > 0).sum())

    @property
    def text_tokens(self) -> int:
        """Those of them that stand in no image span."""
        return int(((self.seq_ids > 0) & (self.token_types < 0)).sum())

    def shard(self, stretch: Stretch, *, pad_token_id: int) -> Batch:
        """One rank's columns; images are those that it was given already (`collate`). Rows are
        first widened with padding to a multiple of ranks * alignment: any number of ranks can take
        packs of any plan, at the price of a few slots.
        """
        if stretch.ranks == 1:
            return self
        assert self.images is None or self.images.ranks is not None
        width = self.labels.shape[1]
        extra = -width % (stretch.ranks * stretch.alignment)
        share = (width + extra) // stretch.ranks
        own = slice(stretch.rank * share, (stretch.rank + 1) * share)

        def wide(tensor: Tensor, fill: int) -> Tensor:
            return F.pad(tensor, (0, extra), value=fill) if extra else tensor

        whole = WholeRows(
            position_ids=wide(self.position_ids, 0),
            seq_ids=wide(self.seq_ids, 0),
            token_types=wide(self.token_types, -1),
        )
        # The rows of an Engram table that a step reads stay the same: none is added for padding.
        column = torch.arange(width + extra)[own].clamp_max(width - 1)
        return replace(
            self,
            input_ids=wide(self.input_ids, pad_token_id)[:, own].contiguous(),
            labels=wide(self.labels, NO_LABEL)[:, own].contiguous(),
            position_ids=whole.position_ids[:, own].contiguous(),
            seq_ids=whole.seq_ids[:, own].contiguous(),
            token_types=whole.token_types[:, own].contiguous(),
            engram_rows=self.engram_rows[:, column],
            whole=whole,
        )

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from where a GPU copies without waiting."""
        return _pinned(self)


def _pinned(value: Any) -> Any:
    """A dataclass with its tensors, also those of what it holds, in page-locked memory."""
    pinned: dict[str, object] = {}
    for f in fields(value):
        part = getattr(value, f.name)
        if isinstance(part, Tensor):
            pinned[f.name] = part.pin_memory()
        elif isinstance(part, Images | WholeRows):
            pinned[f.name] = _pinned(part)
    return replace(value, **pinned)
