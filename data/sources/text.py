"""Files of plain text, one document each; gzip and zstd are unpacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import DataError
from data.sources.base import BLOCK_BYTES, BLOCK_RECORDS, Block, Finding, Record
from data.sources.files import FileMark, identity, require_unchanged, stamp, unreadable
from data.sources.streams import chunks


@dataclass(frozen=True)
class TextSource:
    """Each file's text under the field name `field`."""

    marks: tuple[FileMark, ...]
    field: str

    @property
    def files(self) -> Sequence[str]:
        return [mark.path for mark in self.marks]

    @property
    def size(self) -> int:
        return sum(mark.size for mark in self.marks)

    def identity(self) -> list[Any]:
        return identity(self.marks)

    def stamp(self) -> list[Any]:
        return stamp(self.marks)

    def blocks(self, position: Any = None) -> Iterator[Block]:
        """position: files that lie behind it."""
        first = end = position or 0
        done = sum(mark.size for mark in self.marks[:first])
        size = 0
        while end < len(self.marks):
            size += self.marks[end].size
            end += 1
            if size >= BLOCK_BYTES or end - first == BLOCK_RECORDS or end == len(self.marks):
                done += size
                yield Block((first, end), end, done)
                first, size = end, 0

    def behind(self, file: int) -> Any:
        return file + 1

    def read(self, block: Block) -> Iterator[Record | Finding]:
        for number in range(*block.payload):
            mark = self.marks[number]
            try:
                raw = _contents(mark)
            except DataError as error:
                yield Finding(number, 0, str(error).removeprefix(f"{mark.path}: "))
                continue
            try:
                yield Record({self.field: raw.decode("utf-8-sig")}, number, 0)
            except UnicodeDecodeError as error:
                line = raw.count(b"\n", 0, error.start) + 1
                problem = f"not UTF-8 ({error.reason}); convert the file to UTF-8"
                yield Finding(number, line, problem)


def _contents(mark: FileMark) -> bytes:
    try:
        with open(mark.path, "rb") as file:
            raw = b"".join(chunks(file, mark.path))
    except OSError as error:
        raise unreadable(mark.path, error) from error
    require_unchanged(mark)
    return raw
