"""The points of a sweep as processes, some at a time; none is hurt by another's failure."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.processes import end_tree
from launcher.sweep.folder import Point
from launcher.sweep.point import point_environment, start_point

POLL_SECONDS = 0.2


@dataclass
class Running:
    """A point at work."""

    point: Point
    process: subprocess.Popen[bytes]


@dataclass
class Pool:
    """Runs points, at most `concurrency` at a time, in their order.

    Signals: the first Ctrl-C or SIGTERM stops all running points as it would stop each of them,
    with a checkpoint, and starts no others; a second one ends them at once. changed: called when a
    point begins or ends, and about every second in between.
    """

    points: Sequence[Point]
    concurrency: int
    changed: Callable[[Point | None, int | None], None]
    stopped: int | None = None
    lost: str = ""  # what kept points from being run, beside themselves: nothing can
    _running: list[Running] = field(default_factory=list)
    _codes: dict[Path, int] = field(default_factory=dict)
    _now: bool = False

    def run(self) -> dict[Path, int]:
        """The exit code of each point that ran, by its folder."""
        before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            waiting = list(self.points)
            while self._running or (waiting and self.stopped is None):
                while waiting and self.stopped is None and len(self._running) < self.concurrency:
                    point = waiting.pop(0)
                    self._running.append(Running(point, self._start(point)))
                    self.changed(point, None)
                self._reap()
                self.changed(None, None)
                time.sleep(POLL_SECONDS)
        finally:
            for running in self._running:
                end_tree(running.process.pid)
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._codes

    def _start(self, point: Point) -> subprocess.Popen[bytes]:
        point.begin_anew()
        threads = max(1, (os.cpu_count() or 1) // self.concurrency)
        return start_point(point, {"OMP_NUM_THREADS": str(threads), **point_environment()})

    def _reap(self) -> None:
        for running in list(self._running):
            if self._now:
                end_tree(running.process.pid)
            code = running.process.poll()
            if code is not None:
                self._running.remove(running)
                self._codes[running.point.folder.path] = code
                running.point.exit_file.write_text(f"{code}\n")
                self.changed(running.point, code)

    def _note(self, number: int, frame: object) -> None:
        if self.stopped is not None:
            self._now = True
            return
        self.stopped = number
        for running in self._running:
            os.kill(running.process.pid, number)
