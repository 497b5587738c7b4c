"""What Slurm's words mean: tasks that died, and jobs whose machines are taken."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from launcher.backends.protocol import Fate
from launcher.backends.slurm.allocation import fate_of
from launcher.backends.slurm.steps import PORTS, Step, deaths, meeting_port
from launcher.config import ResilienceConfig
from launcher.decide import AttemptEnd, Next, decide
from launcher.history import attempts_since, remembered
from launcher.run_dir import RunFolder
from launcher.worker import _place
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome


def test_tasks_that_died_and_those_that_told_why() -> None:
    log = (
        "srun: error: n1: tasks 0,2-3: Exited with exit code 75\n"
        "srun: error: n2: tasks 4,6-7: Killed\n"
        "srun: error: n3: task 9: Segmentation fault (core dumped)\n"
        "srun: error: n3: task 10: Out Of Memory\n"
    )
    found = {death.rank: death.how for death in deaths(log, 137)}
    assert list(found) == [4, 6, 7, 9, 10]
    assert found[6].startswith("was killed by signal 9 (SIGKILL") and found[6].endswith(" on n2")
    assert "SIGSEGV" in found[9]
    assert found[10] == "ended (Out Of Memory) on n3"


def test_an_srun_that_starts_nothing_says_why() -> None:
    (death,) = deaths("srun: error: Unable to create step for job 7: Invalid node count\n", 1)
    assert death.rank is None
    assert "Invalid node count" in death.how
    assert deaths("", 0) == []


def test_a_rank_told_to_end_before_it_could_note_it_was_stopped(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).new_attempt()
    attempt.write_outcome(0, Outcome(ExitCode.BUG, "bug", 3))
    step = object.__new__(Step)
    step._attempt, step._log = attempt, attempt.path / "agent-00000.log"
    step._log.write_text("srun: error: n1: tasks 0-1: User defined signal 2\n")

    class Ended:
        def poll(self) -> int:
            return 140

    step._process = Ended()  # pyright: ignore[reportAttributeAccessIssue]
    assert step.poll()
    assert attempt.outcomes()[0].reason == "bug"
    assert attempt.outcomes()[1].reason == "stopped"


@pytest.mark.parametrize(
    ("facts", "stopped", "fate"),
    [
        ({"JobState": "RUNNING", "PreemptTime": "None"}, False, Fate.STAYS),
        ({"JobState": "RUNNING", "PreemptTime": "None"}, True, Fate.TIME),
        ({"JobState": "RUNNING", "PreemptTime": "2026-01-01T00:00:00"}, True, Fate.PREEMPTED),
        ({"JobState": "COMPLETING", "PreemptTime": "2026-01-01T00:00:00"}, True, Fate.PREEMPTED),
        ({"JobState": "COMPLETING", "PreemptTime": "None"}, True, Fate.CANCELLED),
        ({"JobState": "CANCELLED"}, False, Fate.CANCELLED),
        ({"JobState": "TIMEOUT"}, True, Fate.TIME),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, True, Fate.TIME),
    ],
)
def test_who_takes_the_machines(facts: dict[str, str], stopped: bool, fate: Fate) -> None:
    assert fate_of(facts, stopped=stopped) is fate


def test_ports_belong_to_job_and_attempt() -> None:
    places = {meeting_port(job, n) for job in range(900, 1000) for n in range(1, 60)}
    assert len(places) == 100 * 59
    assert all(port in PORTS for port in places)


def test_what_the_job_before_has_seen_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    stopped, failed = (
        Outcome(ExitCode.AGAIN, "stopped", 4),
        Outcome(ExitCode.AGAIN, "a rank was killed", 0),
    )
    ends = [
        AttemptEnd(failed),
        AttemptEnd(stopped, saved=4, preempted=True, leaving=True),
        AttemptEnd(failed, saved_before=4, saved=4),
    ]
    for end in ends:
        attempt = folder.new_attempt()
        attempt.event("start")
        attempt.event("end", **end.outcome.to_dict(), **remembered(end))
    folder.new_attempt().event("start")  # its supervisor was killed
    found = attempts_since(folder, 2)
    assert found[:2] == ends[1:]
    assert found[2].preempted and found[2].leaving
    limits = ResilienceConfig(max_preemptions=1, max_failures=9)
    assert decide(found, limits).next is Next.STOP
    assert decide(found, ResilienceConfig()).next is Next.REQUEUE
    assert json.dumps(remembered(ends[0]))


def test_a_task_of_srun_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "x")  # put back afterwards
        monkeypatch.delenv(name)
    told = {"STEP_ID": "0", "PROCID": "3", "NTASKS": "4", "LOCALID": "1"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert _place() == (3, 4)
    monkeypatch.setenv("RANK", "0")  # torchrun inside a job
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _place() == (0, 2)


def test_a_supervisor_in_a_job_hears_a_repeated_sigterm_once() -> None:
    import os

    from launcher.supervisor import StopRequests

    with StopRequests(60.0, in_job=True) as requests:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert requests.terminated and not requests.overdue
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.overdue
    with StopRequests(60.0) as requests:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert requests.overdue
