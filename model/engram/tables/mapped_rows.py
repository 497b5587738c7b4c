"""Rows of equal size inside a memory-mapped file, by row id, without the file growing into memory.

A table has hundreds of millions of rows of which a step reads a scattered few. So the mapping is
marked random (no read-ahead of neighbours), rows are copied out some thousand at a time, and the
pages behind each lot are given back to the kernel at once: what stays resident is bounded by
`LOT` rows a reader, whatever the file's size and however long the run.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

LOT = 2048  # rows copied before their pages are given back; a fault may map 64 KB around a row


class MappedRows:
    """`rows` rows of `row_bytes` bytes each, from byte `offset` of a file on."""

    def __init__(self, path: Path, *, offset: int, rows: int, row_bytes: int) -> None:
        """ValueError when the file is shorter than that; OSError when it cannot be opened."""
        self.path, self.rows, self.row_bytes = path, rows, row_bytes
        size = path.stat().st_size
        if offset + rows * row_bytes > size:
            raise ValueError(
                f"{path} ends at byte {size:,}, inside a table that reaches to byte "
                f"{offset + rows * row_bytes:,}: the file is cut short; fetch it again"
            )
        self._skip = offset % mmap.ALLOCATIONGRANULARITY
        with path.open("rb") as file:
            self._map = mmap.mmap(
                file.fileno(),
                self._skip + rows * row_bytes,
                access=mmap.ACCESS_READ,
                offset=offset - self._skip,
            )
        self._map.madvise(mmap.MADV_RANDOM)
        flat = np.frombuffer(self._map, np.uint8, count=rows * row_bytes, offset=self._skip)
        self._rows = flat.reshape(rows, row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Rows `ids` (int64 [n], ascending, in range): uint8 [n, row_bytes], a copy.

        Releases the GIL while it copies, so several threads wait for a disk together.
        """
        out = np.empty((len(ids), self.row_bytes), dtype=np.uint8)
        for low in range(0, len(ids), LOT):
            lot = ids[low : low + LOT]
            out[low : low + LOT] = np.take(self._rows, lot, axis=0)
            self._give_back(int(lot[0]), int(lot[-1]))
        return out

    def _give_back(self, first: int, last: int) -> None:
        start = self._skip + first * self.row_bytes
        start -= start % mmap.PAGESIZE
        end = self._skip + (last + 1) * self.row_bytes
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
