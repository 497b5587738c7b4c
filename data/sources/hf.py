"""A Hugging Face dataset: by name, or a folder that save_to_disk wrote; whole or streamed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.sources.base import BLOCK_BYTES, BLOCK_RECORDS, Block, Finding, Record
from data.sources.files import FileMark, identity, mark_files, stamp
from data.sources.parquet import records

FIRST_ROWS = 64  # of a block whose rows have an unknown size


@dataclass(frozen=True)
class HfSource:
    """Rows of one split. marks: the dataset's local files; none for a streamed one.

    built: what identifies a streamed dataset: the hash of its builder, which holds the revision.
    """

    name: str
    subset: str
    split: str
    revision: str
    streaming: bool  # read from where it is published; a folder on disk never needs that
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    marks: tuple[FileMark, ...] = ()
    built: str = ""
    block_records: int = BLOCK_RECORDS

    @property
    def files(self) -> Sequence[str]:
        parts = (self.name, self.subset, self.split)
        return [f"hf:{'/'.join(part for part in parts if part)}"]

    @property
    def size(self) -> int | None:
        return sum(mark.size for mark in self.marks) or None

    def identity(self) -> list[Any]:
        if not self.marks:
            return ["hf", self.name, self.subset, self.split, self.built]
        return ["hf", self.split, identity(self.marks)]

    def stamp(self) -> list[Any]:
        return [*self.identity(), self.name, stamp(self.marks)]

    def blocks(self, position: Any = None) -> Iterator[Block]:
        """position: rows that lie behind it."""
        row = position or 0
        data = _load(self)
        columns = self._columns(data)
        with _told(self.name):
            if columns is not None:
                data = data.select_columns(columns)
            data = data.with_format("arrow")
            yield from self._streamed(data, row) if self.streaming else self._whole(data, row)

    def behind(self, file: int) -> Any:
        raise AssertionError("its files are not read one by one")

    def read(self, block: Block) -> Iterator[Record | Finding]:
        first, table = block.payload
        return records(table, 0, first)

    def _whole(self, data: Any, row: int) -> Iterator[Block]:
        rows, size, step = len(data), self.size or 0, min(FIRST_ROWS, self.block_records)
        while row < rows:
            table = data[row : min(row + step, rows)].combine_chunks()
            first, row = row + 1, row + len(table)
            step = min(_rows_a_block(table), self.block_records)
            yield Block((first, table), row, size * row // rows)

    def _streamed(self, data: Any, row: int) -> Iterator[Block]:
        for table in data.skip(row).iter(batch_size=min(FIRST_ROWS * 4, self.block_records)):
            first, row = row + 1, row + len(table)
            yield Block((first, table), row, 0)

    def _columns(self, data: Any) -> list[str] | None:
        """Columns to read, or None when only the rows will tell."""
        present = data.column_names
        if present is None:
            return None
        missing = [c for c in self.columns if c not in present]
        if missing:
            raise DataError(
                f"{self.files[0]}: no column {missing[0]!r} (columns here: "
                f"{', '.join(present[:8])}); set data.fields to the columns' names"
            )
        return [c for c in (*self.columns, *self.optional) if c in present]


def open_hf(source: HfSource) -> HfSource:
    """`source` with what identifies its content. DataError when there is no such dataset."""
    data = _load(source)
    source._columns(data)
    if source.streaming:
        import datasets

        with _told(source.name):
            builder = datasets.load_dataset_builder(
                source.name, source.subset or None, revision=source.revision or None
            )
        text = json.dumps([builder.hash, str(builder.config_id)])
        return replace(source, built=hashlib.sha256(text.encode()).hexdigest())
    if not len(data):
        raise DataError(f"{source.files[0]} has no rows; choose another data.split")
    files = [Path(entry["filename"]) for entry in data.cache_files]
    return replace(source, marks=mark_files(files, setting="data.paths"))


def saved_to_disk(name: str) -> bool:
    """Whether `name` is a folder that save_to_disk wrote."""
    return any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _load(source: HfSource) -> Any:
    import datasets

    with _told(source.name):
        if saved_to_disk(source.name):
            return _on_disk(datasets.load_from_disk(source.name), source)
        return datasets.load_dataset(
            source.name,
            source.subset or None,
            split=source.split,
            streaming=source.streaming,
            revision=source.revision or None,
        )


def _on_disk(data: Any, source: HfSource) -> Any:
    import datasets

    if isinstance(data, datasets.DatasetDict):
        if source.split not in data:
            raise DataError(
                f"{source.name} has no split {source.split!r}; set data.split to one of "
                f"{', '.join(map(str, data))}"
            )
        data = data[source.split]
    return data


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Quiet while the library works; its many exceptions as one DataError."""
    import datasets
    import datasets.utils.logging as noise

    bars, level = datasets.are_progress_bars_disabled(), noise.get_verbosity()
    datasets.disable_progress_bars()
    noise.set_verbosity_error()
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        told = " ".join(str(error).split())[:300]
        raise DataError(
            f"hf dataset {name} cannot be read ({told}); check data.paths, data.subset and "
            "data.split, and the network if it is not on disk"
        ) from error
    finally:
        noise.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _rows_a_block(table: Any) -> int:
    rows = BLOCK_BYTES * len(table) // max(1, table.nbytes)
    return max(1, rows)
