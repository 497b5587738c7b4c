"""From packs to a batch: tokens into rows, labels, Engram rows, images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.batch import NO_LABEL, WHOLE, Batch, Images, PackLayout, Stretch
from data.images.packed import PackedImage, decode, packed_images, patch_grids
from data.images.spans import TEXT, span_types
from data.images.spread import spread
from data.packs import PackedSet, Place


def collate(
    packs: PackedSet,
    places: Sequence[Place | None],
    *,
    sample_ids: tuple[int, ...],
    stretch: Stretch = WHOLE,
) -> Batch:
    """The batch of the given packs, a row each; None gives a row of padding.

    With a `stretch`, what one rank of a context group takes of it: its columns of the rows, hashed
    and labelled as a whole, and, wherever their spans lie, its share of the images. No other is
    decoded.

    DataError for an image that cannot be decoded, ValueError for tokens that the hasher's
    tokenizer does not have.
    """
    assert len(sample_ids) == len(places)
    rows = _Rows.of_padding(len(places), packs)
    images: list[PackedImage] = []
    for row, place in enumerate(places):
        if place is not None:
            _lay_out(packs, place, rows, row)
            here = packed_images(packs, place)
            for image in here:
                types = span_types(image.rows, image.cols)
                rows.token_types[row, image.column : image.column + len(types)] = types
            images += here
    batch = Batch(
        input_ids=torch.from_numpy(rows.input_ids),
        labels=torch.from_numpy(rows.labels),
        position_ids=torch.from_numpy(rows.position_ids),
        seq_ids=torch.from_numpy(rows.seq_ids),
        token_types=torch.from_numpy(rows.token_types),
        engram_rows=torch.from_numpy(_engram_rows(packs, rows)),
        images=_decoded(images, packs, stretch),
        sample_ids=sample_ids,
        layout=PackLayout.from_seq_ids(rows.seq_ids),
    )
    return batch.shard(stretch, pad_token_id=packs.pad_token_id)


@dataclass(frozen=True, eq=False)
class _Rows:
    """A batch's arrays [B, S], named as in Batch."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    seq_ids: np.ndarray
    token_types: np.ndarray

    @classmethod
    def of_padding(cls, rows: int, packs: PackedSet) -> _Rows:
        shape = rows, packs.pack_length
        return cls(
            input_ids=np.full(shape, packs.pad_token_id, dtype=np.int64),
            labels=np.full(shape, NO_LABEL, dtype=np.int64),
            position_ids=np.zeros(shape, dtype=np.int64),
            seq_ids=np.zeros(shape, dtype=np.int64),
            token_types=np.full(shape, TEXT, dtype=np.int8),
        )


def _lay_out(packs: PackedSet, place: Place, rows: _Rows, row: int) -> None:
    """Write a pack's documents into a row of padding."""
    starts, lengths, columns = packs.pieces(place)
    document = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(document)) - (np.cumsum(lengths) - lengths)[document]
    at, source = columns[document] + positions, starts[document] + positions
    tokens = packs.tokens(place)[source]
    rows.input_ids[row, at] = tokens
    rows.position_ids[row, at] = positions
    rows.seq_ids[row, at] = document + 1
    learnt = document[1:] == document[:-1]  # the next token is one of the same piece
    if (labelled := packs.labelled(place)) is not None:
        learnt &= labelled[source[1:]]
    rows.labels[row, at[:-1][learnt]] = tokens[1:][learnt]


def _engram_rows(packs: PackedSet, rows: _Rows) -> np.ndarray:
    if packs.hasher is None:
        return np.zeros((*rows.input_ids.shape, 0, 0), dtype=np.int64)
    live = (rows.seq_ids != 0) & (rows.token_types == TEXT)
    return packs.hasher.rows(rows.input_ids, seq_ids=rows.seq_ids, live=live)


def _decoded(images: list[PackedImage], packs: PackedSet, stretch: Stretch) -> Images | None:
    if not images:
        return None
    assert packs.vision is not None, "documents with images are prepared for models that see"
    grids = patch_grids(images, packs.vision)
    if stretch.ranks == 1:
        return Images(decode(images, packs.vision), grids)
    ranks = spread(grids, ranks=stretch.ranks)
    own = [image for image, rank in zip(images, ranks, strict=True) if rank == stretch.rank]
    return Images(decode(own, packs.vision), grids, ranks)
