"""Rows of equal size inside a file, by row id, without the file growing into memory.

A table has hundreds of millions of rows of which a step reads a scattered few. They are read by
position, not through a mapping: a mapping's pages stay with the process until they are given back,
which costs more than the read (twice the time, measured), and a disk's fault would end the process
without a word. What was read stays in the system's cache alone, which it takes back when it needs
the memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


class BadTableError(ValueError):
    """A table that a run reads from has failed: a row is no number, or cannot be read."""


class FileRows:
    """`rows` rows of `row_bytes` bytes each, from byte `offset` of a file on."""

    def __init__(self, path: Path, *, offset: int, rows: int, row_bytes: int) -> None:
        """ValueError when the file is shorter than that; OSError when it cannot be opened."""
        self.path, self.rows, self.row_bytes = path, rows, row_bytes
        self._offset = offset
        size = path.stat().st_size
        if offset + rows * row_bytes > size:
            raise ValueError(
                f"{path} ends at byte {size:,}, inside a table that reaches to byte "
                f"{offset + rows * row_bytes:,}: the file is cut short; fetch it again"
            )
        self._file = path.open("rb", buffering=0)
        if hasattr(os, "posix_fadvise"):  # no reading ahead of a row's neighbours
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Rows `ids` (int64 [n], in range): uint8 [n, row_bytes], a copy.

        Lets other threads run while it waits, so that several wait for a disk together.
        BadTableError when the file has failed or shrunk.
        """
        handle, size = self._file.fileno(), self.row_bytes
        places = (ids * size + self._offset).tolist()
        try:
            data = bytearray().join([os.pread(handle, size, place) for place in places])
        except OSError as error:
            raise BadTableError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(data) != len(ids) * size:
            raise BadTableError(f"{self.path} has become shorter since it was opened")
        return np.frombuffer(data, dtype=np.uint8).reshape(len(ids), size)

    def close(self) -> None:
        self._file.close()
