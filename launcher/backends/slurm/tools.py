"""Slurm's own commands, and what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from launcher.problems import Stop
from trainer.exit_codes import ExitCode

PATIENCE_S = 60.0  # a controller that is busy answers late, one that is down not at all


class SlurmError(Exception):
    """A command of Slurm's failed; what it said."""


def slurm(*words: str, text: str | None = None) -> str:
    """Run one of Slurm's commands, with `text` on its standard input: what it printed.

    SlurmError with its own words when it fails.
    """
    try:
        done = subprocess.run(
            list(words),
            input=text or "",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{words[0]} is not on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{words[0]} did not answer within {PATIENCE_S:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).replace(f"{words[0]}: error: ", "")
        raise SlurmError(said or f"{words[0]} ended with code {done.returncode}")
    return done.stdout if words[0] != "sbatch" else done.stdout + done.stderr


def require_slurm() -> None:
    """Stop 78 where there is no Slurm to submit to."""
    if shutil.which("sbatch") is None:
        raise Stop(
            ExitCode.CONFIG,
            "launcher=slurm needs Slurm's commands, and sbatch is not on the PATH.\n"
            "Submit from a login node of the cluster (or `module load slurm` there); --dry-run "
            "prints the batch script without it.",
        )


def job_facts(job: str) -> dict[str, str]:
    """What scontrol shows of a job, by name. SlurmError if it knows of none."""
    shown = slurm("scontrol", "--oneliner", "show", "job", job)
    return dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", shown))


def is_listed(job: str) -> bool:
    """Whether a job waits or runs; False where Slurm does not know it any more, or cannot say."""
    try:
        return bool(slurm("squeue", "--noheader", f"--jobs={job}", "--format=%i").strip())
    except SlurmError:
        return False


def first_node_address(nodes: str) -> str:
    """How the first of a job's nodes (as SLURM_JOB_NODELIST names them) is reached."""
    first = slurm("scontrol", "show", "hostnames", nodes).split()[0]
    found = re.search(r"\bNodeAddr=(\S+)", slurm("scontrol", "show", "node", first))
    return found[1] if found else first


def steps_of(job: str, name: str) -> Sequence[str]:
    """The steps of a job that have this name and still run, as JOB.STEP."""
    listed = slurm("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j")
    rows = (line.split() for line in listed.splitlines())
    return [row[0] for row in rows if row[1:] == [name]]
