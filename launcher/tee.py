"""What a process prints: a rank's log of it, and a terminal or pipe that may go away."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


LOG_BYTES = 64 << 20  # after which a log goes on in a new file
OLDER_PARTS = 4  # that are kept


class Log:
    """Whole lines of text in a file, as they would read on paper.

    A file of LOG_BYTES is renamed: rank-00000.log.1 holds what came before rank-00000.log, .2 what
    came before that; the oldest of more than OLDER_PARTS goes.

    Terminal escapes are dropped, and of a line that was redrawn only its last state is kept. A
    full disk stops the log, not the training: the checkpoint's own message tells of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = path.open("a", encoding="utf-8", buffering=1)
        self._size = path.stat().st_size
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
            self._size += len(shown.encode("utf-8", "replace")) + 1
            if self._size >= LOG_BYTES:
                self._file.close()
                self._file = self._begin_anew()
        except OSError:
            self._file = None

    def _begin_anew(self) -> IO[str]:
        parts = [self._path.with_name(f"{self._path.name}.{n}") for n in range(1, OLDER_PARTS + 1)]
        newer = [self._path, *parts[:-1]]
        for source, target in reversed(list(zip(newer, parts, strict=True))):
            if source.exists():
                source.replace(target)
        self._size = 0
        return self._path.open("a", encoding="utf-8", buffering=1)


class Steady:
    """A standard stream whose reader may go away (head, a closed terminal): from then on nobody
    hears what is said, and the work goes on. Everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._unheard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._unheard()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def _unheard(self) -> None:
        """The descriptor leads nowhere now: also for children, and when Python ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Tee(Steady):
    """Such a stream that also writes to a Log."""

    def __init__(self, stream: TextIO, log: Log) -> None:
        super().__init__(stream)
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return super().write(text)


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


def keep_working_unheard() -> None:
    """Make this process's standard streams Steady, for good."""
    sys.stdout, sys.stderr = Steady(sys.stdout), Steady(sys.stderr)  # pyright: ignore


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
