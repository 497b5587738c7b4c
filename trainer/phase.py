"""What this process is doing for its run, in one word, and how long that has taken so far.

    phase.enter("forward")

Whoever watches a run learns from it which rank the others wait for, and where time goes. All ranks
enter the same phases in the same order, so the rank that has entered fewest is the one furthest
behind. A phase is also a point where a fault can be asked for, see `trainer.faults`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trainer import faults

if TYPE_CHECKING:
    from torch import Tensor


class Phases:
    """The phases of one rank; entered by its main thread, read by others at any time.

    step: the one under way, or just done. steps: done since the beginning. turn: how many phases
    were entered. progress: grows whenever something was done, also within long phases and by other
    threads. seconds: by phase, of those left.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Nothing has been done yet."""
        self.step = 0
        self.steps = 0
        self.turn = 0
        self.progress = 0
        self.seconds: dict[str, float] = {}
        self.now = "start", self._clock()  # one value, so that no reader sees half a change

    def enter(self, name: str, *, grads: Iterable[Tensor | None] = ()) -> None:
        """The phase `name` of faults.PHASES begins. grads: what a fault there may spoil."""
        before, since = self.now
        now = self._clock()
        self.seconds[before] = self.seconds.get(before, 0.0) + now - since
        self.now = name, now
        self.turn += 1
        self.progress += 1
        faults.reach(name, {"step": self.step}, grads=grads)

    def tick(self) -> None:
        """Something was done within a phase that can be long."""
        self.progress += 1

    def begin_step(self, step: int) -> None:
        """The step of this number begins; earlier attempts may have done others."""
        self.step = step

    def end_step(self) -> None:
        """It is done, and only has to be recorded."""
        self.steps += 1


here = Phases()
begin, enter, tick = here.begin, here.enter, here.tick
begin_step, end_step = here.begin_step, here.end_step
