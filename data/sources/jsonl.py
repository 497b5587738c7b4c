"""Files of one JSON object a line, plain, gzip or zstd."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import DataError
from data.sources.base import BLOCK_BYTES, BLOCK_RECORDS, Block, Finding, Record
from data.sources.files import FileMark, blamed_on, identity, require_unchanged, stamp
from data.sources.streams import chunks

LONGEST_LINE = 2**30


@dataclass(frozen=True)
class JsonlSource:
    """Lines of files, as whole lines in blocks of bytes."""

    marks: tuple[FileMark, ...]
    block_records: int = BLOCK_RECORDS

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
        """position: [file, bytes of its uncompressed content, lines] that lie behind it."""
        first, skip, line = position or (0, 0, 0)
        before = sum(mark.size for mark in self.marks[:first])
        for number in range(first, len(self.marks)):
            yield from self._file(number, skip, line, before)
            before += self.marks[number].size
            skip = line = 0

    def read(self, block: Block) -> Iterator[Record | Finding]:
        number, first, raw = block.payload
        for line, text in enumerate(raw.split(b"\n"), start=first):
            value = _parsed(text)
            if isinstance(value, str):
                yield Finding(number, line, value)
            else:
                yield Record(value, number, line)

    def behind(self, file: int) -> Any:
        return [file + 1, 0, 0]

    def _file(self, number: int, skip: int, line: int, before: int) -> Iterator[Block]:
        """Blocks of whole lines, without their last line feed."""
        mark = self.marks[number]
        with blamed_on(number, mark.path):
            with open(mark.path, "rb") as file:
                at = skip
                for raw in self._pieces(_behind(chunks(file, mark.path), skip), mark.path):
                    first, at = line + 1, at + len(raw)
                    line += raw.count(b"\n") + (not raw.endswith(b"\n"))
                    payload = (number, first, raw.removesuffix(b"\n"))
                    yield Block(payload, [number, at, line], before + file.tell())
            require_unchanged(mark)

    def _pieces(self, stream: Iterator[bytes], path: str) -> Iterator[bytes]:
        """The stream in pieces of whole lines, at most block_records of them."""
        for raw in _whole_lines(stream, path):
            while raw:
                rest = raw.split(b"\n", self.block_records)[self.block_records :]
                end = len(raw) - len(rest[0]) if rest else len(raw)
                yield raw[:end]
                raw = raw[end:]


def _behind(stream: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """The stream without its first `skip` bytes."""
    for data in stream:
        if skip < len(data):
            yield data[skip:]
        skip = max(0, skip - len(data))


def _whole_lines(stream: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The stream in pieces of about BLOCK_BYTES that end with a line (or the stream)."""
    parts: list[bytes] = []
    size = 0
    for data in stream:
        parts.append(data)
        size += len(data)
        if size < BLOCK_BYTES:
            continue
        end = data.rfind(b"\n") + 1
        if not end:
            if size > LONGEST_LINE:
                raise DataError(
                    f"{path}: a line of more than {LONGEST_LINE:,} bytes; "
                    "write one JSON object a line"
                )
            continue
        parts[-1] = data[:end]
        yield b"".join(parts)
        parts, size = [data[end:]], len(data) - end
    if rest := b"".join(parts):
        yield rest


def _parsed(raw: bytes) -> dict[str, Any] | str:
    """The object of one line, or what is wrong with it."""
    try:
        line = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start}); convert the file to UTF-8"
    if not line.strip():
        return "the line is empty; remove it"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); write one JSON object a line"
    if not isinstance(value, dict):
        return f'a JSON {type(value).__name__}, not an object; write {{"text": "..."}}'
    return value
