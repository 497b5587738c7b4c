"""From a source's configuration to the source, looked at and found usable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.sources.base import BLOCK_RECORDS, IMAGE_BLOCK_RECORDS, Source
from data.sources.config import SourceConfig
from data.sources.files import find_files, mark_files

PATTERNS = {
    "jsonl": ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst"),
    "parquet": ("*.parquet",),
    "text": ("*.txt", "*.txt.gz", "*.txt.zst"),
}


def source_files(config: SourceConfig, *, name: str) -> list[Path]:
    """Files of a source that has some, in the order in which they are read.

    name: what the source's settings are called. DataError lists every path without a file.
    """
    return find_files(config.paths, patterns=PATTERNS[config.source], setting=f"{name}.paths")


def open_source(
    config: SourceConfig, *, name: str, columns: Sequence[str], optional: Sequence[str]
) -> Source:
    """The source of `config`, ready to be walked; `columns` are the fields that are read.

    Looks at every file (a sample of its bytes), so that all that cannot be read are named at once,
    by DataError.
    """
    records = IMAGE_BLOCK_RECORDS if config.kind == "image_chat" else BLOCK_RECORDS
    if config.source == "embedded":
        from data.sources.embedded import EmbeddedSource

        return EmbeddedSource(columns[0])
    if config.source == "pictures":
        from data.sources.pictures import PicturesSource

        f = config.fields
        return PicturesSource(f.messages, f.role, f.content, f.images)
    if config.source == "hf":
        from data.sources.hf import HfSource, open_hf, saved_to_disk

        dataset = config.paths[0]
        return open_hf(
            HfSource(
                name=dataset,
                subset=config.subset,
                split=config.split,
                revision=config.revision,
                streaming=config.streaming and not saved_to_disk(dataset),
                columns=tuple(columns),
                optional=tuple(optional),
                block_records=records,
            )
        )
    marks = mark_files(source_files(config, name=name), setting=f"{name}.paths")
    if config.source == "jsonl":
        from data.sources.jsonl import JsonlSource

        return JsonlSource(marks, records)
    if config.source == "text":
        from data.sources.text import TextSource

        return TextSource(marks, columns[0])
    from data.sources.parquet import ParquetSource

    parquet = ParquetSource(marks, tuple(columns), tuple(optional), records)
    parquet.require_columns()
    return parquet
