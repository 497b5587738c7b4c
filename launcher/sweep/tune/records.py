"""The records of a run that trains, as they come."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainer.metrics import Record


class Records:
    """Reads metrics.jsonl from where it was read last. A run that is started again writes the file
    anew, without what it will repeat: then it is read from its beginning."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at, self._node = 0, 0

    def new(self) -> list[Record]:
        """The whole records that have been added; a line that is no record is passed over."""
        try:
            with self._file.open("rb") as file:
                node = os.fstat(file.fileno()).st_ino
                if node != self._node:
                    self._at, self._node = 0, node
                file.seek(self._at)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [record for line in whole.splitlines() if (record := _record(line))]


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None
