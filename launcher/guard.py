"""No process outlives the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
INTERVAL = 0.5  # seconds between two looks at the parent


def die_with_parent(parent: int) -> None:
    """End this process by SIGKILL as soon as `parent`, its parent's id, is gone.

    The kernel does it on Linux, even for a process that is stopped; a thread looks as well, since
    the kernel minds the thread that started us, and other systems do nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name="parent-guard", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)
