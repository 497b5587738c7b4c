"""A rank's log: all that it prints, besides what the terminal shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Log:
    """Whole lines of text in a file, as they would read on paper.

    Terminal escapes are dropped, and of a line that was redrawn only its last state is kept. A
    full disk stops the log, not the training: the checkpoint's own message tells of it.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = path.open("a", encoding="utf-8", buffering=1)
        self._line = ""

    def write(self, text: str) -> None:
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._put(line)

    def close(self) -> None:
        if self._line:
            self._put(self._line)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, line: str) -> None:
        if self._file is None:
            return
        shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]
        try:
            self._file.write(shown + "\n")
        except OSError:
            self._file = None


class Tee:
    """A standard stream that also writes to a Log; everything else is the stream's own."""

    def __init__(self, stream: TextIO, log: Log) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LogOnly:
    """A standard stream of a rank that does not speak: it writes to the Log alone."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, log: Log) -> None:
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@contextmanager
def logged(path: Path, *, speaks: bool) -> Iterator[Log]:
    """While entered, standard output and error also go to the file `path`, or only there."""
    log = Log(path)
    before = sys.stdout, sys.stderr
    if speaks:
        sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)  # pyright: ignore
    else:
        sys.stdout, sys.stderr = LogOnly(log), LogOnly(log)  # pyright: ignore
    try:
        yield log
    finally:
        sys.stdout, sys.stderr = before
        log.close()
