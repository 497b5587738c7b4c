"""The prose of Python's own help topics: real text that needs no download."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.sources.base import BLOCK_BYTES, Block, Record


@dataclass(frozen=True)
class EmbeddedSource:
    """Each topic's text under the field name `field`, in the order of the topics' names."""

    field: str

    @property
    def files(self) -> Sequence[str]:
        return [f"pydoc_data.topics[{key!r}]" for key, _ in _topics()]

    @property
    def size(self) -> int:
        return sum(len(text) for _, text in _topics())

    def identity(self) -> list[Any]:
        digest = hashlib.sha256(repr(_topics()).encode())
        return ["embedded", digest.hexdigest()]

    def stamp(self) -> list[Any]:
        return self.identity()

    def blocks(self, position: Any = None) -> Iterator[Block]:
        """position: topics that lie behind it."""
        topics = _topics()
        first = position or 0
        done = sum(len(text) for _, text in topics[:first])
        size = 0
        for end, (_, text) in enumerate(topics[first:], start=first + 1):
            size += len(text)
            if size >= BLOCK_BYTES or end == len(topics):
                done += size
                yield Block((first, end), end, done)
                first, size = end, 0

    def behind(self, file: int) -> Any:
        return file + 1

    def read(self, block: Block) -> Iterator[Record]:
        for number in range(*block.payload):
            yield Record({self.field: _topics()[number][1]}, number, 0)


@functools.cache
def _topics() -> tuple[tuple[str, str], ...]:
    from pydoc_data.topics import topics

    return tuple(sorted(topics.items()))
