"""What a supervisor makes of `dsv41 stop`, with ranks that do not listen, or are no more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.backends.protocol import Plan
from launcher.decide import AttemptEnd
from launcher.history import attempts_since, remembered
from launcher.reduce import Death
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, create
from launcher.supervisor import supervise
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome
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


class Frail:
    """Ranks that die at once."""

    def start(self, attempt: Attempt, plan: Plan) -> Frail:
        return self

    def poll(self) -> list[Death] | None:
        return [Death(0, "was killed")]

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("by", "code"),
    [("file", ExitCode.INTERRUPTED), (signal.SIGINT, 130), (signal.SIGTERM, ExitCode.AGAIN)],
)
def test_a_run_told_to_stop_between_two_attempts_begins_no_other(
    tiny: RunConfig, by: signal.Signals | str, code: int
) -> None:
    limits = replace(tiny.resilience, max_without_progress=9, max_failures=9)
    config = replace(
        tiny, launcher=replace(tiny.launcher, kind="torchrun"), resilience=limits, name=f"by-{by}"
    )
    folder = create(config, overrides=[]).folder
    told = [0.0]

    def stop() -> None:
        told[0] = time.monotonic()
        if isinstance(by, signal.Signals):
            os.kill(os.getpid(), by)
        else:
            file = folder.attempt(2).stop_file
            request_stop(file, ExitCode.INTERRUPTED, why="dsv41 stop")

    def say(text: str) -> None:
        if "Starting again in 2 s" in text:
            threading.Timer(0.3, stop).start()

    outcome, attempt = supervise(folder, config, [], given={}, say=say, backend=Frail())
    assert time.monotonic() - told[0] < 2
    assert folder.last_attempt() == attempt.number == 2
    assert (outcome.code, outcome.reason) == (code, "stopped")
    assert outcome.message == "Stopped before attempt 3; attempt 2 had ended (a rank was killed)."
    assert attempt.ending() == "stop"  # so that other nodes leave too
    first, second = (folder.attempt(number).events()[0] for number in (1, 2))
    assert first["code_sha256"] == second["code_sha256"] is not None


@pytest.mark.parametrize(
    ("asked", "ended", "goes_on"),
    [
        (ExitCode.INTERRUPTED, None, False),
        (ExitCode.INTERRUPTED, (ExitCode.DONE, "done"), True),  # it has nothing left to do
        (ExitCode.AGAIN, None, True),  # by a batch system, that took the machine
        (None, None, True),
    ],
)
def test_a_wish_to_stop_outlives_the_supervisor_it_was_told_to(
    tiny: RunConfig,
    asked: ExitCode | None,
    ended: tuple[ExitCode, str] | None,
    goes_on: bool,
) -> None:
    config = replace(tiny, launcher=replace(tiny.launcher, kind="torchrun"))
    folder = create(config, overrides=[]).folder
    lost = folder.new_attempt()
    lost.event("start")
    if asked is not None:
        request_stop(lost.stop_file, asked, why="x")
    if ended is not None:
        end = AttemptEnd(Outcome(*ended, 90))
        lost.event("end", **end.outcome.to_dict(), **remembered(end))
    (folder.path / "checkpoints" / "step_00000008").mkdir()
    earlier = attempts_since(folder, 1)

    def ask(attempt: Attempt) -> None:
        request_stop(attempt.stop_file, ExitCode.INTERRUPTED, why="x", now=True)

    outcome, attempt = supervise(
        folder, config, [], given={}, say=print, backend=Deaf(ask), earlier=earlier
    )
    assert attempt.number == folder.last_attempt() == 1 + goes_on
    assert (outcome.code, outcome.reason, outcome.step) == (ExitCode.INTERRUPTED, "stopped", 8)
    if not goes_on:
        assert outcome.message == "Stopped before attempt 2; attempt 1 had ended (lost)."
        assert lost.ending() == "stop"
