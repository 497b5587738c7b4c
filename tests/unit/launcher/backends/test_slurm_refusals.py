"""What cannot be submitted or started is refused in Slurm's words and ours, and nothing is left."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.backends.protocol import Fate, Plan
from launcher.backends.slurm import steps
from launcher.backends.slurm.allocation import SlurmJob
from launcher.backends.slurm.config import SlurmConfig
from launcher.backends.slurm.queue import check, queue
from launcher.backends.slurm.steps import SlurmSteps
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder, create
from launcher.submission import Submission
from launcher.submit import submit
from tests.unit.launcher.conftest import Commands
from trainer.exit_codes import ExitCode


def test_without_slurm(job: RunConfig, command: Commands, capsys) -> None:
    outcome = submit(job, overrides=[])
    assert outcome.code == ExitCode.CONFIG
    assert "sbatch is not on the PATH" in capsys.readouterr().err
    assert not job.home.exists()


def test_a_dry_run_needs_no_slurm_and_makes_nothing(
    job: RunConfig, command: Commands, capsys
) -> None:
    shown = replace(
        job, launcher=replace(job.launcher, slurm=replace(job.launcher.slurm, dry_run=True))
    )
    assert submit(shown, overrides=[]).code == ExitCode.DONE
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH")
    assert not job.home.exists()


def test_what_slurm_never_takes_and_what_only_waits(job: RunConfig, command: Commands) -> None:
    command("sbatch", 'echo "sbatch: error: Invalid qos specification" >&2; exit 1')
    with pytest.raises(Stop) as raised:
        check(job)
    assert raised.value.code == ExitCode.CONFIG
    assert raised.value.message.startswith("Slurm does not take this job: Invalid qos")
    command("sbatch", 'echo "allocation failure: Requested nodes are busy" >&2; exit 1')
    check(job)


def test_a_job_that_is_in_the_queue_is_not_joined_by_another(
    job: RunConfig, command: Commands
) -> None:
    folder = create(job, overrides=[]).folder
    command("sbatch", "echo '17;here'")
    assert queue(folder, job, [], given={"processes": 3}) == "17"
    assert Submission.of(folder) == Submission([], {"processes": 3}, 1)
    command("squeue", "echo 17")
    with pytest.raises(Stop, match=r"Job 17 .* still waits or runs"):
        queue(folder, job, [], given={})
    command("squeue", "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1")
    assert queue(folder, job, [], given={}) == "17"


def test_a_refused_run_leaves_nothing(job: RunConfig, command: Commands, cache: Path) -> None:
    command("sbatch", 'case "$1" in --test-only) ;; *) echo "error: no" >&2; exit 1;; esac')
    assert submit(job, overrides=[]).code == ExitCode.CONFIG
    assert not job.home.exists()


def test_a_job_that_cannot_be_noted_is_cancelled_again(
    job: RunConfig, command: Commands, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: RunFolder, job: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", folder.path / "submitted.json")

    monkeypatch.setattr("launcher.backends.slurm.queue.note", full)
    command("sbatch", "echo 17")
    command("scancel", f'echo "$@" > {tmp_path}/asked')
    assert submit(job, overrides=[]).code == ExitCode.CANNOT_CREATE
    assert (tmp_path / "asked").read_text() == "17\n"
    assert not job.home.exists()


def test_a_run_in_the_queue_stays_when_nobody_reads_on(
    job: RunConfig, command: Commands, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str) -> None:
        assert text.startswith("Job 17\n") and "scancel 17" in text
        raise BrokenPipeError

    monkeypatch.setattr("launcher.submit._say", closed)
    command("sbatch", "echo 17")
    with pytest.raises(BrokenPipeError):
        submit(job, overrides=[])
    (run,) = job.home.iterdir()
    assert (run / "train.sbatch").is_file()


def test_a_first_node_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "first_node_address", lambda nodes: "no-such-host.invalid")
    folder = RunFolder(tmp_path)
    attempt = folder.new_attempt()
    backend = SlurmSteps(SlurmConfig(), job="7", number=7, nodes="n[1-2]")
    with pytest.raises(Stop) as raised:
        backend.start(attempt, Plan(folder, world=2, nodes=2, grace_s=1.0))
    assert raised.value.code == ExitCode.CONFIG
    assert "no-such-host.invalid of the job's first node does not resolve" in raised.value.message


def test_a_job_that_cannot_come_back_says_so(command: Commands) -> None:
    command("scontrol", 'echo "Requested operation is presently disabled" >&2; exit 1')
    job = SlurmJob("7", say=print)
    with pytest.raises(Stop, match="presently disabled") as raised:
        job.make_way(Fate.TIME, lambda seconds: True)
    assert raised.value.code == ExitCode.AGAIN
    assert not job.comes_back
    assert job.fate(stopped=True) is Fate.STAYS
