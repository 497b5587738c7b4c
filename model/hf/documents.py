"""From the inputs that users of such models give to aligned rows of documents, and back.

The model wants every document to start at a multiple of its alignment. Here documents may follow
one another without gaps, or stand anywhere between padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.layout import ModelInputs


def sequence_ids(
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_lens: Tensor | None = None,
    seq_lens_padded: Tensor | None = None,
    seq_ids: Tensor | None = None,
) -> Tensor:
    """int64 [B, S]: 1, 2, ... inside documents, 0 on padding, from ONE description of them.

    attention_mask [B, S]: 0 marks padding, the rest of a row is one document. seq_lens [B, n]:
    lengths of the documents of each row from its first column on (entries of 0 or less are none),
    with seq_lens_padded [B, n], if given, the room that each takes. seq_ids [B, S] says it
    directly. position_ids [B, S] must count from 0 in every document; alone, they say where
    documents start. ValueError when descriptions disagree or do not fit: none is ever ignored.
    """
    given = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "seq_ids": seq_ids,
    }
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, input_ids {list(input_ids.shape)}: "
                "they must agree"
            )
    if seq_ids is not None and seq_lens is not None:
        raise ValueError("seq_ids and seq_lens both describe the documents; give one of them")
    if seq_lens_padded is not None and seq_lens is None:
        raise ValueError("seq_lens_padded needs seq_lens, the lengths without padding")
    live = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        live = attention_mask > 0
    if seq_ids is not None:
        found = seq_ids.long()
        if bool(((found > 0) & ~live).any()):
            raise ValueError("attention_mask is 0 where seq_ids names a document")
        found = found * live
    elif seq_lens is not None:
        found = _from_lengths(seq_lens, seq_lens_padded, input_ids)
        if attention_mask is not None and bool(((found > 0) != live).any()):
            raise ValueError("attention_mask and seq_lens disagree about which tokens are padding")
    elif position_ids is not None:
        found = torch.cumsum((position_ids == 0) & live, dim=1) * live
    else:
        found = live.long()
    if bool((_opens(found).sum(1) != _distinct(found)).any()):
        raise ValueError("a document's tokens must stand together: its seq_id comes back later on")
    if position_ids is not None:
        wrong = (document_positions(found) != position_ids) & (found > 0)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"position_ids[{row}, {column}]={int(position_ids[row, column])}, but positions "
                "count 0, 1, 2, ... in every document; the same call says where documents start"
            )
    return found


def document_positions(seq_ids: Tensor) -> Tensor:
    """int64 [B, S]: 0, 1, ... in each document, 0 on padding."""
    column = torch.arange(seq_ids.shape[1], device=seq_ids.device).expand_as(seq_ids)
    start = torch.where(_opens(seq_ids), column, -1).cummax(1).values
    return torch.where(seq_ids > 0, column - start, 0)


@dataclass(frozen=True)
class AlignedRows:
    """Where each given token stands in rows whose documents start at multiples of the alignment."""

    column: Tensor  # [B, S] int64; of no meaning on padding
    live: Tensor  # [B, S] bool
    width: int

    @classmethod
    def of(cls, seq_ids: Tensor, *, alignment: int) -> AlignedRows:
        """Documents in the order of seq_ids [B, S], each at the first aligned column that is
        free."""
        live, opens = seq_ids > 0, _opens(seq_ids)
        before = torch.cumsum(live, 1) - live.long()  # live tokens to the left
        at_open = torch.where(opens, before, 0).cummax(1).values
        previous = torch.cat([torch.zeros_like(at_open[:, :1]), at_open[:, :-1]], 1)
        gap = torch.where(opens, -(before - previous) % alignment, 0)
        column = before + torch.cumsum(gap, 1)
        last = int(torch.where(live, column, -1).max()) if column.numel() else -1
        width = max(last + 1, 1)
        return cls(column, live, width + -width % alignment)

    def inputs(
        self, input_ids: Tensor, seq_ids: Tensor, token_types: Tensor, *, pad_token_id: int
    ) -> ModelInputs:
        """The aligned inputs; images are not among them."""
        return ModelInputs(
            input_ids=self.spread(input_ids, fill=pad_token_id),
            seq_ids=self.spread(seq_ids, fill=0),
            position_ids=self.spread(document_positions(seq_ids), fill=0),
            token_types=self.spread(token_types, fill=-1),
        )

    def spread(self, values: Tensor, *, fill: int) -> Tensor:
        """values [B, S] at their aligned columns, [B, width]."""
        out = values.new_full((values.shape[0], self.width), fill)
        row = torch.arange(len(values), device=values.device)[:, None].expand_as(self.column)
        out[row[self.live], self.column[self.live]] = values[self.live]
        return out

    def gather(self, aligned: Tensor) -> Tensor:
        """aligned [B, width, ...] back at the given columns, [B, S, ...]; 0 on padding."""
        column = torch.where(self.live, self.column, 0)
        row = torch.arange(len(column), device=column.device)[:, None]
        mask = self.live.view(*self.live.shape, *[1] * (aligned.dim() - 2))
        return torch.where(mask, aligned[row, column], 0)


def _from_lengths(lengths: Tensor, padded: Tensor | None, like: Tensor) -> Tensor:
    rows, columns = like.shape
    if lengths.dim() != 2 or len(lengths) != rows:
        raise ValueError(f"seq_lens has shape {list(lengths.shape)}; give [{rows}, documents]")
    room = lengths if padded is None else padded
    if room.shape != lengths.shape:
        raise ValueError(
            f"seq_lens_padded has shape {list(room.shape)}, seq_lens {list(lengths.shape)}"
        )
    there = lengths > 0
    room = torch.where(there, room, 0).long()
    if bool((room < lengths * there).any()):
        raise ValueError("a document's entry of seq_lens_padded is below that of seq_lens")
    start = torch.cumsum(room, 1) - room
    if bool(((start + lengths) * there > columns).any()):
        raise ValueError(
            f"the documents of seq_lens take more than the {columns} columns there are"
        )
    column = torch.arange(columns, device=like.device)
    inside = (column >= start[..., None]) & (column < (start + lengths * there)[..., None])
    number = torch.cumsum(there, 1)
    return (inside * number[..., None]).sum(1)


def _opens(seq_ids: Tensor) -> Tensor:
    """bool [B, S]: the first token of each document."""
    left = torch.cat([torch.zeros_like(seq_ids[:, :1]), seq_ids[:, :-1]], 1)
    return (seq_ids > 0) & (seq_ids != left)


def _distinct(seq_ids: Tensor) -> Tensor:
    """[B] how many documents each row names."""
    ordered = seq_ids.sort(1).values
    return _opens(ordered).sum(1)
