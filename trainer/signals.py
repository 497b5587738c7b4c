"""Ctrl-C, SIGTERM, SIGUSR2 and a file become a request that the loop reads between two steps."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

from trainer.disk import put_text
from trainer.exit_codes import ExitCode

STOP_FILE = "stop"  # in an attempt's folder
LOOK_SECONDS = 0.5  # between two looks at it
GRACE = "DSV41_GRACE_S"  # environment: seconds from a cluster's request to the end by force

_EXIT_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.AGAIN,
    signal.SIGUSR2: ExitCode.AGAIN,  # a batch system's warning that the time is nearly over
}


def request_stop(
    file: Path, code: ExitCode, *, why: str, now: bool = False, until: float | None = None
) -> None:
    """Ask the ranks of an attempt to checkpoint and end with `code`, 75 or 130, by its stop file.

    A file reaches every rank that shares the folder, however it was started. now: without a
    checkpoint, and a supervisor ends them by force. until: when they are ended by force, in seconds
    since the epoch; None = never, the checkpoint may take its time.
    """
    asked = {"code": int(code), "why": why, "now": now, "until": until}
    put_text(file, json.dumps(asked) + "\n")


def requested_stop(file: Path) -> ExitCode | None:
    """The code that a stop file asks for; None without one."""
    try:
        return ExitCode(json.loads(file.read_text("utf-8"))["code"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return ExitCode.AGAIN  # it is there: whoever made it meant to stop the run


def wanted_now(file: Path) -> bool:
    """Whether a stop file asks for the end at once."""
    try:
        return json.loads(file.read_text("utf-8"))["now"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def time_given(file: Path) -> float:
    """Seconds until the end by force that a stop file announces; infinite if it announces none."""
    try:
        asked = json.loads(file.read_text("utf-8"))
        return 0.0 if asked["now"] is True else float(asked["until"]) - time.time()
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


class StopSignals:
    """While entered, the first SIGINT, SIGTERM or SIGUSR2 is only noted, so that a save can follow.

    A second signal takes its default action: the process leaves at once, unsaved; but where
    somebody will end it by force (GRACE is set) only Ctrl-C does, since clusters repeat the others
    while a save is under way. A person who presses Ctrl-C waits for the save, however long. Signals
    reach the main thread alone; entered in another thread this notes nothing. notice: shown on
    standard error at the first signal, since a step can take long. file: one that asks for the
    same.
    """

    def __init__(self, *, notice: str = "", file: Path | None = None) -> None:
        self._notice = notice
        self._file = file
        self._noted: ExitCode | None = None
        self._previous: dict[int, object] = {}
        self._looked = -LOOK_SECONDS
        self._grace = float(os.environ.get(GRACE, "inf"))
        self._forced = math.isfinite(self._grace)
        self._deadline = math.inf

    @property
    def seconds_left(self) -> float:
        """Until the end by force; without limit while nothing was asked, or when nobody forces."""
        return self._deadline - time.monotonic()

    @property
    def exit_code(self) -> ExitCode | None:
        """What to end with after saving, once a stop was asked for: 130 for Ctrl-C, else 75."""
        now = time.monotonic()
        if self._noted is None and self._file is not None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._noted = requested_stop(self._file)
            if self._noted is not None:
                self._deadline = min(self._deadline, now + time_given(self._file))
        return self._noted

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_CODES:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def over(self) -> None:
        """How the run ended is known. Until the context ends, SIGTERM and SIGUSR2 do nothing, so
        that it is told; SIGINT does what it did before."""
        for number, handler in self._previous.items():
            now = handler if number == signal.SIGINT else _nothing
            signal.signal(number, now)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self._deadline = min(self._deadline, time.monotonic() + self._grace)
        if self._noted is None:
            self._noted = _EXIT_CODES[signal.Signals(number)]
            if self._notice:
                # Not print: the handler may have interrupted another write to the same stream.
                os.write(2, f"{self._notice}\n".encode())
            return
        if number != signal.SIGINT and self._forced:
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which processes that are started from here would inherit."""
