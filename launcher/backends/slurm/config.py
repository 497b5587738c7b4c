"""What a Slurm job asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

MARGIN_S = 15  # beyond the grace time, for a step under way to end and for Slurm to be asked

# Given by other settings, or needed as they are.
OURS = (
    *("nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "array"),
    *("output", "error", "open-mode", "export", "wrap", "parsable", "test-only"),
)
SHORT_OURS = ("-N", "-n", "-o", "-e", "-a")

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)|(?P<only>\d+))"
)


@dataclass(frozen=True)
class SlurmConfig:
    """A job of launcher.nodes nodes with one task for each rank of the mesh.

    None leaves the choice to Slurm. time: of one stay in the queue, as sbatch takes it; a run that
    needs longer is queued again. gpus_per_node: no fewer than ranks of a node. container: an image
    for the ranks, by srun's --container-image. python: the ranks' interpreter; None = the one of
    this command. setup: shell lines before anything else. extra: further #SBATCH options. srun:
    further options of the srun that starts the ranks. dry_run: print the batch script, do nothing.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    container: str | None = None
    python: str | None = None
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    dry_run: bool = False

    def problems(self) -> list[str]:
        found = []
        for name in ("partition", "account", "qos", "constraint", "container", "python"):
            value = getattr(self, name)
            if value is not None and (not value or re.search(r"[\s\"']", value)):
                found.append(
                    f"launcher.slurm.{name}={value!r} must be one word without quotes, or null"
                )
        for name in ("gpus_per_node", "cpus_per_task"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"launcher.slurm.{name}={value} must be 1 or more, or null")
        if self.time is not None and seconds(self.time) is None:
            found.append(
                f"launcher.slurm.time={self.time} is no time that Slurm reads; use minutes, "
                "HH:MM:SS or D-HH:MM:SS"
            )
        for name in ("setup", "extra", "srun"):
            for line in getattr(self, name):
                if "\n" in line:
                    found.append(f"launcher.slurm.{name}: {line!r} must be one line; use two")
                elif name != "setup" and not line.startswith("-"):
                    found.append(f"launcher.slurm.{name}: {line!r} must be an option, --NAME=VALUE")
        for line in self.extra:
            word = re.split(r"[=\s]", line)[0]
            if word.removeprefix("--") in OURS or line[:2] in SHORT_OURS:
                found.append(
                    f"launcher.slurm.extra: {line} is set by dsv41-train itself (launcher.nodes, "
                    "parallel, resilience.grace_s); remove it"
                )
        return found

    def warning_s(self, grace_s: float) -> int:
        """How long before the end of its time a job is told."""
        return int(-(-grace_s // 1)) + MARGIN_S


def seconds(time: str) -> int | None:
    """A time limit as sbatch takes it, in seconds; None if it is none."""
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    part = {name: int(text or 0) for name, text in found.groupdict().items()}
    hours = 24 * part["days"] + part["dh"] + part["hours"]
    minutes = 60 * hours + part["dm"] + part["minutes"] + part["only"]
    return 60 * minutes + part["ds"] + part["seconds"]
