"""Whether the disk of the cache has room for what is still to come."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from data.errors import CacheError

LOOK_SECONDS = 5.0
SPARE = 2**24  # bytes left to others


class RoomCheck:
    """Compares free space with what the rest of a source will need, going by its first part.

    folder: of the set; it need not exist yet. total: bytes of the source, None if nobody knows.
    """

    def __init__(self, folder: Path, *, total: int | None) -> None:
        self._folder = folder
        self._total = total
        self._first: tuple[int, int] | None = None
        self._needed = total  # text and its tokens are of about the same size
        self._looked = float("-inf")

    def look(self, *, written: int, done: int) -> None:
        """CacheError when the rest will not fit; looks at the disk every few seconds only.

        written: bytes in the cache by now; done: bytes of the source that are read.
        """
        if self._first is None:
            self._first = (written, done)
        grown, read = written - self._first[0], done - self._first[1]
        if not self._total or not read:
            return
        self._needed = grown * max(0, self._total - done) // read
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._needed + SPARE > shutil.disk_usage(self._folder).free:
            raise full(self._folder, needed=self._needed)

    def watched(self) -> AbstractContextManager[None]:
        """A refused write below the folder as CacheError."""
        return told_when_full(self._folder, needed=self._needed)


@contextmanager
def told_when_full(folder: Path, *, needed: int | None = None) -> Iterator[None]:
    """A refused write below `folder` as CacheError. needed: bytes, if somebody knows."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(folder, needed=needed) from error
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
    wants = "more room" if needed is None else f"about {needed:,} bytes more"
    return CacheError(
        f"The prepared data needs {wants}, and the disk of {folder} has {free:,} bytes free. The "
        "unfinished part was removed. Free space there, or set data.cache_dir=FOLDER on another "
        "disk; what is finished is kept and used.",
        full=True,
    )
