"""Killed again and again, at whatever instant."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from launcher.processes import alive, send
from tests.faults.conftest import STEPS, Rehearsal, Running
from trainer.checkpoint.folders import newest_whole, step_of

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]

LIVES = 5
# Most of each step is within a save, about to appear, just appeared, or retiring an older one.
SLOW = ";".join(
    f"slow@{point},rank=0,ms=200"
    for point in ("save.tensors", "save.manifest", "save.rename", "save.renamed", "save.retire")
)


def wait_for(text: str, running: Running, *, attempt: int) -> None:
    running.until(lambda: text in running.log(0, attempt=attempt))


def lose_power(running: Running) -> None:
    everyone = [running.process.pid, *running.below()]
    send(everyone, 9)
    running.process.communicate()
    end = time.monotonic() + 5
    while any(map(alive, everyone)):
        assert time.monotonic() < end, "orphans"
        time.sleep(0.05)


def newest(running: Running) -> int:
    found = newest_whole(running.run.path / "checkpoints")
    return 0 if found is None else step_of(found) or 0


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
def test_a_run_killed_at_any_instant(rehearsal: Rehearsal, background: bool) -> None:
    """It never falls behind a checkpoint that it had, of which it keeps one alone."""
    checkpoint = replace(rehearsal.config.checkpoint, every=1, keep=1, async_=background)
    draw, reached, lives, id = random.Random(int(background)), 0, 0, None
    while lives < LIVES and reached < STEPS - 2:
        lives += 1
        running = rehearsal.start(SLOW, id=id, checkpoint=checkpoint)
        id = running.run.path.name
        wait_for(f"step {reached + 1}/{STEPS}", running, attempt=lives)
        time.sleep(draw.uniform(0, min(3.0, STEPS - 2 - reached)))  # a step takes a second
        lose_power(running)
        now = newest(running)
        assert now >= reached, "the last whole checkpoint is gone"
        reached = now
    assert 0 < reached < STEPS and lives > 1
    ended = rehearsal.run(id=id, checkpoint=checkpoint)
    ended.is_like_the_uninterrupted_one(attempts=lives + 1)
