"""A trial of Ray Tune that is one point of a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from ray.tune import Trainable
from ray.tune.result import DONE

from launcher.processes import end_tree
from launcher.sweep.folder import Point, SweepFolder
from launcher.sweep.objective import Ladder
from launcher.sweep.point import start_point
from launcher.sweep.tune.records import Records
from launcher.sweep.tune.scheduler import OBJECTIVE, POINT, STEP
from trainer.disk import put_text
from trainer.exit_codes import ExitCode
from trainer.signals import request_stop, requested_stop

LOOK_SECONDS = 0.3  # between two looks at the point


@dataclass(frozen=True)
class Course:
    """What all points of a sweep share. rungs: the steps at which they are compared. environment:
    of their processes."""

    sweep: SweepFolder
    rungs: tuple[int, ...]
    environment: dict[str, str]


class PointTrial(Trainable):
    """Runs a point as any sweep does, and tells how good it is at each rung.

    It ends when the point has ended, never before: whoever wants an end asks the run for it, by the
    point's early_file (others are better) or the sweep's stop_file. The point is a child of this
    process, and ends with it.
    """

    def setup(self, config: dict[str, Any], course: Course | None = None) -> None:
        assert course is not None
        self._course = course
        self._begin(config[POINT])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The same process for the next point: to start another takes seconds."""
        self._begin(new_config[POINT])
        return True

    def step(self) -> dict[str, Any]:
        """Until the point reaches a rung, or has ended."""
        while True:
            ended = self._process is None or self._process.poll() is not None
            self._pass_requests_on()
            for record in self._records.new():
                if reached := self._ladder.add(record):
                    self._reached.append(reached)
            if self._reached:
                step, value = self._reached.pop(0)
                return {STEP: step, OBJECTIVE: value}
            if ended:
                self._note_end()
                return {DONE: True}
            time.sleep(LOOK_SECONDS)

    def cleanup(self) -> None:
        if self._process is not None and self._process.poll() is None:
            end_tree(self._process.pid)
            self._note_end()

    def _begin(self, name: str) -> None:
        sweep = self._course.sweep
        self._point = next(p for p in sweep.points() if p.folder.path.name == name)
        self._records = Records(self._point.folder.path / "metrics.jsonl")
        self._ladder = Ladder(sweep.metric, self._course.rungs)
        self._reached: list[tuple[int, float]] = []
        self._told = False
        self._process: subprocess.Popen[bytes] | None = None
        if requested_stop(sweep.stop_file) is None:
            self._process = start_point(self._point, self._course.environment)
            put_text(self._point.pid_file, f"{self._process.pid}\n")

    def _pass_requests_on(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        code = requested_stop(self._course.sweep.stop_file)
        if code is not None and not self._told:
            self._told = True
            number = signal.SIGINT if code == ExitCode.INTERRUPTED else signal.SIGTERM
            os.kill(self._process.pid, number)
        if self._point.early_file.is_file():
            _ask(self._point)

    def _note_end(self) -> None:
        if self._process is not None:
            put_text(self._point.exit_file, f"{self._process.wait()}\n")
            self._point.pid_file.unlink(missing_ok=True)
            self._process = None


def _ask(point: Point) -> None:
    """Ask the attempt under way to save and end; also one that has begun since the last time."""
    number = point.folder.last_attempt()
    if not number:
        return
    file = point.folder.attempt(number).stop_file
    if not file.exists():
        request_stop(file, ExitCode.AGAIN, why=point.early_file.read_text("utf-8").strip())
