"""Processes that Ray knows: how they are started, and how they tell what happens, in lines of JSON.

The commands and supervisors that start them know nothing of Ray, which takes signals and standard
output as its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from launcher.guard import as_parent
from launcher.processes import without_rank


def started(
    module: str, *words: str, code: Path, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`module` of our packages in `code`, at work, in a session of its own: a Ctrl-C reaches us
    alone. Its standard input and output are pipes; what Ray has to say is added to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            env={
                **without_rank(),
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": str(code.absolute()),
                **(environment or {}),
                **as_parent(),
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            cwd=code,  # Ray's processes import from where their driver is, not from PYTHONPATH
            start_new_session=True,
            text=True,
        )


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
