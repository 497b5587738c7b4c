"""What follows the end of an attempt: a pure function of what has happened so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.config import ResilienceConfig
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

LONGEST_DELAY = 60.0

# What another attempt would end with again.
FINAL = {
    ExitCode.USAGE: "the command is wrong",
    ExitCode.BAD_DATA: "the data must be corrected first",
    ExitCode.CANNOT_CREATE: "the output must be made writable first",
    ExitCode.IO_ERROR: "the disk must be seen to first",
    ExitCode.DIVERGED: "it would diverge again",
    ExitCode.CONFIG: "the settings must be changed first",
    ExitCode.INTERRUPTED: "it was interrupted",
}


class Next(Enum):
    """done: nothing is left to do. again: another attempt, from the last whole checkpoint. requeue:
    the same, by the supervisor of the job that the cluster starts next. stop: a person must act, or
    wanted it so."""

    DONE = "done"
    AGAIN = "again"
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class AttemptEnd:
    """outcome: of all ranks, reduced to one. saved_before and saved: the step of the newest
    checkpoint when it began and when it ended, 0 = none. asked: a person told it to stop.
    preempted: the cluster told it to end. leaving: and takes the machines away."""

    outcome: Outcome
    saved_before: int = 0
    saved: int = 0
    asked: bool = False
    preempted: bool = False
    leaving: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended though nobody had told it to."""
        return self.outcome.code != ExitCode.DONE and not (self.asked or self.preempted)


@dataclass(frozen=True)
class Decision:
    """What comes next, after how many seconds, and in a few words why."""

    next: Next
    why: str
    delay_s: float = 0.0


def decide(ends: Sequence[AttemptEnd], limits: ResilienceConfig) -> Decision:
    """ends: of all attempts of this supervisor, oldest first, at least one.

    Preemptions, failures and failures without progress have a budget each: a run that is preempted
    every hour for a month is well, one that crashes twice at the same place is not.
    """
    last = ends[-1]
    code = last.outcome.code
    if code == ExitCode.DONE:
        return Decision(Next.DONE, "all steps are done")
    if last.asked:
        return Decision(Next.STOP, "it was told to stop")
    if code in FINAL:
        return Decision(Next.STOP, FINAL[code])
    if last.preempted:
        preemptions = sum(end.preempted for end in ends)
        if preemptions > limits.max_preemptions:
            return Decision(
                Next.STOP,
                f"resilience.max_preemptions={limits.max_preemptions} is used up",
            )
        following = Next.REQUEUE if last.leaving else Next.AGAIN
        return Decision(following, f"preemption {preemptions}")
    stuck = 0
    for end in reversed(ends):
        if not end.failed or end.saved > end.saved_before:
            break
        stuck += 1
    if stuck >= limits.max_without_progress:
        return Decision(
            Next.STOP,
            f"{stuck} attempts one after another brought no new checkpoint "
            "(resilience.max_without_progress)",
        )
    failures = sum(end.failed for end in ends)
    if failures > limits.max_failures:
        return Decision(
            Next.STOP,
            f"resilience.max_failures={limits.max_failures} is used up",
        )
    delay = min(LONGEST_DELAY, 2.0 ** (failures - 1))
    return Decision(Next.AGAIN, f"failure {failures} of {limits.max_failures} allowed", delay)
