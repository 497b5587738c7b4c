"""The supervisor's side of launcher=ray: a driver for each attempt, see `driver`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.backends.protocol import Plan
from launcher.backends.ray.reports import Reports, last_words, started
from launcher.backends.ray.screen import Screen
from launcher.problems import Stop
from launcher.processes import end_tree, killed_by
from launcher.reduce import Death
from launcher.run_dir import Attempt
from trainer.exit_codes import ExitCode
from trainer.signals import requested_stop

CONNECT_SECONDS = 120.0
END_SECONDS = 30.0  # that a driver has to end its ranks and its cluster

Say = Callable[[str], None]


class Ray:
    """The backend of launcher=ray, for a run whose configuration is in its folder. again: whether
    an earlier supervisor has been in the cluster for the same run."""

    def __init__(self, *, say: Say, again: bool = False) -> None:
        self._say = say
        self._worked = again

    def start(self, attempt: Attempt, plan: Plan) -> Driver:
        """Connect, or start a cluster; the ranks follow as soon as there is room for them.

        A cluster that refuses the first attempt is a setting to be corrected (Stop 78); one that
        refuses a later one has failed like any other part, and may be back at the next.
        """
        driver = Driver(attempt, plan, say=self._say, again=self._worked)
        try:
            driver.connect()
        except BaseException:
            driver.kill()
            raise
        self._worked = True
        return driver


class Driver:
    """The driver's process. again: whether the cluster has been there before."""

    def __init__(self, attempt: Attempt, plan: Plan, *, say: Say, again: bool) -> None:
        self._say, self._again = say, again
        self._log = attempt.path / "ray.log"
        self._stop_file = attempt.stop_file
        self._temporary = Path(tempfile.mkdtemp(prefix="dsv41-ray-", dir=short_folder()))
        self._deaths: list[Death] | None = None
        self._connected = False
        self._process = started(
            "launcher.backends.ray.driver",
            *(str(plan.folder.path), str(attempt.number), str(self._temporary)),
            code=plan.folder.code,
            log=self._log,
            environment=plan.environment(),
        )
        self._reports = Reports(self._process)
        self._screen = Screen(attempt.path / "terminal.log")

    def connect(self) -> None:
        """Wait until the driver is in its cluster, or a person waits no longer. Stop 78 when there
        is none."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while not self._connected and self._deaths is None:
            if requested_stop(self._stop_file) is not None:
                return
            if time.monotonic() > deadline:
                self._fail(f"Ray gave no answer in {CONNECT_SECONDS:.0f} s{last_words(self._log)}")
            self._hear(0.2)

    def poll(self) -> list[Death] | None:
        self._hear(0)
        return self._deaths

    def kill(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            end_tree(self._process.pid)
            self._process.wait()
        self._screen.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _hear(self, seconds: float) -> None:
        """What the driver has said by now, waiting at most so long for the first word."""
        ended = self._process.poll() is not None
        for report in self._reports.new(seconds):
            self._take(report)
        if ended and self._deaths is None:
            code = self._process.returncode
            how = killed_by(-code) if code < 0 else f"ended with exit code {code}"
            self._fail(f"Ray's driver {how}; see {self._log}", ours=code >= 0)

    def _take(self, report: dict[str, Any]) -> None:
        match report["state"]:
            case "connected":
                self._connected = True
            case "placed":
                self._again = True
            case "waiting":
                self._say(report["text"])
            case "failed":
                self._fail(report["text"])
            case "ended":
                self._deaths = [Death(rank, how) for rank, how in report["deaths"]]

    def _fail(self, text: str, *, ours: bool = False) -> None:
        if self._again:
            self._deaths = [Death(None, text.rstrip("."))]
        else:
            raise Stop(ExitCode.BUG if ours else ExitCode.CONFIG, text)


def short_folder() -> str | None:
    """Where a folder's path leaves room for the names of Ray's sockets (107 bytes in all)."""
    return "/tmp" if Path("/tmp").is_dir() else None
