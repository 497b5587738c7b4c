"""Which rank is slow, and at what."""

from __future__ import annotations

from launcher.watch.beats import Beat
from launcher.watch.slow import slow_ranks


def beat(rank: int, steps: int, seconds: dict, waited: dict) -> Beat:
    return Beat(
        rank, "here", rank, steps, steps + 1, steps, "data", 0, 0, False, seconds, waited, 0.0
    )


def looks(work: dict[int, dict[str, float]], *, steps: int = 10, step_s: float = 2.0):
    """Two looks at ranks that take step_s a step: `work` of their own, the rest in waiting."""
    before, after = {}, {}
    for rank, own in work.items():
        start = {"start": 50.0 + rank, "forward": 3.0}
        before[rank] = beat(rank, 1, start, {"start": 20.0, "forward": 1.0})
        idle = step_s - sum(own.values())
        spent = {p: s * steps for p, s in own.items()}
        seconds = {"start": 50.0 + rank, **spent}
        seconds["forward"] = seconds.get("forward", 0.0) + 3.0 + idle * steps
        waited = {"start": 20.0, "forward": 1.0 + idle * steps}
        after[rank] = beat(rank, 1 + steps, seconds, waited)
    return before, after


def test_equal_ranks_are_not_slow() -> None:
    assert slow_ranks(*looks({r: {"forward": 0.5, "data": 0.2} for r in range(4)})) == []


def test_the_slow_one_of_two_is_named_with_its_phase() -> None:
    usual = {"data": 0.1, "forward": 0.4, "update": 0.1}
    (slow,) = slow_ranks(*looks({0: usual, 1: {**usual, "forward": 1.3}}))
    assert (slow.rank, slow.phase, slow.steps) == (1, "forward", 10)
    assert abs(slow.own - 1.5) < 1e-9 and abs(slow.others - 0.6) < 1e-9
    assert abs(slow.own_in_phase - 1.3) < 1e-9 and abs(slow.others_in_phase - 0.4) < 1e-9
    assert slow.text == (
        "Rank 1 (here) is slow: 1.50 s of its own work a step, the other ranks 0.60 s; most of it "
        "in forward (1.30 s, the others 0.40 s), over the last 10 steps."
    )


def test_a_slow_loader_shows_as_data() -> None:
    usual = {"forward": 0.4}
    (slow,) = slow_ranks(*looks({0: usual, 1: usual, 2: {**usual, "data": 1.0}}))
    assert (slow.rank, slow.phase, slow.others_in_phase) == (2, "data", 0.0)


def test_a_lag_that_is_small_beside_the_step_is_not_reported() -> None:
    assert slow_ranks(*looks({0: {"forward": 0.1}, 1: {"forward": 0.29}})) == []
    assert slow_ranks(*looks({0: {"forward": 0.1}, 1: {"forward": 0.31}})) != []


def test_one_rank_is_nobodys_peer() -> None:
    assert slow_ranks(*looks({0: {"forward": 1.0}})) == []
