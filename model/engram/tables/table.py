"""One Engram layer's table in files: its rows by id, decoded, and what identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from model.engram.tables.file_rows import BadTableError, FileRows

SAMPLES = 256


@dataclass(frozen=True, eq=False)
class Table:
    """A table whose rows lie in `parts` (codes, and scales where the format has them).

    name: the tensor's name in its file. decode: the raw bytes of the same n rows of each part ->
    [n, head_dim] in the model's dtype.
    """

    name: str
    parts: tuple[FileRows, ...]
    decode: Callable[[Sequence[np.ndarray]], Tensor]

    @property
    def rows(self) -> int:
        return self.parts[0].rows

    def read(self, ids: np.ndarray) -> Tensor:
        """Rows `ids` (int64 [n], in range): [n, head_dim]. BadTableError names a row with a NaN."""
        values = self.decode([part.take(ids) for part in self.parts])
        if len(ids) and not all(bound.isfinite() for bound in values.aminmax()):
            row = int(ids[int((~values.isfinite().all(1)).nonzero()[0])])
            raise BadTableError(
                f"{self.parts[0].path}: row {row:,} of {self.name} holds values that are no finite "
                "numbers; the file is damaged: fetch it again"
            )
        return values

    def fingerprint(self) -> dict[str, Any]:
        """Name, size and the SHA-256 of some rows spread over the table, as plain data."""
        ids = sampled_rows(self.rows)
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(part.take(ids).tobytes())
        size = sum(part.nbytes for part in self.parts)
        return {"name": self.name, "bytes": size, "sampled_rows": digest.hexdigest()}

    def close(self) -> None:
        for part in self.parts:
            part.close()


def sampled_rows(rows: int) -> np.ndarray:
    """Row ids to look at for telling one table from another: int64, ascending, up to SAMPLES."""
    return np.unique(np.arange(SAMPLES, dtype=np.int64) * (rows - 1) // (SAMPLES - 1))
