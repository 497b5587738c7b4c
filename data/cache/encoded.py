"""Documents as flat arrays: what travels from a tokenising process to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.documents import Document

ORIGIN = np.dtype([("file", "<i4"), ("place", "<i8")])
SPAN = np.dtype(
    [
        ("document", "<i8"),  # its number, in the window or in these arrays
        ("offset", "<i8"),  # of the span's start, in the document
        ("rows", "<i4"),
        ("cols", "<i4"),
        ("blob_offset", "<i8"),
        ("blob_length", "<i8"),
        ("width", "<i4"),
        ("height", "<i4"),
    ]
)


@dataclass(frozen=True, eq=False)
class Encoded:
    """n documents end to end.

    tokens int32 [total]; lengths int32 [n]; labelled bool [total], None when every token is;
    origins ORIGIN [n]; spans SPAN [images], by document and offset; blobs uint8: the image files
    that the spans point into.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    labelled: np.ndarray | None
    origins: np.ndarray
    spans: np.ndarray
    blobs: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, documents: Sequence[Document], origins: Sequence[tuple[int, int]]) -> Encoded:
        """The given documents; origins: (number of the file, line or row) of each."""
        spans: list[tuple[int, ...]] = []
        blobs: list[bytes] = []
        at = 0
        for number, document in enumerate(documents):
            for image in document.images:
                size = (image.rows, image.cols)
                where = (number, image.offset, *size, at, len(image.blob))
                spans.append((*where, image.width, image.height))
                blobs.append(image.blob)
                at += len(image.blob)
        return cls(
            tokens=_joined([d.tokens for d in documents], np.int32),
            lengths=np.array([len(d.tokens) for d in documents], dtype=np.int32),
            labelled=_labelled(documents),
            origins=np.array(list(origins), dtype=ORIGIN),
            spans=np.array(spans, dtype=SPAN),
            blobs=np.frombuffer(b"".join(blobs), dtype=np.uint8),
        )

    def part(self, first: int, end: int) -> Encoded:
        """Documents first..end-1 alone."""
        borders = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        tokens = slice(int(borders[first]), int(borders[end]))
        spans = self.spans[(self.spans["document"] >= first) & (self.spans["document"] < end)]
        spans = spans.copy()
        blobs = self.blobs[:0]
        if len(spans):
            begin = int(spans["blob_offset"][0])
            blobs = self.blobs[begin : int(spans["blob_offset"][-1] + spans["blob_length"][-1])]
            spans["blob_offset"] -= begin
            spans["document"] -= first
        return Encoded(
            self.tokens[tokens],
            self.lengths[first:end],
            None if self.labelled is None else self.labelled[tokens],
            self.origins[first:end],
            spans,
            blobs,
        )


def _labelled(documents: Sequence[Document]) -> np.ndarray | None:
    if all(d.labelled is None for d in documents):
        return None
    masks = [np.ones(len(d.tokens), bool) if d.labelled is None else d.labelled for d in documents]
    return _joined(masks, bool)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
