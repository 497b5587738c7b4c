"""One outcome out of what all ranks of an attempt left: the first cause, not its victims."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.exit_codes import ExitCode
from trainer.outcome import LOST_PEER, Outcome

_RANK = re.compile(r"Rank \d+: ")  # what another rank has told it
ORDERLY = (ExitCode.DONE, ExitCode.AGAIN, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class Death:
    """A process that ended without an outcome. rank: None if it was no rank but, for example, the
    agent of a node. how: "was killed by signal 9 (SIGKILL)" or the like."""

    rank: int | None
    how: str


def reduce(outcomes: Mapping[int, Outcome], deaths: Sequence[Death], *, world: int) -> Outcome:
    """The outcome of an attempt of `world` ranks. outcomes: by rank, of those that left one.

    A rank that lost a peer is a victim: the cause is the earliest outcome that is neither that nor
    an orderly end; without one, a rank that died without a word. It is told with its rank, but not
    what several ranks say alike: they have agreed on it.
    """
    causes = {
        rank: outcome
        for rank, outcome in outcomes.items()
        if outcome.code not in ORDERLY and outcome.reason != LOST_PEER
    }
    if causes:
        rank = min(causes, key=lambda r: (causes[r].ended, r))
        first = causes[rank]
        alike = sum((o.code, o.message) == (first.code, first.message) for o in causes.values())
        return first if alike > 1 else _named(first, rank, world)
    silent = [rank for rank in range(world) if rank not in outcomes]
    step = max((outcome.step for outcome in outcomes.values()), default=0)
    if silent:
        how = {death.rank: death.how for death in deaths if death.rank is not None}
        told = [rank for rank in silent if rank in how] or silent
        what = how.get(told[0], "ended without a word")
        others = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        when = f" after step {step}" if outcomes else ""
        text = f"Rank {told[0]}{others} {what}{when}."
        if told[0] not in how:
            text = " ".join([*(f"{death.how}." for death in deaths if death.rank is None), text])
        return Outcome(ExitCode.AGAIN, "a rank was killed", step, text)
    for code in (ExitCode.INTERRUPTED, ExitCode.AGAIN, ExitCode.DONE):
        for rank in sorted(outcomes):
            outcome = outcomes[rank]
            if outcome.code == code and outcome.reason != LOST_PEER:
                return outcome
    rank = min(outcomes, key=lambda r: (outcomes[r].ended, r))
    return _named(outcomes[rank], rank, world)


def _named(outcome: Outcome, rank: int, world: int) -> Outcome:
    if world == 1 or not outcome.message or _RANK.match(outcome.message):
        return outcome
    return replace(outcome, message=f"Rank {rank}: {outcome.message}")
