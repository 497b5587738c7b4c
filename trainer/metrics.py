"""metrics.jsonl: one JSON object per logged step or evaluation, the record that all views read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from trainer.disk import disk_error, sync_folder

Record = dict[str, Any]


class MetricsLog:
    """Appends records; a resumed run reads as if it had never stopped.

    Opening drops what a resume will repeat: every record past `last_step`, and a line cut short
    by a crash. sync() makes all records durable and is called before each checkpoint appears, so
    that a checkpoint of step n implies the records up to n. Raises DiskError when it cannot write.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self.path = path
        try:
            if path.exists():
                _rewrite(path, [r for r in read_metrics(path) if r["step"] <= last_step])
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise disk_error(error, doing="opening the metrics", path=path) from error

    def write(self, record: Record) -> None:
        """Append one record. A float that is not finite becomes null, which every reader takes."""
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise disk_error(error, doing="writing the metrics", path=self.path) from error

    def sync(self) -> None:
        """Return when all records are on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, doing="writing the metrics", path=self.path) from error

    def close(self) -> None:
        """Close the file; records are durable after sync() only."""
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """All whole records of a metrics file, in order; a last line without an end is ignored.

    Raises ValueError naming file and line for a line that is no record.
    """
    *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number} is no metrics record ({error}); remove that line"
            ) from error
        records.append(record)
    return records


def _rewrite(path: Path, records: list[Record]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def _line(record: Record) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
