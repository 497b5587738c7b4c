"""The batch script of a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.own_packages import HOME
from launcher.run_config import RunConfig

TEMPLATE = HOME / "slurm" / "train.sbatch"


def batch_script(
    config: RunConfig,
    *,
    code: Path,
    log: Path,
    command: Sequence[str],
    more: Sequence[str] = (),
) -> str:
    """The script of a job that runs `command`, with our packages from `code`.

    log: where the job writes, as sbatch's --output (%j is the job). more: further #SBATCH options,
    such as --array.
    """
    slurm = config.launcher.slurm
    text = TEMPLATE.read_text("utf-8")
    for name, value in {
        "directives": "\n".join(f"#SBATCH {o}" for o in [*_options(config, log), *more]),
        "setup": "\n".join(slurm.setup) or "#   nothing",
        "code": shlex.quote(str(code)),
        "command": shlex.join(command),
    }.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def _options(config: RunConfig, log: Path) -> list[str]:
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
        f'--output="{log}"',
        "--open-mode=append",
    ]
    return [*found, *slurm.extra]
