"""Memory of tensors on the CPU, from the C library's heap."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

# Parameters of glibc's mallopt, see malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # bytes, the most that glibc allows for _MMAP_THRESHOLD
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep the memory that tensors leave, for the tensors of the next step.

    glibc gives it back to the system as soon as some MB are free, and gets it again a few
    milliseconds later, page by page, each a fault: some 9,000 in a step of 1,024 tokens. The
    process's peak stays what it is; it does not fall below it between two peaks. Other C libraries
    are left as they are.
    """
    if sys.platform != "linux":
        return
    with suppress(AttributeError):  # no mallopt: musl
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _NEVER)
