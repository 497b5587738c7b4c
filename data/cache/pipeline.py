"""A block of a source to documents, in whichever process there is time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data.cache.encoded import Encoded
from data.documents import Document
from data.kinds.base import Kind
from data.sources.base import Block, Finding, Record, Source


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out of a block. dropped: documents left out because a setting says so."""

    encoded: Encoded
    findings: list[Finding]
    dropped: int


@dataclass(frozen=True)
class Pipeline:
    """Reads, tokenises and cuts. max_length, on_long: data.max_document_length and
    data.on_long_document."""

    source: Source
    kind: Kind
    max_length: int | None
    on_long: str

    def run(self, block: Block) -> Outcome:
        """The documents of a block, in its order, and everything that is wrong with it."""
        records: list[Record] = []
        findings: list[Finding] = []
        for read in self.source.read(block):
            if isinstance(read, Finding):
                findings.append(read)
            else:
                records.append(read)
        documents: list[Document] = []
        origins: list[tuple[int, int]] = []
        dropped = 0
        encoded = self.kind.encode([record.value for record in records])
        for record, document in zip(records, encoded, strict=True):
            if isinstance(document, str):
                findings.append(Finding(record.file, record.place, document))
            elif not self.max_length or len(document.tokens) <= self.max_length:
                documents.append(document)
                origins.append((record.file, record.place))
            elif self.on_long == "drop":
                dropped += 1
            elif told := self.refusal(document):
                findings.append(Finding(record.file, record.place, told))
            else:
                pieces = list(_cut(document, self.max_length))
                documents += pieces
                origins += [(record.file, record.place)] * len(pieces)
        return Outcome(Encoded.of(documents, origins), findings, dropped)

    def refusal(self, document: Document) -> str:
        """Why a document is refused for its length; empty when it is not."""
        size = len(document.tokens)
        if not self.max_length or size <= self.max_length or self.on_long != "refuse":
            return ""
        return (
            f"{size:,} tokens, more than data.max_document_length="
            f"{self.max_length:,}; shorten it, raise the limit, or set data.on_long_document=drop"
        )


def _cut(document: Document, length: int) -> Iterator[Document]:
    assert document.labelled is None and not document.images, "only texts are split"
    for start in range(0, len(document.tokens), length):
        yield Document(document.tokens[start : start + length])
