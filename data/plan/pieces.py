"""Documents to the pieces that packs are made of: a whole one that fits, parts of one that does
not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.images.sizing import span_length
from data.plan.settings import OnLong


class TooLongError(Exception):
    """A document has no place in any pack. `document`: its number; `longest`: what must fit."""

    def __init__(self, document: int, longest: int) -> None:
        super().__init__(document, longest)
        self.document, self.longest = document, longest


@dataclass(frozen=True, eq=False)
class Pieces:
    """Stretches of the window's tokens, each of one document and no longer than a pack.

    starts int64 [n]: place of the first token among all of the window's; lengths int32 [n].
    dropped: numbers of the documents left out because they are too long.
    """

    starts: np.ndarray
    lengths: np.ndarray
    dropped: np.ndarray


def cut(
    documents: np.ndarray,
    *,
    offsets: np.ndarray,
    spans: np.ndarray,
    pack_length: int,
    on_long: OnLong,
) -> Pieces:
    """The pieces of the given documents (ascending numbers), in their order.

    offsets int64 [all + 1]: where each document begins. spans: the images, structured, with fields
    document, offset, rows and cols, by document and offset. on_long=split cuts what is longer
    than a pack into pieces of pack_length and a rest, or shorter ones where an image span would
    be cut; drop leaves such documents out; refuse raises TooLongError. So does split for an image
    span that is longer than a pack.
    """
    first, lengths = offsets[documents], np.diff(offsets)[documents]
    over = lengths > pack_length
    if on_long == "refuse" and over.any():
        place = int(np.argmax(over))
        raise TooLongError(int(documents[place]), int(lengths[place]))
    if on_long == "drop":
        return Pieces(first[~over], lengths[~over].astype(np.int32), documents[over])
    counts = -(-lengths // pack_length)
    number = ranges(np.zeros_like(counts), counts)
    starts = np.repeat(first, counts) + number * pack_length
    ends = np.minimum(starts + pack_length, np.repeat(first + lengths, counts))
    with_images = np.isin(documents, spans["document"]) & over
    if with_images.any():
        keep = np.repeat(~with_images, counts)
        parts = [
            _between_images(int(document), offsets, spans, pack_length)
            for document in documents[with_images]
        ]
        starts = np.concatenate([starts[keep], *(begin for begin, _ in parts)])
        ends = np.concatenate([ends[keep], *(end for _, end in parts)])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    return Pieces(starts, (ends - starts).astype(np.int32), documents[:0])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, ... (counts[0] of them), then the same from starts[1], and so on."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _between_images(
    document: int, offsets: np.ndarray, spans: np.ndarray, pack_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of a long document's pieces: each as long as a pack and whole images allow."""
    here = spans[slice(*np.searchsorted(spans["document"], [document, document + 1]))]
    opens = offsets[document] + here["offset"]
    sizes = zip(here["rows"].tolist(), here["cols"].tolist(), strict=True)
    closes = opens + np.array([span_length(*size) for size in sizes], dtype=np.int64)
    if (longest := int((closes - opens).max())) > pack_length:
        raise TooLongError(document, longest)
    at, end = int(offsets[document]), int(offsets[document + 1])
    borders = [at]
    while at < end:
        at = min(at + pack_length, end)
        image = int(np.searchsorted(opens, at)) - 1  # the last that begins before the cut
        if image >= 0 and closes[image] > at:
            at = int(opens[image])
        borders.append(at)
    return np.array(borders[:-1], dtype=np.int64), np.array(borders[1:], dtype=np.int64)
