"""Whether the disk of the cache has room for what is still to come."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import CacheError

LOOK_SECONDS = 5.0
SPARE = 2**24  # bytes left to others


class RoomCheck:
    """Compares free space with what the rest of a source will need, going by its first part."""

    def __init__(self, folder: Path, *, total: int | None) -> None:
        self._folder = folder
        self._total = total
        self._first: tuple[int, int] | None = None
        self._looked = float("-inf")

    def look(self, *, written: int, done: int) -> None:
        """CacheError when the rest will not fit; looks every few seconds only.

        written: bytes in the cache by now; done: bytes of the source that are read.
        """
        if self._first is None:
            self._first = (written, done)
        grown, read = written - self._first[0], done - self._first[1]
        if not self._total or not read or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        needed = grown * max(0, self._total - done) // read
        if needed + SPARE > shutil.disk_usage(self._folder).free:
            raise full(self._folder, needed=needed)


@contextmanager
def told_when_full(folder: Path) -> Iterator[None]:
    """A refused write below `folder` as CacheError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(folder, needed=None) from error
        raise CacheError(
            f"The cache {folder} cannot be written ({error.strerror or error}: "
            f"{error.filename or folder}); make it writable, or set data.cache_dir=FOLDER",
            full=False,
        ) from error


def full(folder: Path, *, needed: int | None) -> CacheError:
    """What to tell when the disk is full, or would be. needed: bytes, if somebody knows."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    wants = "more" if needed is None else f"about {needed:,} bytes more"
    return CacheError(
        f"The prepared data needs {wants}, and the disk of {folder} has {free:,} bytes free. The "
        "unfinished part was removed. Free space there, or set data.cache_dir=FOLDER on another "
        "disk; what is finished is kept and used.",
        full=True,
    )
