"""A document: what a model is trained on as one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ImagePiece:
    """One image of a document.

    Its span begins at token `offset` and takes rows * (cols + 1) + 2 tokens: a start, rows of cols
    image tokens and a newline each, an end. width, height: the planned pixels. blob: the image
    file as it came. origin: where it came from, for messages.
    """

    offset: int
    rows: int
    cols: int
    width: int
    height: int
    blob: bytes
    origin: str


@dataclass(frozen=True, eq=False)
class Document:
    """What a model is trained on as one sequence.

    tokens: int32 [n], with begin and end of sentence, image spans expanded to the image token.
    labelled: bool [n], True where a token may be predicted (its label stands at the position
    before it); None when all may be.
    """

    tokens: np.ndarray
    labelled: np.ndarray | None = None
    images: tuple[ImagePiece, ...] = ()
