"""Who holds up the others: a table of situations."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.watch.beats import Beat
from launcher.watch.blame import blame

NOW = 1000.0


def beat(rank: int, **said: Any) -> Beat:
    known: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank}",
        "pid": 100 + rank,
        "beat": 5,
        "step": 7,
        "steps": 6,
        "phase": "backward",
        "turn": 70,
        "progress": 90,
        "waiting": True,
        "seen": NOW - 1,
    }
    return Beat(**known | said)


CASES = [
    pytest.param(
        [beat(0), beat(1, phase="forward", turn=69, waiting=False)],
        1,
        "Rank 1 (node1, pid 101) is stuck in forward of step 7. For it rank 0 waits in backward of "
        "step 7.",
        id="asleep on the way",
    ),
    pytest.param(
        [beat(0, seen=NOW - 60), beat(1), beat(2)],
        0,
        "Rank 0 (node0, pid 100) has given no sign of life for 60 s, last in backward of step 7: "
        "it is stopped, or cut off, or its Python is stuck. For it the other ranks wait in "
        "backward of step 7.",
        id="stopped",
    ),
    pytest.param(
        [beat(0), beat(1, waiting=False), beat(2)],
        1,
        "Rank 1 (node1, pid 101) is stuck in backward",
        id="all in one phase, one of them in no collective",
    ),
    pytest.param(
        [beat(0, phase="record", turn=71, waiting=False), beat(1), beat(2)],
        0,
        "is stuck in record of step 7",
        id="ahead, but at work that the others wait for",
    ),
    pytest.param(
        [beat(0), beat(1, phase="data", turn=68), beat(2)],
        1,
        "Rank 1 (node1, pid 101) is behind: it waits for others in data of step 7.",
        id="in a collective that the others never come to",
    ),
    pytest.param(
        [beat(0, waiting=False), beat(1, phase="forward", turn=69, waiting=False)],
        1,
        "Rank 1 (node1, pid 101) is stuck in forward of step 7",
        id="stacks tell nothing, as where devices wait for each other",
    ),
    pytest.param(
        [beat(0), beat(1)],
        None,
        "No rank is behind: all wait for each other in backward of step 7. Look at the network",
        id="the network",
    ),
    pytest.param(
        [beat(0, seen=NOW - 90), beat(1, seen=NOW - 91)],
        None,
        "No rank's signs of life arrive any more. Look at the shared folder",
        id="the shared folder",
    ),
    pytest.param(
        [beat(0, phase="start", waiting=False)],
        1,
        "Rank 1 never gave a sign of life.",
        id="one never came",
    ),
]


@pytest.mark.parametrize(("beats", "rank", "text"), CASES)
def test_the_one_that_others_wait_for_is_named(
    beats: list[Beat], rank: int | None, text: str
) -> None:
    world = max(2, len(beats))
    found = blame({b.rank: b for b in beats}, world=world, now=NOW, silent_s=30)
    assert found.rank == rank
    assert text in found.text


def test_what_the_system_says_of_a_silent_rank_is_passed_on() -> None:
    beats = {0: beat(0), 1: beat(1, seen=NOW - 60)}
    found = blame(beats, world=2, now=NOW, silent_s=30, states={1: "it is stopped (SIGSTOP)"})
    assert "step 7: it is stopped (SIGSTOP). For it rank 0 waits" in found.text


def test_a_single_rank_waits_for_nobody() -> None:
    found = blame({0: beat(0, waiting=False)}, world=1, now=NOW, silent_s=30)
    assert found.rank == 0 and "Rank 0" in found.text
