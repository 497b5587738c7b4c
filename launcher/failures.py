"""An exception that came past the trainer -> an outcome, with what a person can do."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.problems import Stop
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

_REFUSED = {errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Terminated(BaseException):
    """SIGTERM or SIGUSR2 came while nobody was ready to note it and go on to a checkpoint."""


@contextmanager
def terminable() -> Iterator[Callable[[], None]]:
    """While entered, SIGTERM and SIGUSR2, which warns of the end of a job's time, raise Terminated;
    by default they end a process without a word. Once the result has been called they do nothing:
    how the work ended is known, and would be lost.

    The trainer replaces this while it trains, and puts it back.
    """
    settled = False

    def leave(number: int, frame: object) -> None:
        if not settled:
            raise Terminated

    def settle() -> None:
        nonlocal settled
        settled = True

    if threading.current_thread() is not threading.main_thread():
        yield settle
        return
    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        yield settle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outcome_of(error: BaseException, *, log: Path) -> Outcome:
    """What `error` means; `log` is the file that holds its traceback.

    The step is 0: the trainer knows it, and the exception came past the trainer.
    """
    if isinstance(error, KeyboardInterrupt):
        return Outcome(ExitCode.INTERRUPTED, "interrupted", 0, "Stopped before the first step.")
    if isinstance(error, Terminated):
        return Outcome(ExitCode.AGAIN, "stopped", 0, "Asked to stop before the first step.")
    if isinstance(error, Stop):
        return Outcome(error.code, "refused", 0, error.message)
    if known := _known_to_trainer(error):
        return known
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError):
        return _of_os_error(error, log=log)
    where = f"The traceback is in {log}"
    if isinstance(error, ValueError):
        return Outcome(ExitCode.CONFIG, "bad configuration", 0, f"{text}\n{where}")
    told = f"{type(error).__name__}: {text.partition(chr(10))[0][:300]}"
    message = f"This should not have happened: {told}\n{where}; please report it."
    return Outcome(ExitCode.BUG, "bug", 0, message)


def _known_to_trainer(error: BaseException) -> Outcome | None:
    try:
        from trainer.failures import failure_outcome
    except ImportError:  # what failed may be the import of torch
        return None
    return failure_outcome(error, step=0)


def _of_os_error(error: OSError, *, log: Path) -> Outcome:
    reason = error.strerror or str(error)
    if error.filename:
        reason = f"{error.filename}: {reason}"
    if error.errno in _FULL:
        message = f"{reason}.\nFree space there, then resume."
        return Outcome(ExitCode.IO_ERROR, "disk full", 0, message)
    if error.errno in _REFUSED:
        message = f"{reason}.\nMake it writable, or choose another place: runs_dir=FOLDER"
        return Outcome(ExitCode.CANNOT_CREATE, "cannot write", 0, message)
    return Outcome(ExitCode.IO_ERROR, "IO error", 0, f"{reason}.\nThe traceback is in {log}")
