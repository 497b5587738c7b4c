"""Real jobs of a real Slurm: to the end, preempted, out of time, cancelled, on a drained node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.run_dir import RunFolder
from tests.slurm.conftest import Login
from trainer.exit_codes import ExitCode

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(600),
]

TWO = ("parallel.dp_shard=2", "launcher.nodes=2", "launcher.slurm.partition=low")
SLOW = "slow@forward,ms=700,attempt=1"


def test_a_preempted_job_comes_back_and_ends_as_if_nothing_had_been(login: Login) -> None:
    run = login.submit(*TWO, "train.steps=12", faults=SLOW)
    run.until_step(2)
    facts = run.facts()
    assert facts["NumNodes"] == "2"
    other = login.cluster.run(
        *("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive"),
        *("--output=/dev/null", "--wrap=true"),
    ).strip()
    run.until(lambda: run.facts()["Restarts"] == "1", "queued again")
    assert {rank: o.code for rank, o in run.folder.attempt(1).outcomes().items()} == {
        0: ExitCode.AGAIN,
        1: ExitCode.AGAIN,
    }
    end = run.end_of(1)
    assert (end["next"], end["preempted"]) == ("requeue", True)
    assert run.folder.saved_step() == end["step"] > 0
    run.until_state("COMPLETED")
    assert login.cluster.job(other)["JobState"] == "COMPLETED"
    assert run.steps() == list(range(1, 13))
    assert run.folder.last_attempt() == 2
    assert run.end_of(2)["next"] == "done"
    assert "Starting again, once the job has its machines again, from the checkpoint" in run.log()

    login.place.train(
        *login.place.small, "launcher=torchrun", "parallel.dp_shard=2", "train.steps=12"
    )
    whole = replace(run, folder=RunFolder(login.place.runs()[-1]))
    assert whole.folder != run.folder
    assert [m["loss"] for m in run.metrics()] == [m["loss"] for m in whole.metrics()]


@pytest.mark.long
def test_a_job_whose_time_is_over_goes_on_in_a_second_stay(login: Login) -> None:
    run = login.submit(
        *("launcher.slurm.time='10'", "resilience.grace_s=5", "train.steps=16"),
        faults="slow@forward,ms=2000,attempt=1",
    )
    run.until_step(2)
    # Slurm counts in minutes, and warns up to a minute early: at its next look.
    login.cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=1")
    run.until(lambda: run.facts()["Restarts"] == "1", "queued again")
    login.cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=10")
    end = run.end_of(1)
    assert (end["code"], end["next"], end["preempted"]) == (75, "requeue", True)
    assert run.folder.saved_step() == end["step"] > 0
    run.until_state("COMPLETED")
    assert run.steps() == list(range(1, 17))
    assert run.folder.last_attempt() == 2


def test_a_cancelled_job_saves_and_stays_away(login: Login) -> None:
    run = login.submit(*TWO, "train.steps=200", faults="slow@forward,ms=300")
    run.until_step(2)
    login.cluster.run("scancel", run.job)
    run.until_state("CANCELLED")
    assert run.facts()["Restarts"] == "0"
    assert {o.code for o in run.folder.attempt(1).outcomes().values()} == {ExitCode.AGAIN}
    end = run.end_of(1)
    assert (end["next"], end["asked"], end["preempted"]) == ("stop", True, False)
    assert run.folder.saved_step() == end["step"] > 0


@pytest.mark.long
def test_a_job_ends_on_a_node_that_is_drained_and_the_next_one_waits(login: Login) -> None:
    run = login.submit(*TWO, "train.steps=6", faults=SLOW)
    run.until_step(1)
    try:
        login.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
        run.until_state("COMPLETED")
        assert run.steps() == list(range(1, 7))
        following = login.submit(*TWO, "train.steps=1")
        assert following.facts()["JobState"] == "PENDING"
        again = login.place.train(
            *login.place.small, "launcher=slurm", *TWO, "train.steps=1", "resume=auto"
        )
        assert again.code == ExitCode.CONFIG
        assert f"Job {following.job} of {following.folder.path} still waits" in again.err
    finally:
        login.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    following.until_state("COMPLETED")


def test_an_unknown_partition_is_refused_in_slurms_words_and_ours(login: Login) -> None:
    ended = login.place.train(
        *login.place.small, "launcher=slurm", "launcher.slurm.partition=nowhere"
    )
    assert ended.code == ExitCode.CONFIG
    assert "invalid partition specified: nowhere" in ended.err
    assert "sinfo lists the partitions" in ended.err
    assert login.place.names() == {"configs", "words.txt"}


@pytest.mark.long
def test_ranks_that_die_or_hang_are_started_again_in_the_same_job(login: Login) -> None:
    run = login.submit(
        *(*TWO, "train.steps=4", "checkpoint.every=1", "resilience.hang_s=20"),
        faults="kill@forward,rank=1,step=2,attempt=1;hang@forward,rank=1,step=3,attempt=2",
    )
    run.until_state("COMPLETED")
    assert run.facts()["Restarts"] == "0"
    assert run.folder.last_attempt() == 3
    killed, hung = run.end_of(1), run.end_of(2)
    assert "Rank 1 was killed by signal 9" in killed["message"]
    assert "on n2" in killed["message"]
    assert hung["code"] == ExitCode.HANG
    assert run.steps() == [1, 2, 3, 4]
