"""The batch script of a job, and of an array of jobs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.own_packages import HOME
from launcher.run_config import RunConfig

TEMPLATE = HOME / "slurm" / "train.sbatch"


def run_script(config: RunConfig, folder: Path) -> str:
    """The batch script of the run that lies, or will lie, in `folder`."""
    return _script(
        config,
        run=shlex.quote(str(folder)),
        job="$SLURM_JOB_ID",
        output=f"{_escaped(folder)}/slurm-%j.log",
    )


def array_script(
    config: RunConfig, folder: Path, numbers: Sequence[int], *, digits: int, limit: int | None
) -> str:
    """The batch script of a job array for the runs `numbers` in `folder`, at most `limit` of them
    at the same time. Each is called by its number, written with `digits` digits or more."""
    return _script(
        config,
        run=f'{shlex.quote(str(folder))}/$(printf %0{digits}d "$SLURM_ARRAY_TASK_ID")',
        # A bare number may mean all tasks of an array, for one of them has the array's own.
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        output=f"{_escaped(folder)}/%{digits}a/slurm-%A_%a.log",
        more=[f"--array={ranges(numbers)}{f'%{limit}' if limit else ''}"],
    )


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as --array takes them: [0, 1, 2, 5] -> 0-2,5"""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in found)


def _escaped(folder: Path) -> str:
    """For --output, where %j and the like are filled in."""
    return str(folder).replace("%", "%%")


def _script(config: RunConfig, *, run: str, job: str, output: str, more: Sequence[str] = ()) -> str:
    """run: the run's folder, as a word of the shell's. job: the job, as Slurm's commands name it,
    in the shell's double quotes. more: further #SBATCH options."""
    slurm = config.launcher.slurm
    text = TEMPLATE.read_text("utf-8")
    for name, value in {
        "directives": "\n".join(f"#SBATCH {o}" for o in [*_options(config, output), *more]),
        "setup": "\n".join(slurm.setup) or "#   nothing",
        "run": run,
        "python": shlex.quote(sys.executable),
        "job": job,
    }.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def _options(config: RunConfig, output: str) -> list[str]:
    slurm, nodes = config.launcher.slurm, config.launcher.nodes
    found = [f"--job-name=dsv41-{config.name}"]
    found += [
        f"--{name}={value}"
        for name in ("partition", "account", "qos", "constraint", "time")
        if (value := getattr(slurm, name)) is not None
    ]
    found += [f"--nodes={nodes}", f"--ntasks-per-node={config.parallel.world // nodes}"]
    if slurm.cpus_per_task is not None:
        found.append(f"--cpus-per-task={slurm.cpus_per_task}")
    if slurm.gpus_per_node is not None:
        found.append(f"--gpus-per-node={slurm.gpus_per_node}")
    found += [
        "--requeue",
        # To the tasks of steps alone, without B: a preemption reaches no others either.
        f"--signal=USR2@{slurm.warning_s(config.resilience.grace_s)}",
        f'--output="{output}"',
        "--open-mode=append",
    ]
    return [*found, *slurm.extra]
