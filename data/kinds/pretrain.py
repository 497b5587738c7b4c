"""Kind `pretrain`: texts. A document is begin of sentence, the text's tokens, end of sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.documents import Document
from data.kinds.base import field_of, text_of
from data.tokenizer import Encoder


@dataclass(frozen=True)
class Pretrain:
    """Texts under the field name `text`; every token may be predicted."""

    encoder: Encoder
    text: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    @property
    def masked(self) -> bool:
        return False

    def settings(self) -> dict[str, Any]:
        return {"kind": "pretrain", "text": self.text, **self.encoder.settings()}

    def encode(self, values: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        texts: list[str] = []
        found: list[Document | str] = []
        for value in values:
            try:
                texts.append(text_of(field_of(value, self.text), f"field {self.text!r}"))
                found.append("")
            except ValueError as error:
                found.append(str(error))
        encoded = iter(self.encoder.encode(texts))
        return [told or self._document(next(encoded)) for told in found]

    def _document(self, ids: np.ndarray) -> Document | str:
        if self.encoder.special()[ids].all():
            return "nothing but special tokens; remove it or give it text"
        if told := self.encoder.problem(ids):
            return told
        tokens = np.empty(len(ids) + 2, dtype=np.int32)
        tokens[0], tokens[-1] = self.encoder.bos, self.encoder.eos
        tokens[1:-1] = ids
        return Document(tokens)
