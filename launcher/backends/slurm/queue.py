"""A run into Slurm's queue: its batch script, the job, and what to type afterwards."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from data.cache.prepare import PreparedSource
from launcher.backends.slurm.script import run_script
from launcher.backends.slurm.tools import SlurmError, is_listed, require_slurm, slurm
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.runs.view import read_json
from launcher.submission import Submission
from trainer.disk import put_text
from trainer.exit_codes import ExitCode

# How sbatch --test-only speaks of a job that may have to wait, which is no reason to refuse it.
_MAY_WAIT = ("busy", "not available", "unavailable", "drained", "down")


def preview(config: RunConfig) -> str:
    """The batch script that a run of `config` would get; ID stands for one that is yet to be
    made."""
    return run_script(config, config.home / (config.id or "ID"))


def check(config: RunConfig) -> None:
    """Ask Slurm, before data are prepared and a run is made, whether it would take such a job.
    Stop 78 with its words when it never would."""
    check_script(preview(config))


def check_script(script: str) -> None:
    """The same for the job of a batch script."""
    require_slurm()
    try:
        slurm("sbatch", "--test-only", text=script)
    except SlurmError as error:
        if not any(word in str(error).lower() for word in _MAY_WAIT):
            raise _refused(error) from error


def queue(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    *,
    given: Mapping[str, object],
) -> str:
    """Submit the run and return at once: the job's number. Stop 78 with Slurm's words when it
    refuses the job, or when an earlier job of the run still waits or runs; 73 when the run's folder
    takes no more."""
    refuse_second(folder)
    script = folder.path / "train.sbatch"
    with writing(folder.path):
        Submission(sources, given, folder.last_attempt() + 1).write(folder)
        put_text(script, run_script(config, folder.path))
        with submitted(script) as job:
            note(folder, job)
    return job


def refuse_second(folder: RunFolder) -> None:
    """Stop 78 when an earlier job of the run still waits or runs."""
    last = read_json(folder.submitted_file).get("job")
    if last is not None and is_listed(last):
        raise Stop(
            ExitCode.CONFIG,
            f"Job {last} of {folder.path} still waits or runs.\n"
            f"Look with: squeue --jobs={last}; end it with: scancel {last}",
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """An OSError while entered as Stop 73."""
    try:
        yield
    except OSError as error:
        raise Stop(
            ExitCode.CANNOT_CREATE,
            f"Cannot write to {error.filename or folder}: {error.strerror or error}; no job is "
            "left in the queue.\nMake room there, or make it writable.",
        ) from error


@contextmanager
def submitted(script: Path) -> Iterator[str]:
    """Submit a batch script: the number of the job, which is cancelled if what is done while
    entered fails. Stop 78 with Slurm's words if it refuses the job."""
    try:
        said = slurm("sbatch", "--parsable", str(script))
    except SlurmError as error:
        raise _refused(error) from error
    job = said.split()[0].partition(";")[0]
    try:
        yield job
    except BaseException:
        with suppress(SlurmError):
            slurm("scancel", job)
        raise


def note(folder: RunFolder, job: str) -> None:
    """Keep with the run which job it waits for."""
    known = {"time": time.time(), "backend": "slurm", "job": job}
    put_text(folder.submitted_file, json.dumps(known) + "\n")


def follow_up(folder: RunFolder, job: str) -> str:
    """What to type once a job is in the queue."""
    run = shlex.quote(str(folder.path))
    rows = {
        "Run": str(folder.path),
        "Script": str(folder.path / "train.sbatch"),
        "Queue": f"squeue --jobs={job}",
        "State": f"dsv41 status {run}",
        "Log": f"dsv41 logs -f {run}",
        "Stop": f"dsv41 stop {run}    (with a checkpoint)",
        "Cancel": f"scancel {job}    (also while it waits)",
    }
    return "\n".join([f"Job {job}", *(f"{name:<7} {text}" for name, text in rows.items())])


def _refused(error: SlurmError) -> Stop:
    if "array" in str(error):
        return Stop(
            ExitCode.CONFIG,
            f"Slurm does not take this job array: {error}\nThe numbers of its tasks must be below "
            "MaxArraySize (scontrol show config); sweep over fewer points at a time.",
        )
    return Stop(
        ExitCode.CONFIG,
        f"Slurm does not take this job: {error}\n"
        "Correct launcher.slurm.* (sinfo lists the partitions, `sacctmgr show assoc` the accounts);"
        " --dry-run prints the batch script.",
    )
