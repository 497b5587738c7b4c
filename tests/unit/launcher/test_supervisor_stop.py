"""What a supervisor makes of `dsv41 stop`, with ranks that do not listen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.backends.protocol import Plan
from launcher.reduce import Death
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, create
from launcher.supervisor import supervise
from trainer.exit_codes import ExitCode
from trainer.signals import request_stop


class Deaf:
    """Ranks that go on whatever they are told."""

    def __init__(self, started: Callable[[Attempt], None]) -> None:
        self._started = started
        self.killed = False

    def start(self, attempt: Attempt, plan: Plan) -> Deaf:
        self._started(attempt)
        return self

    def poll(self) -> list[Death] | None:
        return None

    def signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("saved", [0, 8])
def test_an_end_at_once_is_no_failure_and_not_repeated(tiny: RunConfig, saved: int) -> None:
    config = replace(tiny, launcher=replace(tiny.launcher, kind="torchrun"))
    folder = create(config, overrides=[]).folder
    if saved:
        (folder.path / "checkpoints" / f"step_{saved:08d}").mkdir()

    def ask(attempt: Attempt) -> None:
        wait = threading.Timer(
            0.3, request_stop, (attempt.stop_file, ExitCode.INTERRUPTED), {"why": "x", "now": True}
        )
        wait.start()

    ranks = Deaf(ask)
    began = time.monotonic()
    outcome, attempt = supervise(folder, config, [], given={}, say=print, backend=ranks)
    assert time.monotonic() - began < 10
    assert ranks.killed and attempt.number == 1
    assert (outcome.code, outcome.reason, outcome.step) == (ExitCode.INTERRUPTED, "stopped", saved)
    assert ("the newest is of step 8" if saved else "there is none") in outcome.message
