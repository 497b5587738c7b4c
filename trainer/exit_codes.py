"""The exit codes of every process of this project, the same for launchers, ranks and tools."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a process ended, in one number that a supervisor can act on.

    Numbers from 64 to 78 follow BSD's sysexits where a meaning fits; 130 is what a shell shows
    after Ctrl-C. Anything else is a crash.
    """

    DONE = 0
    USAGE = 2  # a command line that cannot be read
    BAD_DATA = 65  # a document, a file or a tokenizer that cannot be used
    BUG = 70  # our fault
    CANNOT_CREATE = 73  # an output cannot be made
    IO_ERROR = 74  # writing or reading failed, a full disk for example
    AGAIN = 75  # checkpointed; run me again
    HANG = 76  # a rank stopped answering
    DIVERGED = 77  # the loss or a gradient is not finite; do not retry
    CONFIG = 78  # bad configuration or out of memory; do not retry
    INTERRUPTED = 130  # stopped by the user
