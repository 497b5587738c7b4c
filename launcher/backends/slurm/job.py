"""The batch step of a job: the supervisor of a run.

Usage: python -P -m launcher.backends.slurm.job RUN_DIR JOB, with PYTHONPATH on the run's code.
JOB is how Slurm's commands name the job, or this task of it: 12, or 12_3.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launcher.backends.slurm.allocation import SlurmJob
from launcher.backends.slurm.steps import SlurmSteps
from launcher.handover import take_over
from launcher.messages import closing
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from trainer.exit_codes import ExitCode

USAGE = "usage: python -P -m launcher.backends.slurm.job RUN_DIR JOB    (inside a Slurm job)"


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
    def steps(config: RunConfig) -> SlurmSteps:
        return SlurmSteps(config.launcher.slurm, job=job, number=number, nodes=nodes)

    place = SlurmJob(job, say=_say)
    config, outcome, attempt = take_over(folder, say=_say, backend=steps, job=place)
    if place.comes_back:
        return outcome.code
    command = ["dsv41", "resume", str(folder.path)]
    _say(closing(outcome, config, folder=folder, attempt=attempt, plot=None, command=command))
    return outcome.code


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
