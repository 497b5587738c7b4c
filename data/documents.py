"""A document as tokens, and texts as documents in two flat arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.config import DataConfig
from data.errors import DataError
from data.sources import RawDocument, open_source
from data.tokenizer import load_tokenizer, special_tokens

if TYPE_CHECKING:
    from model.config import ModelConfig

CHUNK_CHARACTERS = 4_000_000
Progress = Callable[[int, int], None]


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


@dataclass(frozen=True)
class Documents:
    """All documents end to end: document i is tokens[offsets[i]:offsets[i + 1]].

    tokens: int32, each document as [bos, text..., eos]. offsets: int64 [documents + 1].
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def tokenise(
    config: DataConfig, model: ModelConfig, *, progress: Progress | None = None
) -> Documents:
    """Read and encode every document of the source.

    progress(done, total) is called in bytes of the source. DataError names a document that has
    no text besides special tokens, and a source without documents.
    """
    backend = load_tokenizer(config.tokenizer).backend_tokenizer
    special = special_tokens(config.tokenizer, model)
    bos, eos = np.int32(model.bos_token_id), np.int32(model.eos_token_id)
    parts: list[np.ndarray] = []
    source = open_source(config)

    def encode(chunk: list[RawDocument]) -> None:
        encoded = backend.encode_batch_fast([d.text for d in chunk], add_special_tokens=False)
        for document, encoding in zip(chunk, encoded, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            if special[ids].all():
                raise DataError(
                    f"{document.where}: nothing but special tokens; remove it or give it text"
                )
            parts.append(np.concatenate(([bos], ids, [eos])))
        if progress is not None:
            progress(chunk[-1].done, source.size)

    chunk: list[RawDocument] = []
    characters = 0
    for document in source.documents:
        chunk.append(document)
        characters += len(document.text)
        if characters >= CHUNK_CHARACTERS:
            encode(chunk)
            chunk, characters = [], 0
    if chunk:
        encode(chunk)
    if not parts:
        raise DataError(f"data.source={config.source} holds no document; correct data.paths")
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return Documents(np.concatenate(parts), offsets)
