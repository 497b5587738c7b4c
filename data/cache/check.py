"""Looks at every document of a source without keeping any: what cannot be used, what is twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.cache.encoded import ORIGIN
from data.cache.parallel import outcomes
from data.cache.pipeline import Pipeline
from data.cache.prepare import Progress
from data.cache.prepared import origin_text
from data.cache.recipe import Recipe
from data.documents import Document
from data.errors import BrokenFileError, DataError
from data.sources.base import Block, Finding, Record, Source


@dataclass(frozen=True, eq=False)
class Looked:
    """What there is to say of a block. hashes: uint64 of its good documents; origins: of each."""

    findings: list[Finding]
    hashes: np.ndarray
    origins: np.ndarray


@dataclass(frozen=True)
class Look:
    """Reads and encodes like a pipeline, and hashes instead of keeping. longest: tokens that an
    image may take."""

    pipeline: Pipeline
    longest: int

    @property
    def source(self) -> Source:
        return self.pipeline.source

    def run(self, block: Block) -> Looked:
        findings: list[Finding] = []
        records: list[Record] = []
        for read in self.source.read(block):
            findings.append(read) if isinstance(read, Finding) else records.append(read)
        hashes: list[int] = []
        origins: list[tuple[int, int]] = []
        documents = self.pipeline.kind.encode([record.value for record in records])
        for record, document in zip(records, documents, strict=True):
            told = document if isinstance(document, str) else self._problem(document)
            if told:
                findings.append(Finding(record.file, record.place, told))
            if not isinstance(document, str):
                hashes.append(_hash(document))
                origins.append((record.file, record.place))
        findings.sort(key=lambda finding: (finding.file, finding.place))
        return Looked(findings, np.array(hashes, np.uint64), np.array(origins, ORIGIN))

    def _problem(self, document: Document) -> str:
        for image in document.images:
            size = image.rows * (image.cols + 1) + 2
            if size > self.longest:
                return (
                    f"an image ({image.origin}) takes {size:,} tokens, more than "
                    f"data.pack_length={self.longest:,} has room for; make it smaller"
                )
        return self.pipeline.refusal(document)


class Check:
    """One source's check: iterate over its lines, each `file:line: problem`; then the counts.

    documents: good ones; duplicates: those of them that came before. Memory: 20 bytes a document.
    """

    def __init__(self, recipe: Recipe, *, pack_length: int, processes: int) -> None:
        self.documents = 0
        self.duplicates = 0
        self._name = recipe.name
        self._look = Look(recipe.pipeline, pack_length)
        self._files = recipe.pipeline.source.files
        self._processes = processes
        self._hashes: list[np.ndarray] = []
        self._origins: list[np.ndarray] = []

    def lines(self, progress: Progress) -> Iterator[str]:
        """Everything that is wrong, in the source's order, duplicates last."""
        source, position = self._look.source, None
        while True:
            try:
                yield from self._from(position, progress)
                break
            except BrokenFileError as error:
                yield str(error)
                position = source.behind(error.file)
            except DataError as error:
                yield f"{error} (what comes after it was not looked at)"
                break
        yield from self._twice()

    def _from(self, position: Any, progress: Progress) -> Iterator[str]:
        stream = outcomes(self._look, position=position, processes=self._processes)
        with closing(stream):
            for block, looked in stream:
                for finding in looked.findings:
                    yield f"{self._where(finding.file, finding.place)}: {finding.problem}"
                self.documents += len(looked.hashes)
                self._hashes.append(looked.hashes)
                self._origins.append(looked.origins)
                progress(self._name, block.done, self._look.source.size)

    def _twice(self) -> Iterator[str]:
        if not self.documents:
            return
        hashes, origins = np.concatenate(self._hashes), np.concatenate(self._origins)
        _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        for number in np.flatnonzero(first[which] != np.arange(len(hashes))).tolist():
            self.duplicates += 1
            here, there = origins[number].item(), origins[first[which[number]]].item()
            yield f"{self._where(*here)}: the same document as {self._where(*there)}; remove one"

    def _where(self, file: int, place: int) -> str:
        return origin_text(self._files[file], place)


def _hash(document: Document) -> int:
    digest = hashlib.blake2b(document.tokens.tobytes(), digest_size=8)
    for image in document.images:
        digest.update(image.blob)
    return int.from_bytes(digest.digest(), "little")
