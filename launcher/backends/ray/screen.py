"""What a file gets, shown on standard output."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

SHOW_SECONDS = 0.3  # between two looks


class Screen:
    """Shows on standard output what appears in `file` after its byte `at`, until closed."""

    def __init__(self, file: Path, *, at: int = 0) -> None:
        self._file, self._at = file, at
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="terminal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            last = self._closed.wait(SHOW_SECONDS)
            with suppress(OSError), self._file.open("rb") as file:
                file.seek(self._at)
                new = file.read()
                if not last:
                    new = new[: new.rfind(b"\n") + 1]  # whole lines
                self._at += len(new)
                sys.stdout.write(new.decode("utf-8", errors="replace"))
                sys.stdout.flush()
            if last:
                return
