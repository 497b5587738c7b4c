"""What every source offers: blocks of records that can be read by any process.

A source is walked in one process, which only cuts it into blocks (cheap); the blocks are read,
parsed and tokenised wherever there is time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BLOCK_BYTES = 2**20
BLOCK_RECORDS = 2**14
IMAGE_BLOCK_RECORDS = 2**6  # where records name image files: all of a block are held at once


@dataclass(frozen=True)
class Block:
    """A stretch of a source.

    payload: what its records are read from; picklable. position: where the source goes on behind
    it, as JSON has it. done: bytes of the source up to there.
    """

    payload: Any
    position: Any
    done: int


@dataclass(frozen=True)
class Record:
    """One record. file: its number among the source's files; place: line or row, from 1; 0 = the
    file as a whole."""

    value: Mapping[str, Any]
    file: int
    place: int


@dataclass(frozen=True)
class Finding:
    """Something that cannot be used, and its fix. file and place as in a Record."""

    file: int
    place: int
    problem: str


class Source(Protocol):
    """Records in an order that is always the same. Plain data, sent to other processes."""

    @property
    def files(self) -> Sequence[str]:
        """Names by number, for messages."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes in all, or None where nobody knows."""
        ...

    def identity(self) -> list[Any]:
        """What decides the content, as plain data; the same wherever the source lies."""
        ...

    def stamp(self) -> list[Any]:
        """Like identity, with what changes when a file is rewritten: paths and times."""
        ...

    def blocks(self, position: Any = None) -> Iterator[Block]:
        """The source from its start, or from where a Block said that it goes on.

        BrokenFileError for a file that cannot be read on; other DataErrors stop the whole.
        """
        ...

    def read(self, block: Block) -> Iterator[Record | Finding]:
        """The records of a block."""
        ...

    def behind(self, file: int) -> Any:
        """The position behind a file, from which to go on when it is broken."""
        ...
