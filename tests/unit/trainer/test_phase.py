"""Where a rank stands, and where its time went."""

from __future__ import annotations

import time

import pytest

from trainer import faults
from trainer.phase import Phases


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_booked_on_the_phase_that_took_it() -> None:
    clock = Clock()
    phases = Phases(clock)
    for name, seconds in (("data", 1), ("forward", 2), ("data", 4), ("forward", 8)):
        clock.now += seconds  # of the phase before
        phases.enter(name)
    assert phases.now == ("forward", 115.0)
    assert phases.seconds == {"start": 1, "data": 2 + 8, "forward": 4}
    assert (phases.turn, phases.progress) == (4, 4)
    phases.tick()
    assert (phases.turn, phases.progress) == (4, 5)


def test_steps_are_counted_from_what_earlier_attempts_did() -> None:
    phases = Phases()
    phases.begin_step(41)
    assert (phases.step, phases.steps) == (41, 0)
    phases.end_step()
    assert (phases.step, phases.steps) == (41, 1)
    phases.begin()
    assert (phases.step, phases.steps, phases.turn, phases.now[0]) == (0, 0, 0, "start")


def test_a_phase_is_a_point_where_a_fault_can_strike() -> None:
    phases = Phases()
    faults.arm("raise@forward,step=3,rank=1")
    faults.place(rank=1, attempt=1)
    try:
        phases.enter("forward")
        phases.begin_step(3)
        phases.enter("backward")
        with pytest.raises(faults.FaultError):
            phases.enter("forward")
        assert phases.now[0] == "forward"  # it is there that it failed
    finally:
        faults.arm("")
        faults.place()


def test_a_step_of_phases_costs_next_to_nothing() -> None:
    phases, steps = Phases(), 2_000
    names = ["data", "count", "engram", "forward", "backward", "reduce", "update", "record"]

    def once() -> float:
        began = time.thread_time()
        for step in range(steps):
            phases.begin_step(step)
            for name in names:
                phases.enter(name)
            phases.end_step()
        return (time.thread_time() - began) / steps

    assert min(once() for _ in range(5)) < 20e-6
