"""How a process that Ray knows tells the one that started it what happens: lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any


class Report:
    """The speaker's end: {"state": WORD, …} a line, on what was its standard output.

    Everything else that is written there from now on goes to standard error.
    """

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def __call__(self, state: str, **details: object) -> None:
        with suppress(OSError):  # whoever listened is gone; the guard sees to the rest
            print(json.dumps({"state": state, **details}), file=self._lines, flush=True)


class Reports:
    """The listener's end: what `process` says, as a thread hears it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._heard: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="ray-reports", daemon=True)
        self._listener.start()

    def new(self, seconds: float) -> list[dict[str, Any]]:
        """What it has said by now, waiting at most so long for the first word; all of it once the
        process has ended."""
        if self._process.poll() is not None:
            self._listener.join(seconds + 1)
        found = []
        with suppress(Empty):
            while True:
                wait = seconds > 0 and not found
                found.append(self._heard.get(timeout=seconds) if wait else self._heard.get(False))
        return found

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(json.loads(line))


def last_words(log: Path) -> str:
    """What a process wrote last to its log, to be added to what is said of its end; empty if
    nothing."""
    said = log.read_text("utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"; its last words: {said[-1]}" if said else ""
