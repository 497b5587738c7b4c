"""Which source each pack of a run comes from: shares that hold over every stretch of packs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

PERIOD = 2**14


@dataclass(frozen=True, eq=False)
class Mixture:
    """A sequence of sources without end that repeats after PERIOD packs.

    Of any n packs in a row, a source with share s has n * s to within 2, plus n / PERIOD since
    shares are rounded to that (upwards from nothing: every source has a part).
    """

    source: np.ndarray  # int64 [PERIOD]
    before: np.ndarray  # int64 [PERIOD]: packs of the same source earlier in the period
    counts: np.ndarray  # int64 [sources]: packs in a period

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, weights: tuple[float, ...]) -> Mixture:
        """Shares in proportion to the weights, all above 0; at most PERIOD of them.

        Each source's packs fall due at even distances; the one due soonest comes first among those
        that may come already. That is a schedule of one machine without overload, so none is ever
        late, and every count stays within one of its share.
        """
        counts = _counts(weights)
        if len(counts) == 1:
            return cls(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
        source, before = np.empty(PERIOD, np.int64), np.empty(PERIOD, np.int64)
        done = np.zeros_like(counts)
        for place in range(PERIOD):
            may_come = done * PERIOD < counts * (place + 1)
            due = -(-(done + 1) * PERIOD // counts)
            chosen = int(np.argmin(np.where(may_come, due, PERIOD + 1)))
            source[place], before[place] = chosen, done[chosen]
            done[chosen] += 1
        return cls(source, before, counts)

    def locate(self, index: int) -> tuple[int, int]:
        """(source, how many packs of it come before) of the pack with this global index."""
        periods, place = divmod(index, len(self.source))
        source = int(self.source[place])
        return source, periods * int(self.counts[source]) + int(self.before[place])

    def used(self, packs: int) -> list[int]:
        """How many of the first `packs` come from each source."""
        periods, rest = divmod(packs, len(self.source))
        begun = np.bincount(self.source[:rest], minlength=len(self.counts))
        return (periods * self.counts + begun).tolist()


def _counts(weights: tuple[float, ...]) -> np.ndarray:
    """Packs of each source in a period: largest remainders, but none below one."""
    exact = [Fraction(weight) for weight in weights]
    assert 0 < len(exact) <= PERIOD and all(weight > 0 for weight in exact)
    quotas = [PERIOD * weight / sum(exact) for weight in exact]
    counts = [max(1, int(quota)) for quota in quotas]
    while (missing := PERIOD - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        room = [n for n in range(len(counts)) if step > 0 or counts[n] > 1]
        counts[max(room, key=lambda n: step * (quotas[n] - counts[n]))] += step
    return np.array(counts, dtype=np.int64)
