"""How far a source is: a bar on a terminal, a line now and then anywhere else. On stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 10.0


class SourceView:
    """A data.cache.prepare.Progress for people; a context manager. doing: "preparing"."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._tasks: dict[str, TaskID] = {}
        self._bar: Progress | None = None
        self._last = time.monotonic()
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __call__(self, source: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes of `source` are through."""
        if self._bar is None:
            if time.monotonic() - self._last >= LINE_SECONDS:
                self._last = time.monotonic()
                share = f"{100 * done / total:.0f} %" if total else f"{done / 1e6:,.0f} MB"
                self.say(f"{self._doing} {source}: {share}")
            return
        if source not in self._tasks:
            self._bar.start()
            self._tasks[source] = self._bar.add_task(f"{self._doing} {source}", total=total)
        self._bar.update(self._tasks[source], completed=done)

    def say(self, text: str) -> None:
        """A message, without tearing the bar."""
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
