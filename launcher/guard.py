"""No process outlives the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "DSV41_PARENT"  # environment: the id of the process that starts this one
INTERVAL = 0.5  # seconds between two looks at the parent
_PR_SET_PDEATHSIG = 1


def as_parent() -> dict[str, str]:
    """What a process adds to the environment of one that is to end with it."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """End this process by SIGKILL as soon as its parent is gone.

    The parent is the one that PARENT names, which may have ended before this process came here;
    whoever this one starts hears nothing of it. The kernel does it on Linux, even for a process
    that is stopped; a thread looks as well, since the kernel minds the thread that started us, and
    other systems do nothing.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name="parent-guard", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)
