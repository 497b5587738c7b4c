"""Which samples a step sees: a function of the seed and a global index, of nothing else.

Neither the count of ranks nor of workers, nor how often a run was resumed, moves a sample. The
random numbers are computed from counters here, so that no library's next version reorders a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count as counting
from typing import Protocol

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
HOLDOUT, WINDOWS, PACKS = 1, 2, 3  # what random numbers are for; each use has its own sequence


class NoPackError(ValueError):
    """A source has no pack for training."""

    def __init__(self) -> None:
        super().__init__("there is no pack to train on")


class Windows(Protocol):
    """The windows of one source and how many packs for training each has."""

    @property
    def total(self) -> int | None:
        """Windows there will ever be; None while nobody knows."""
        ...

    def packs(self, window: int) -> int | None:
        """Packs in a window, which is waited for and planned if need be; None past the last."""
        ...


class SourceOrder:
    """The endless sequence of one source's packs: epoch after epoch, each in another order.

    An epoch takes the windows in an order of its own and, window by window, their packs in an
    order of their own. With arrival=True the first epoch takes the windows as they come, so that
    it can begin before all are there. All orders are functions of (seed, source, epoch). A window
    is asked for its packs only once a place in it or behind it is wanted.
    """

    def __init__(self, windows: Windows, *, seed: int, source: int, arrival: bool) -> None:
        self._windows = windows
        self._seed, self._source, self._arrival = seed, source, arrival
        self._first = self._latest = self._epoch(0)
        self._packs: dict[tuple[int, int], np.ndarray] = {}

    def locate(self, number: int) -> tuple[int, int, int]:
        """(epoch, window, pack) of the pack with `number` before it. NoPackError without any."""
        epoch, place = self._first, number
        if not epoch.reaches(number):
            if not epoch.packs:
                raise NoPackError
            turn, place = divmod(number, epoch.packs)
            if self._latest.number != turn:
                self._latest = self._epoch(turn)
            epoch = self._latest
            assert epoch.reaches(place)
        window, first, packs = epoch.find(place)
        return (
            epoch.number,
            window,
            int(self._pack_order(epoch.number, window, packs)[place - first]),
        )

    def next_window(self, number: int) -> int | None:
        """The window after that of `locate(number)` in its epoch; None at the end of one."""
        epoch = self._first if number < self._first.packs else self._latest
        place = number - epoch.number * self._first.packs
        return epoch.following(place)

    def _epoch(self, number: int) -> _Epoch:
        if self._arrival and number == 0:
            return _Epoch(number, self._windows, counting())
        total = self._windows.total
        assert total is not None, "only a first epoch may begin before all windows are there"
        order = permutation(total, self._seed, WINDOWS, self._source, number)
        return _Epoch(number, self._windows, iter(order.tolist()))

    def _pack_order(self, epoch: int, window: int, packs: int) -> np.ndarray:
        key = epoch, window
        if key not in self._packs:
            if len(self._packs) >= 2:  # a step in the middle of two windows needs both
                del self._packs[next(iter(self._packs))]
            self._packs[key] = permutation(packs, self._seed, PACKS, self._source, *key)
        return self._packs[key]


class _Epoch:
    """The windows of one epoch, as far as they were asked for."""

    def __init__(self, number: int, source: Windows, order: Iterator[int]) -> None:
        self.number = number
        self._source = source
        self._order = order
        self._next = next(order, None)
        self._windows: list[int] = []
        self._ends: list[int] = []  # packs through each of the windows

    @property
    def packs(self) -> int:
        """Packs in the windows asked for so far."""
        return self._ends[-1] if self._ends else 0

    def reaches(self, place: int) -> bool:
        """Whether the epoch has this place, asking for as many windows as that takes."""
        while self.packs <= place:
            packs = None if self._next is None else self._source.packs(self._next)
            if self._next is None or packs is None:
                return False
            self._ends.append(self.packs + packs)
            self._windows.append(self._next)
            self._next = next(self._order, None)
        return True

    def find(self, place: int) -> tuple[int, int, int]:
        """(window, place of its first pack, its packs) of a place that is reached."""
        at = bisect_right(self._ends, place)
        first = self._ends[at - 1] if at else 0
        return self._windows[at], first, self._ends[at] - first

    def following(self, place: int) -> int | None:
        """The window behind that of a place that is reached."""
        at = bisect_right(self._ends, place) + 1
        return self._windows[at] if at < len(self._windows) else self._next


def permutation(count: int, seed: int, use: int, *numbers: int) -> np.ndarray:
    """int32 [count]: a permutation that is a function of the arguments alone."""
    return np.argsort(_random(count, seed, use, *numbers), kind="stable").astype(np.int32)


def rank_indices(step: int, *, packs_per_step: int, rank: int, ranks: int) -> np.ndarray:
    """Global indices of one rank in one step: its contiguous slice of the step's share."""
    share = packs_per_step // ranks
    first = step * packs_per_step + rank * share
    return np.arange(first, first + share, dtype=np.int64)


def sharing_problems(
    *, packs_per_step: int, packs_per_micro_batch: int, ranks: int, cp: int = 1
) -> list[str]:
    """Why a step cannot be dealt out evenly, with the fix; empty when it can.

    ranks: among which packs are dealt; each stands for a group of `cp` that share its packs.
    """
    share = packs_per_micro_batch * ranks
    if packs_per_step % share == 0:
        return []
    up = -(-packs_per_step // share) * share
    takers = f"{ranks} rank(s)" if cp == 1 else f"{ranks} group(s) of parallel.cp={cp} ranks"
    return [
        f"train.packs_per_step={packs_per_step} cannot be dealt out evenly to {takers} in "
        f"micro-batches of train.packs_per_micro_batch={packs_per_micro_batch}; "
        f"use packs_per_step={up} or another multiple of {share}"
    ]


def split_documents(
    count: int, *, holdout: float, seed: int, window: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) numbers of a window's `count` documents, each ascending int64.

    The round(holdout * count) documents with the smallest random numbers are held out, never all.
    Of the first window it is at least one when holdout > 0 and there is another to train on.
    """
    wanted = round(holdout * count)
    if holdout > 0 and window == 0:
        wanted = max(1, wanted)
    wanted = max(0, min(wanted, count - 1))
    if not wanted:
        return np.arange(count), np.arange(0)
    held = np.zeros(count, dtype=bool)
    held[permutation(count, seed, HOLDOUT, window)[:wanted]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _random(count: int, *parts: int) -> np.ndarray:
    """uint64 [count], uniform, a function of the arguments and each place alone (splitmix64)."""
    state = 0
    for part in parts:
        state = int(_scramble(np.array([(state + part + GOLDEN) & MASK], dtype=np.uint64))[0])
    steps = np.arange(1, count + 1, dtype=np.uint64)
    return _scramble(np.uint64(state) + steps * np.uint64(GOLDEN))


def _scramble(z: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: a bijection of uint64; wraps modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
