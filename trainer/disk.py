"""What a full or read-only disk looks like to a person."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.agreement import agreed

if TYPE_CHECKING:
    from trainer.ranks import Ranks


class DiskError(Exception):
    """Writing the run's output failed; the message names the disk and the fix.

    full: no space is left, or would not be; otherwise the disk refuses (read-only, permissions,
    hardware).
    """

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


def disk_error(error: OSError, *, doing: str, path: Path) -> DiskError:
    """The DiskError for `error`, met while `doing` something ("saving step 8") below `path`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = describe_disk(path)
    if full:
        return DiskError(
            f"No space left while {doing}: {where}. Free space there, then resume.", full=True
        )
    return DiskError(
        f"Cannot write while {doing}: {error.strerror or error} ({error.filename or path}); "
        f"{where}. Make it writable, or choose another runs_dir.",
        full=False,
    )


@contextmanager
def agreed_writes(ranks: Ranks, *, doing: str, path: Path) -> Iterator[None]:
    """`agreed`, with an OSError met below `path` turned into DiskError."""
    with agreed(ranks):
        try:
            yield
        except OSError as failure:
            raise disk_error(failure, doing=doing, path=path) from failure


def describe_disk(path: Path) -> str:
    """The mount point of `path` and what is free on it, as words."""
    existing = nearest_existing(path)
    free = shutil.disk_usage(existing).free
    return f"the disk at {mount_point(existing)} has {megabytes(free)} free"


def mount_point(path: Path) -> Path:
    """The root of the file system that `path` is on."""
    current = path.resolve()
    while not os.path.ismount(current):
        current = current.parent
    return current


def nearest_existing(path: Path) -> Path:
    """`path`, or its closest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def megabytes(size: int) -> str:
    """A number of bytes in whole MB (10**6), at least 1 unless zero."""
    return f"{-(-size // 10**6):,} MB"


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_text(file: Path, text: str) -> None:
    """Write `text` under a temporary name and rename it: readers find the file whole or not at all,
    and two writers do not mix. Not durable: a power cut may undo it."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(file)
