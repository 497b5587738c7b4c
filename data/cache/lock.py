"""One writer of a prepared set at a time, over all processes that see the cache."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.2


def lock_file(folder: Path) -> Path:
    """The lock of the prepared set in `folder`; beside it, since it may go and come again."""
    return folder.with_name(f"{folder.name}.lock")


@contextmanager
def locked(path: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; waits for another holder, and says once for whom.

    The lock goes with its process, however that ends: a dead holder's is taken over at once.
    """
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                say(f"Waiting for {_holder(handle)}, which is preparing the same data.")
                told = True
            os.close(handle)
            time.sleep(POLL_SECONDS)
            continue
        if _same_file(handle, path):
            break
        os.close(handle)  # its last holder removed it while we waited
    try:
        who = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.truncate(handle, 0)
        os.pwrite(handle, who, 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def held(path: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _holder(handle: int) -> str:
    try:
        about = json.loads(os.pread(handle, 4096, 0))
        return f"process {about['pid']} on {about['host']}"
    except (ValueError, KeyError, TypeError):  # it has only just taken the lock
        return "another process"


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
