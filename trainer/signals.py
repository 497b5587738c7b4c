"""Ctrl-C and SIGTERM become a request that the loop reads between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from trainer.exit_codes import ExitCode

_EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.AGAIN}


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is only noted, so that a save can follow.

    A second signal takes its default action: the process leaves at once, unsaved. Signals reach
    the main thread alone; entered in another thread this notes nothing. notice: shown on standard
    error at the first signal, since a step can take long.
    """

    def __init__(self, *, notice: str = "") -> None:
        self._notice = notice
        self._noted: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_code(self) -> ExitCode | None:
        """What to end with after saving, once a stop was asked for: 130 for Ctrl-C, else 75."""
        return None if self._noted is None else _EXIT_CODES[signal.Signals(self._noted)]

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

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number
            if self._notice:
                # Not print: the handler may have interrupted another write to the same stream.
                os.write(2, f"{self._notice}\n".encode())
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
