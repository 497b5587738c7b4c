"""Asked to end, whatever the ranks are about: a checkpoint, and the same run afterwards."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from tests.faults.conftest import Rehearsal, Running
from trainer.exit_codes import ExitCode

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]


def comes_to(running: Running, phase: str, step: int) -> None:
    """Wait until a rank stands in `phase` of `step`, where it has been made slow."""
    running.until(
        lambda: any(
            (running.beat(rank).get("phase"), running.beat(rank).get("step")) == (phase, step)
            for rank in range(2)
        )
    )


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        pytest.param("data", 5, marks=pytest.mark.long),
        pytest.param("forward", 5, marks=pytest.mark.long),
        pytest.param("reduce", 5, marks=pytest.mark.slow),
        pytest.param("save", 3, marks=pytest.mark.long),
        pytest.param("evaluate", 4, marks=pytest.mark.long),
    ],
)
def test_sigterm_leads_to_a_checkpoint(rehearsal: Rehearsal, phase: str, step: int) -> None:
    running = rehearsal.start(f"slow@{phase},attempt=1,step={step},ms=6000")
    comes_to(running, phase, step)
    running.process.send_signal(signal.SIGTERM)
    ended = running.end()
    assert ended.code == ExitCode.AGAIN, ended.text
    last = max(int(path.name[5:]) for path in (ended.run.path / "checkpoints").glob("step_*"))
    ended.said("Stopping after this step, with a checkpoint", f"Stopped after step {last} of 8.")
    assert step <= last <= step + 1
    rehearsal.run(id=ended.run.path.name).is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_rank_told_to_end_by_its_cluster_takes_the_others_along(rehearsal: Rehearsal) -> None:
    running = rehearsal.start("slow@forward,attempt=1,step=5,ms=6000")
    comes_to(running, "forward", 5)
    os.kill(running.beat(1)["pid"], signal.SIGTERM)
    ended = running.end()
    ended.said("Attempt 1 ended (stopped): Stopped after step ", "(preemption 1)")
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
@pytest.mark.parametrize(("number", "last"), [(signal.SIGTERM, 3), (signal.SIGINT, 5)])
def test_a_sigterm_leaves_no_time_for_a_slow_save(
    rehearsal: Rehearsal, number: signal.Signals, last: int
) -> None:
    """Whoever sends a SIGTERM to the command waits for grace_s; a person waits for the save."""
    slow = "slow@save.tensors,attempt=1,step=3,ms=20000;slow@forward,attempt=1,step=5,ms=3000"
    limits = replace(rehearsal.config.resilience, grace_s=19.0)
    running = rehearsal.start(slow, resilience=limits)
    comes_to(running, "forward", 5)
    running.process.send_signal(number)
    ended = running.end()
    assert ended.code == (ExitCode.AGAIN if last == 3 else ExitCode.INTERRUPTED), ended.text
    assert ("step 5: not saved, since a checkpoint takes" in ended.text) == (last == 3)
    names = [path.name for path in (ended.run.path / "checkpoints").glob("step_*")]
    assert max(names) == f"step_{last:08d}"
    again = rehearsal.run(id=ended.run.path.name, resilience=limits)
    again.is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_second_ctrl_c_leaves_at_once(rehearsal: Rehearsal) -> None:
    running = rehearsal.start("slow@forward,attempt=1,step=5,ms=60000")
    comes_to(running, "forward", 5)
    running.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert running.process.poll() is None  # it waits for the end of the step
    began = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert time.monotonic() - began < 20
    assert ended.code == ExitCode.INTERRUPTED, ended.text
    ended.said("Ended by force, without a checkpoint of this moment; the newest is of step 3.")
    names = sorted(path.name for path in (ended.run.path / "checkpoints").glob("step_*"))
    assert names == ["step_00000003"]
    rehearsal.run(id=ended.run.path.name).is_like_the_uninterrupted_one()
