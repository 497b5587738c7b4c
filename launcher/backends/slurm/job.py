"""The batch step of a job: the supervisor of a run.

Usage: python -P -m launcher.backends.slurm.job RUN_DIR JOB, with PYTHONPATH on the run's code.
JOB is how Slurm's commands name the job, or this task of it: 12, or 12_3.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher import own_packages
from launcher.backends.slurm.allocation import SlurmJob
from launcher.backends.slurm.queue import Submission
from launcher.backends.slurm.steps import SlurmSteps
from launcher.history import attempts_since
from launcher.messages import closing
from launcher.problems import Stop
from launcher.resume import continued
from launcher.run_dir import RunFolder
from launcher.supervisor import supervise
from trainer.exit_codes import ExitCode

USAGE = "usage: python -P -m launcher.backends.slurm.job RUN_DIR JOB    (inside a Slurm job)"
HELD_S = 90.0  # that whoever worked on the run may need to leave it


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    number, nodes = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if len(argv) != 2 or number is None or nodes is None:
        print(USAGE, file=sys.stderr)
        return ExitCode.USAGE
    folder, job = RunFolder(Path(argv[0]).absolute()), argv[1]
    try:
        return _work(folder, job=job, number=int(number), nodes=nodes)
    except Stop as stop:
        print(f"dsv41-train: {stop.message}", file=sys.stderr, flush=True)
        return stop.code


def _work(folder: RunFolder, *, job: str, number: int, nodes: str) -> int:
    if found := own_packages.strangers(folder.code):
        raise Stop(ExitCode.BUG, f"This job must run {folder.code}, not {', '.join(found)}")
    submission = Submission.of(folder)
    config = continued(folder, submission.given)
    place = SlurmJob(job, say=_say)
    with _held(folder):
        outcome, attempt = supervise(
            folder,
            config,
            submission.sources,
            given=submission.given,
            say=_say,
            backend=SlurmSteps(config.launcher.slurm, job=job, number=number, nodes=nodes),
            job=place,
            earlier=attempts_since(folder, submission.first_attempt),
        )
    if place.comes_back:
        return outcome.code
    command = ["dsv41", "resume", str(folder.path)]
    _say(closing(outcome, config, folder=folder, attempt=attempt, plot=None, command=command))
    return outcome.code


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """Hold the run. The command that submitted this job, or the job's last stay, may still do so
    for a moment."""
    deadline = time.monotonic() + HELD_S
    while True:
        with folder.held() as ours:
            if ours:
                yield
                return
        if time.monotonic() > deadline:
            raise Stop(ExitCode.CONFIG, f"another process is working on {folder.path}")
        time.sleep(1.0)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
