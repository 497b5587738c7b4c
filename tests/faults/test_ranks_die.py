"""Ranks that raise, are killed, hang, or are only slow; and what supervises them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from launcher.processes import alive, descendants
from tests.faults.conftest import Rehearsal
from trainer.checkpoint.folders import newest_whole
from trainer.exit_codes import ExitCode

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]
FROM_3 = "Starting again in 1 s from the checkpoint of step 3 (failure 1 of 3 allowed)."
IN_STEP_5 = "step=5,attempt=1"


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run(f"kill@forward,rank=1,{IN_STEP_5}")
    ended.said("Attempt 1 ended (a rank was killed): Rank 1 was killed by signal 9 (SIGKILL")
    ended.said(FROM_3)
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
@pytest.mark.parametrize("point", ["start", "data", "reduce", "update", "record"])
def test_an_error_of_one_rank_is_told_once_and_tried_again(
    rehearsal: Rehearsal, point: str
) -> None:
    step = "attempt=1" if point == "start" else IN_STEP_5
    ended = rehearsal.run(f"raise@{point},rank=1,{step}")
    ended.said("Attempt 1 ended (bug): Rank 1: This should not have happened: FaultError: raise at")
    assert ended.text.count("FaultError") == 1
    assert "Traceback" not in ended.text
    assert "Traceback" in ended.run.attempt(1).log(1).read_text()
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
def test_one_fault_after_another(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run(
        f"raise@update,rank=1,{IN_STEP_5};"
        "corrupt@save.renamed,step=6,attempt=2;raise@data,rank=0,step=8,attempt=2"
    )
    ended.said("Attempt 1 ended (bug): Rank 1: ", FROM_3)
    ended.said("Attempt 2 ended (bug): Rank 0: ", "from the checkpoint of step 6 (failure 2 of 3 ")
    ended.said("Checkpoint step_00000006 is damaged and was set aside", "resuming after step 3 ")
    ended.is_like_the_uninterrupted_one(attempts=3)


@pytest.mark.long
@pytest.mark.parametrize("whom", ["The agent", "Rank 1"])
def test_a_process_killed_from_outside(rehearsal: Rehearsal, whom: str) -> None:
    running = rehearsal.start("slow@forward,attempt=1,step=5,ms=3000")
    running.until(lambda: "step 4/8" in running.log(0))
    (agent,) = running.named("launcher.backends.agent")
    os.kill(agent if whom == "The agent" else running.beat(1)["pid"], signal.SIGKILL)
    ended = running.end()
    ended.said(f"Attempt 1 ended (a rank was killed): {whom} was killed by signal 9 (SIGKILL; ")
    ended.said(FROM_3)
    ended.is_like_the_uninterrupted_one()


@pytest.mark.slow
def test_no_process_outlives_a_killed_supervisor(rehearsal: Rehearsal) -> None:
    running = rehearsal.start("slow@forward,attempt=1,step=5,ms=3000")
    running.until(lambda: "step 4/8" in running.log(0))
    below = running.below()
    assert len(below) >= 3
    running.process.kill()
    end = time.monotonic() + 5
    while any(map(alive, below)):
        assert time.monotonic() < end, "orphans"
        time.sleep(0.1)
    running.end()
    rehearsal.run(id=running.run.path.name).is_like_the_uninterrupted_one()


@pytest.mark.slow
def test_a_nan_on_one_rank_ends_the_run_for_good(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run(f"nan@reduce,rank=1,{IN_STEP_5}")
    assert ended.code == ExitCode.DIVERGED
    ended.said("\nStep 5 diverged: loss sum ", "gradient norm nan")
    assert ended.run.last_attempt() == 1  # it would diverge again
    newest = newest_whole(ended.run.path / "checkpoints")
    assert newest is not None and newest.name == "step_00000003"
    rehearsal.run(id=ended.run.path.name).is_like_the_uninterrupted_one()


@pytest.mark.slow
def test_a_sleeping_rank_is_named_with_its_stack(rehearsal: Rehearsal) -> None:
    quick = replace(rehearsal.config.resilience, hang_s=12.0)
    ended = rehearsal.run(f"hang@backward,rank=1,{IN_STEP_5}", resilience=quick)
    ended.said("Attempt 1 ended (hang): Nothing was finished for ", FROM_3)
    ended.said("is stuck in backward of step 5. For it rank 0 waits in ")
    _, first, second = (ended.run.attempt(1).path / "stacks.txt").read_text().split("==== ")
    assert first.startswith("Rank 0") and "waiting for others" in first.splitlines()[0]
    assert second.startswith("Rank 1") and "faults.py" in second
    assert ended.events(1, "end")[0]["code"] == ExitCode.HANG
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_stopped_rank_is_named(rehearsal: Rehearsal) -> None:
    quick = replace(rehearsal.config.resilience, hang_s=16.0)
    ended = rehearsal.run(f"stop@reduce,rank=0,{IN_STEP_5}", resilience=quick)
    ended.said("Attempt 1 ended (hang): Nothing was finished for ", "Rank 0 (", FROM_3)
    ended.said(": it is stopped (SIGSTOP). For it rank 1 waits in ")
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_slow_rank_is_told_with_its_phase(rehearsal: Rehearsal) -> None:
    longer = replace(rehearsal.config.train, steps=34)
    ended = rehearsal.run("slow@forward,rank=1,ms=700", train=longer)
    assert ended.code == 0, ended.text
    told = [line for line in ended.text.splitlines() if " is slow: " in line]
    assert len(told) == 1 and told[0].startswith("Rank 1 ("), ended.text
    assert "most of it in forward" in told[0]
    assert ended.events(1, "slow rank")[0]["rank"] == 1


@pytest.mark.long
def test_a_killed_worker_of_the_loader(rehearsal: Rehearsal) -> None:
    working = replace(rehearsal.config.data, workers=1)
    running = rehearsal.start("slow@forward,attempt=1,step=5,ms=4000", data=working)
    running.until(lambda: "step 4/8" in running.log(0))
    rank = running.beat(1)["pid"]
    workers = [pid for pid in descendants(rank) if pid in running.named("spawn_main")]
    os.kill(workers[0], signal.SIGKILL)
    ended = running.end()
    ended.said("Attempt 1 ended (a process was killed): ", f"lower data.workers. {FROM_3}")
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_crash_loop_ends_before_the_allocation_does(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run("kill@update,rank=0,step=5")  # at every attempt
    assert ended.code == ExitCode.AGAIN
    assert ended.run.last_attempt() == 3
    ended.said(FROM_3, "from the checkpoint of step 3 (failure 2 of 3 allowed)")
    why = "2 attempts one after another brought no new checkpoint "
    ended.said(f"after step 4. Not started again: {why}(resilience.max_without_progress).")
    assert ended.events(3, "end")[0]["why"].startswith(why)
    rehearsal.run(id=ended.run.path.name).is_like_the_uninterrupted_one(attempts=4)


@pytest.mark.long
def test_two_runs_at_once(rehearsal: Rehearsal) -> None:
    both = [rehearsal.start(), rehearsal.start(f"kill@data,rank=1,{IN_STEP_5}")]
    through, killed = [running.end() for running in both]
    through.is_like_the_uninterrupted_one(attempts=1)
    killed.is_like_the_uninterrupted_one()
