"""Parquet files: rows of the columns that are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.sources.base import BLOCK_BYTES, BLOCK_RECORDS, Block, Finding, Record
from data.sources.files import FileMark, blamed_on, identity, listed, require_unchanged, stamp

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ParquetSource:
    """columns: those that every file must have; optional: read where a file has them."""

    marks: tuple[FileMark, ...]
    columns: tuple[str, ...]
    optional: tuple[str, ...]
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

    def require_columns(self) -> None:
        """DataError lists every file that is no Parquet or lacks a column. Reads the footers."""
        import pyarrow.parquet as pq

        bad = []
        for mark in self.marks:
            try:
                names = pq.read_schema(mark.path).names
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                bad.append(f"{mark.path}: no Parquet file ({_short(error)})")
                continue
            bad += [
                f"{mark.path}: no column {column!r} (columns here: {', '.join(names[:8])})"
                for column in self.columns
                if column not in names
            ]
        if bad:
            raise DataError(
                listed(bad, fix="set data.fields to the columns' names, or leave the files out")
            )

    def blocks(self, position: Any = None) -> Iterator[Block]:
        """position: [file, row group, rows of the group, rows of the file] that lie behind it."""
        first, group, skip, row = position or (0, 0, 0, 0)
        before = sum(mark.size for mark in self.marks[:first])
        for number in range(first, len(self.marks)):
            mark = self.marks[number]
            with blamed_on(number, mark.path):
                yield from self._file(number, group, skip, row, before)
                require_unchanged(mark)
            before += mark.size
            group = skip = row = 0

    def read(self, block: Block) -> Iterator[Record | Finding]:
        number, first, batch = block.payload
        return records(batch, number, first)

    def behind(self, file: int) -> Any:
        return [file + 1, 0, 0, 0]

    def _file(self, number: int, group: int, skip: int, row: int, before: int) -> Iterator[Block]:
        import pyarrow.parquet as pq

        mark = self.marks[number]
        with (
            _damage_told(mark.path),
            pq.ParquetFile(mark.path, memory_map=True, page_checksum_verification=True) as file,
        ):
            present = file.schema_arrow.names
            columns = [c for c in (*self.columns, *self.optional) if c in present]
            groups = file.num_row_groups
            for this in range(group, groups):
                about = file.metadata.row_group(this)
                rows = max(1, about.num_rows)
                step = BLOCK_BYTES * rows // max(1, about.total_byte_size)
                step = min(max(1, step), self.block_records)
                taken = 0
                for batch in file.iter_batches(step, row_groups=[this], columns=columns):
                    taken += batch.num_rows
                    if taken <= skip:
                        continue
                    first, row = row + 1, row + batch.num_rows
                    done = before + mark.size * (this * rows + taken) // (groups * rows)
                    yield Block((number, first, batch), [number, this, taken, row], done)
                skip = 0


@contextmanager
def _damage_told(path: str) -> Iterator[None]:
    """Arrow's errors as DataError; those of the system have a number."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(
            f"{path}: damaged ({_short(error)}); write or copy the file again"
        ) from error


def records(rows: pa.RecordBatch | pa.Table, file: int, first: int) -> Iterator[Record | Finding]:
    """The rows of a batch as records, numbered from `first`."""
    try:
        values = rows.to_pylist()
    except UnicodeDecodeError:  # Arrow takes any bytes for text
        yield from _one_by_one(rows, file, first)
        return
    for place, value in enumerate(values, start=first):
        yield Record(value, file, place)


def _one_by_one(rows: Any, file: int, first: int) -> Iterator[Record | Finding]:
    for number in range(rows.num_rows):
        try:
            (value,) = rows.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 ({error.reason}); write the row anew"
            yield Finding(file, first + number, problem)
        else:
            yield Record(value, file, first + number)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
