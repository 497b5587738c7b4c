"""Which ranks are slower than the others at work of their own, and where that goes.

Ranks meet in collectives, so all take the same time for a step: what tells them apart is the part
of it in which they do not wait. That is time of the rank's main thread on its host; how long a
device computes is seen only where the thread waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from launcher.watch.beats import Beat

TIMES = 1.5  # the others' median, above which a rank is slow
SHARE = 0.1  # of a step's time, that its lag must be
ONCE = ("start", "close")  # phases that are no part of a step


@dataclass(frozen=True)
class SlowRank:
    """Seconds a step of a rank's own work, and the median of the other ranks; the same for the
    phase in which they differ most."""

    rank: int
    host: str
    own: float
    others: float
    phase: str
    own_in_phase: float
    others_in_phase: float
    steps: int

    @property
    def text(self) -> str:
        return (
            f"Rank {self.rank} ({self.host}) is slow: {self.own:.2f} s of its own work a step, the "
            f"other ranks {self.others:.2f} s; most of it in {self.phase} "
            f"({self.own_in_phase:.2f} s, the others {self.others_in_phase:.2f} s), over the last "
            f"{self.steps} steps."
        )


def slow_ranks(before: Mapping[int, Beat], after: Mapping[int, Beat]) -> list[SlowRank]:
    """Those that were slow between two looks at all ranks; at least one step lies between."""
    steps = {rank: after[rank].steps - before[rank].steps for rank in after}
    work = {rank: _own(before[rank], after[rank], steps[rank]) for rank in after}
    took = {rank: _wall(before[rank], after[rank]) / steps[rank] for rank in after}
    total = {rank: sum(spent.values()) for rank, spent in work.items()}
    found = []
    for rank, own in total.items():
        peers = [peer for peer in after if peer != rank]
        if not peers:
            break
        others = median(total[peer] for peer in peers)
        if own <= TIMES * others or own - others <= SHARE * took[rank]:
            continue
        usual = {p: median(work[peer].get(p, 0.0) for peer in peers) for p in work[rank]}
        phase = max(usual, key=lambda p: work[rank][p] - usual[p])
        found.append(
            SlowRank(
                rank,
                after[rank].host,
                own,
                others,
                phase,
                work[rank][phase],
                usual[phase],
                steps[rank],
            )
        )
    return found


def _own(before: Beat, after: Beat, steps: int) -> dict[str, float]:
    """Seconds a step by phase in which the rank did not wait for others."""
    spent = {}
    for phase, seconds in after.seconds.items():
        if phase not in ONCE:
            all_of_it = seconds - before.seconds.get(phase, 0.0)
            waited = after.waited.get(phase, 0.0) - before.waited.get(phase, 0.0)
            spent[phase] = max(0.0, all_of_it - waited) / steps
    return spent


def _wall(before: Beat, after: Beat) -> float:
    return sum(after.seconds.values()) - sum(before.seconds.values())
