"""The sweep's side of sweep.scheduler=asha: a driver, and what becomes of the points."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.backends.ray.backend import short_folder
from launcher.backends.ray.reports import Reports, started
from launcher.own_packages import HOME
from launcher.problems import Stop
from launcher.processes import end_tree, killed_by
from launcher.sweep.folder import Point, SweepFolder
from launcher.sweep.tune.driver import SETTINGS
from trainer.exit_codes import ExitCode
from trainer.signals import request_stop

POLL_SECONDS = 0.2


@dataclass
class TunedPool:
    """Runs points through Ray Tune, at most as many at a time as the sweep says, in their order.

    Signals and `changed` are as those of `launcher.sweep.pool.Pool`. lost: what went wrong with Ray
    itself, if anything did; the points that it has not run are then not among the codes.
    """

    sweep: SweepFolder
    points: Sequence[Point]
    changed: Callable[[Point | None, int | None], None]
    stopped: int | None = None
    lost: str = ""
    _begun: list[Point] = field(default_factory=list)
    _codes: dict[Path, int] = field(default_factory=dict)
    _now: bool = False

    def run(self) -> dict[Path, int]:
        """The exit code of each point that ran, by its folder. Stop 78 when there is no cluster."""
        self.sweep.stop_file.unlink(missing_ok=True)
        for point in self.points:
            point.begin_anew()
        temporary = tempfile.mkdtemp(prefix="dsv41-ray-", dir=short_folder())
        before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        driver = self._start(temporary)
        reports = Reports(driver)
        try:
            while driver.poll() is None and not self._now:
                self._look()
                if self.stopped is not None and len(self._begun) == len(self._codes):
                    break
                time.sleep(POLL_SECONDS)
        finally:
            end_tree(driver.pid)
            code = driver.wait()
            self._end_points()
            self.sweep.stop_file.unlink(missing_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)
        self._look()
        if self.stopped is None:
            self._explain(reports, code)
        return self._codes

    @property
    def log(self) -> Path:
        """What Ray has to say."""
        return self.sweep.path / "ray.log"

    def _start(self, temporary: str) -> subprocess.Popen[str]:
        names = [point.folder.path.name for point in self.points]
        return started(
            "launcher.sweep.tune.driver",
            *(str(self.sweep.path), temporary, *names),
            code=HOME,
            log=self.log,
            environment=SETTINGS,
        )

    def _look(self) -> None:
        """See which points have begun and ended."""
        for point in self.points:
            ended = point.exit_file.is_file()
            if point not in self._begun and (ended or point.pid_file.is_file()):
                self._begun.append(point)
                self.changed(point, None)
            if ended and point.folder.path not in self._codes:
                code = int(point.exit_file.read_text("utf-8"))
                self._codes[point.folder.path] = code
                self.changed(point, code)
        self.changed(None, None)

    def _end_points(self) -> None:
        """By force, whatever still runs though the driver does not."""
        for point in self.points:
            with suppress(OSError, ValueError):
                pid = int(point.pid_file.read_text("utf-8"))
                point.pid_file.unlink()
                end_tree(pid)

    def _explain(self, reports: Reports, code: int) -> None:
        said = {report["state"]: report for report in reports.new(0)}
        if "failed" in said:
            self.lost = said["failed"]["text"]
            if not self._begun:
                raise Stop(ExitCode.CONFIG, self.lost)
        elif "ended" in said:
            errors = said["ended"]["errors"]
            self.lost = f"Ray Tune: {errors[0]}; see {self.log}" if errors else ""
        else:
            how = killed_by(-code) if code < 0 else f"ended with exit code {code}"
            self.lost = f"Ray's driver {how}; see {self.log}"

    def _note(self, number: int, frame: object) -> None:
        if self.stopped is not None:
            self._now = True
            return
        self.stopped = number
        wanted = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.AGAIN
        request_stop(self.sweep.stop_file, wanted, why="the sweep was told to end")
