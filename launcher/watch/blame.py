"""Which rank the others wait for, from what all of them last said. A pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.watch.beats import Beat


@dataclass(frozen=True)
class Blame:
    """rank: the one the others wait for; None where all stand at the same place. text: a sentence
    that names it, and what it does."""

    rank: int | None
    text: str
    beat: Beat | None = None


def blame(
    beats: Mapping[int, Beat],
    *,
    world: int,
    now: float,
    silent_s: float,
    states: Mapping[int, str] | None = None,
) -> Blame:
    """beats: by rank, of those that ever gave a sign. silent_s: a rank whose last one is older is
    stopped, or stuck so deep that none of its threads runs. states: what their system says of
    ranks, in words, as far as it is known.

    In this order: a rank that never began; one that is silent; one that is in no collective; the
    one that has come least far. Among several it is the one that has come least far.
    """
    if missing := [rank for rank in range(world) if rank not in beats]:
        return Blame(missing[0], _missing(missing))
    behind = sorted(beats.values(), key=lambda beat: (beat.turn, beat.rank))
    silent = [beat for beat in behind if now - beat.seen > silent_s]
    if len(silent) == world > 1 and not states:
        text = "No rank's signs of life arrive any more. Look at the shared folder and its network."
        return Blame(None, text, silent[0])
    if silent:
        beat = silent[0]
        state = (states or {}).get(beat.rank) or "it is stopped, or cut off, or its Python is stuck"
        # It may have gone on for a moment after its last sign.
        quiet = (
            f"has given no sign of life for {now - beat.seen:.0f} s, last in {beat.where}: {state}"
        )
        return Blame(beat.rank, f"{beat.named} {quiet}.{_others(beat, behind)}", beat)
    at_work = [beat for beat in behind if not beat.waiting]
    if at_work and (len(at_work) < world or _apart(behind)):
        beat = at_work[0]
        return Blame(
            beat.rank, f"{beat.named} is stuck in {beat.where}.{_others(beat, behind)}", beat
        )
    beat = behind[0]
    if world == 1:
        return Blame(beat.rank, f"{beat.named} is stuck in {beat.where}.", beat)
    if _apart(behind):
        text = f"{beat.named} is behind: it waits for others in {beat.where}."
        return Blame(beat.rank, text + _others(beat, behind), beat)
    what = "wait for each other" if beat.waiting else "stand"
    text = f"No rank is behind: all {what} in {beat.where}. Look at the network and the devices."
    return Blame(None, text, beat)


def _apart(behind: Sequence[Beat]) -> bool:
    return behind[0].turn < behind[-1].turn


def _missing(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]} never gave a sign of life."
    shown = ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
    return f"Ranks {shown} never gave a sign of life."


def _others(beat: Beat, everyone: Sequence[Beat]) -> str:
    others = [other for other in everyone if other.rank != beat.rank]
    if not others:
        return ""
    places = list(dict.fromkeys(other.where for other in others))
    who = f"rank {others[0].rank} waits" if len(others) == 1 else "the other ranks wait"
    return f" For it {who} in {' or '.join(places[:3])}."
