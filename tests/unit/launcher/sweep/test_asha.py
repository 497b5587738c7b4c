"""Which points Ray Tune's scheduler would end, against halving in a few plain lines."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("ray.tune", reason="Ray Tune is not installed")

from launcher.config import AshaConfig
from launcher.sweep.objective import Ladder
from launcher.sweep.tune.scheduler import OBJECTIVE, POINT, STEP, Asha, Earlier


def _trial(name: str) -> Any:
    return Earlier(f"trial {name}", {POINT: name})


def _stopped(values: list[float], *, steps: int = 90, earlier: int = 0) -> dict[str, int]:
    """Points of these losses one after another: which were asked to end, and when. earlier: how
    many of them were trained by another command."""
    config, asked = AshaConfig(), dict[str, int]()
    scheduler = Asha(config, steps=steps, ask=asked.__setitem__)
    for number, value in enumerate(values):
        name = f"{number:03d}"
        records = [{"step": step, "loss": value} for step in range(1, steps + 1)]
        ladder = Ladder("loss", config.rungs(steps))
        if number < earlier:
            scheduler.remember(name, records, ladder)
            continue
        trial = _trial(name)
        scheduler.on_trial_add(None, trial)  # pyright: ignore[reportArgumentType]
        for record in records:
            if record["step"] > asked.get(name, steps) + 2:  # the run ends soon after it is asked
                break
            if reached := ladder.add(record):
                result = {STEP: reached[0], OBJECTIVE: reached[1]}
                assert scheduler.on_trial_result(None, trial, result) == "CONTINUE"
        scheduler.on_trial_complete(None, trial, {})
    return asked


def _expected(values: list[float], *, steps: int = 90) -> dict[str, int]:
    """A point goes on while it is within the best third of those that reached the rung before."""
    asked, seen = {}, {rung: list[float]() for rung in (9, 27, 81)}
    for number, value in enumerate(values):
        for rung, others in seen.items():
            place = (len(others) - 1) / 3  # of the cut, between two of them if need be
            ranked, low = sorted(others), int(place)
            high = min(low + 1, len(others) - 1)
            cut = ranked[low] + (ranked[high] - ranked[low]) * (place - low) if others else value
            others.append(value)
            if value > cut + 1e-12:
                asked[f"{number:03d}"] = rung
                break
    return asked


@pytest.mark.parametrize("seed", range(5))
def test_only_the_best_third_goes_on(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.uniform(1, 5) for _ in range(30)]
    assert _stopped(values) == _expected(values)
    assert len(_expected(values)) > 10


def test_points_of_an_earlier_command_are_compared_with() -> None:
    values = [3.0, 9.0, 2.0, 8.0, 1.0]
    whole = _stopped(values)
    assert whole == {"001": 9, "003": 9}
    assert _stopped(values, earlier=3) == {"003": 9}
