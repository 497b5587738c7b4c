"""Which exit code an exception means, and that its message helps."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from data.errors import DataError
from launcher.failures import Terminated, outcome_of, terminable
from launcher.problems import Stop
from trainer.disk import DiskError
from trainer.exit_codes import ExitCode

LOG = Path("/runs/x/rank-00000.log")


def os_error(number: int, file: str = "/runs/x/file") -> OSError:
    return OSError(number, os.strerror(number), file)


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (DataError("a.jsonl:3: not JSON"), ExitCode.BAD_DATA, "a.jsonl:3"),
        (ValueError("data.x=3 is odd; use 4"), ExitCode.CONFIG, "use 4"),
        (Stop(ExitCode.CONFIG, "do this"), ExitCode.CONFIG, "do this"),
        (DiskError("the disk at /mnt", full=True), ExitCode.IO_ERROR, "/mnt"),
        (os_error(errno.ENOSPC), ExitCode.IO_ERROR, "/runs/x/file: No space left"),
        (os_error(errno.EROFS), ExitCode.CANNOT_CREATE, "runs_dir=FOLDER"),
        (os_error(errno.EACCES), ExitCode.CANNOT_CREATE, "/runs/x/file: Permission denied"),
        (os_error(errno.EIO), ExitCode.IO_ERROR, str(LOG)),
        (MemoryError(), ExitCode.CONFIG, "Out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            ExitCode.CONFIG,
            "Out of memory",
        ),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "before the first step"),
        (Terminated(), ExitCode.AGAIN, "before the first step"),
        (KeyError("oops"), ExitCode.BUG, str(LOG)),
        (RuntimeError("shapes differ\nlong story"), ExitCode.BUG, "RuntimeError: shapes differ\n"),
        (AssertionError(), ExitCode.BUG, "AssertionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_codes(error: BaseException, code: ExitCode, part: str) -> None:
    outcome = outcome_of(error, log=LOG)
    assert outcome.code == code
    assert part in outcome.message
    assert len(outcome.message.splitlines()) < 10


def test_sigterm_is_an_exception_while_terminable() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
