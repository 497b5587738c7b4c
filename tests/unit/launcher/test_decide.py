"""What follows an attempt's end, by table."""

from __future__ import annotations

import pytest

from launcher.config import ResilienceConfig
from launcher.decide import AttemptEnd, Next, decide
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

LIMITS = ResilienceConfig(max_failures=3, max_preemptions=2, max_without_progress=2)


def end(code: ExitCode, saved_before: int = 0, saved: int = 0, **how: bool) -> AttemptEnd:
    return AttemptEnd(Outcome(code, "", 0), saved_before=saved_before, saved=saved, **how)


def crash(saved_before: int, saved: int) -> AttemptEnd:
    return end(ExitCode.AGAIN, saved_before, saved)


STOPPED = end(ExitCode.AGAIN, preempted=True)

TABLE = {
    "done": ([end(ExitCode.DONE)], Next.DONE),
    "a bad setting is not tried again": ([end(ExitCode.CONFIG)], Next.STOP),
    "nor bad data": ([end(ExitCode.BAD_DATA)], Next.STOP),
    "nor what diverged": ([end(ExitCode.DIVERGED)], Next.STOP),
    "nor a full disk": ([end(ExitCode.IO_ERROR)], Next.STOP),
    "nor what a person interrupted": ([end(ExitCode.INTERRUPTED)], Next.STOP),
    "nor what a person stopped": ([end(ExitCode.AGAIN, asked=True)], Next.STOP),
    "a rank that was killed is": ([crash(0, 10)], Next.AGAIN),
    "a hang is": ([end(ExitCode.HANG, 0, 10)], Next.AGAIN),
    "a bug is, once": ([end(ExitCode.BUG)], Next.AGAIN),
    "a crash loop is not": ([end(ExitCode.BUG), end(ExitCode.BUG)], Next.STOP),
    "progress in between": ([crash(0, 0), crash(0, 10), crash(10, 10)], Next.AGAIN),
    "too many failures": ([crash(10 * n, 10 * n + 10) for n in range(4)], Next.STOP),
    "just not too many": ([crash(10 * n, 10 * n + 10) for n in range(3)], Next.AGAIN),
    "preemptions are no failures": ([STOPPED, STOPPED, crash(0, 10)], Next.AGAIN),
    "preemptions have their own budget": ([STOPPED] * 3, Next.STOP),
    "within it": ([STOPPED] * 2, Next.AGAIN),
    "a preemption between two failures": ([crash(0, 0), STOPPED, crash(0, 0)], Next.AGAIN),
}


@pytest.mark.parametrize(("ends", "expected"), TABLE.values(), ids=TABLE.keys())
def test_decisions(ends: list[AttemptEnd], expected: Next) -> None:
    decision = decide(ends, LIMITS)
    assert decision.next is expected
    assert decision.why


def test_delays_grow_with_failures_and_not_with_preemptions() -> None:
    limits = ResilienceConfig(max_failures=20)
    crashes = [crash(10 * n, 10 * n + 10) for n in range(9)]
    delays = [decide(crashes[: n + 1], limits).delay_s for n in range(9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert decide([STOPPED], limits).delay_s == 0
