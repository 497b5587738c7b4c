"""How the ranks of a run are started, on what, and started again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from launcher.backends.ray.config import RayConfig
from launcher.backends.slurm.config import SlurmConfig


@dataclass(frozen=True)
class TorchrunConfig:
    """Where the ranks of several nodes meet, anew at each attempt.

    host: how the other nodes reach this one; None = its own host name, which must resolve. port:
    None = one that is free when the attempt begins.
    """

    host: str | None = None
    port: int | None = None

    def problems(self) -> list[str]:
        if self.port is None or 0 < self.port < 65536:
            return []
        return [f"launcher.torchrun.port={self.port} is no port; use 1 to 65535, or null"]


@dataclass(frozen=True)
class LauncherConfig:
    """How the ranks of the mesh (see parallel) are started.

    local: one rank, in the process of the command itself, which is not started again. torchrun: an
    elastic agent on each of `nodes` machines starts an equal share of the ranks; the command
    supervises them. ray: a Ray cluster does, on `nodes` of its nodes; one that is started for the
    run is supervised by the command too, a running one supervises the run itself. slurm: a job of
    `nodes` nodes does, and the command returns once it is queued.
    """

    kind: Literal["local", "torchrun", "ray", "slurm"]
    nodes: int = 1
    torchrun: TorchrunConfig = field(default_factory=TorchrunConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def problems(self) -> list[str]:
        found = []
        if self.nodes < 1:
            found.append(f"launcher.nodes={self.nodes} must be 1 or more")
        if self.kind == "ray" and self.nodes > 1 and self.ray.address is None:
            found.append(
                f"launcher.nodes={self.nodes}, but a Ray cluster that is started for the run is "
                "this machine alone; name a running one: launcher.ray.address=HOST:PORT"
            )
        if self.slurm.dry_run and self.kind != "slurm":
            found.append(
                f"--dry-run prints the batch script of launcher=slurm, but this is launcher="
                f"{self.kind}; leave it out, or see dsv41 plan for what a run would hold"
            )
        return found


@dataclass(frozen=True)
class ResilienceConfig:
    """When a run that ended is started again, and how long it may take to end.

    max_failures: attempts that crash, hang or lose a rank. max_preemptions: attempts that were told
    to end by the cluster. max_without_progress: failed attempts one after another that left no
    checkpoint newer than the one before. grace_s: seconds between a SIGTERM (of the cluster, not
    Ctrl-C or dsv41 stop) and the end by force, the time that a checkpoint has. hang_s: seconds in
    which no rank finishes anything before the attempt counts as hung; 0 = never.
    """

    max_failures: int = 3
    max_preemptions: int = 100
    max_without_progress: int = 2
    grace_s: float = 60.0
    hang_s: float = 600.0

    def problems(self) -> list[str]:
        found = []
        for name, least in (
            ("max_failures", 0),
            ("max_preemptions", 0),
            ("max_without_progress", 1),
            ("hang_s", 0),
        ):
            value = getattr(self, name)
            if value < least:
                found.append(f"resilience.{name}={value} must be {least} or more")
        if not self.grace_s > 0:
            found.append(f"resilience.grace_s={self.grace_s} must be above 0")
        return found


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that the ranks run on.

    device_memory_gb: of one accelerator, in 10^9 bytes. A run that would hold more on some rank is
    refused before it starts, see `dsv41 plan`. None = unknown, nothing is refused.
    """

    device_memory_gb: float | None = None

    def problems(self) -> list[str]:
        if self.device_memory_gb is None or self.device_memory_gb > 0:
            return []
        return [
            f"cluster.device_memory_gb={self.device_memory_gb} must be above 0; give the memory of "
            "one accelerator in GB, or null if it is unknown"
        ]


@dataclass(frozen=True)
class AshaConfig:
    """When asynchronous successive halving compares the points of a sweep: after grace_steps steps,
    then each time their number is `reduction` times as high. Of those that have come so far, the
    best of each `reduction` train on. grace_steps: None = a tenth of train.steps.
    """

    grace_steps: int | None = None
    reduction: int = 3

    def problems(self) -> list[str]:
        found = []
        if self.grace_steps is not None and self.grace_steps < 1:
            found.append(f"sweep.asha.grace_steps={self.grace_steps} must be 1 or more, or null")
        if self.reduction < 2:
            found.append(f"sweep.asha.reduction={self.reduction} must be 2 or more")
        return found

    def rungs(self, steps: int) -> list[int]:
        """The steps at which runs of so many steps are compared, in order."""
        found = [self.grace_steps or -(-steps // 10)]
        while found[-1] * self.reduction < steps:
            found.append(found[-1] * self.reduction)
        return found


@dataclass(frozen=True)
class SweepConfig:
    """How `-m` runs its points: `concurrency` of them at the same time. None = one after another;
    on Slurm as many as there is room for.

    metric: what is compared, the lowest is the best. auto = eval_loss where points evaluate.
    scheduler: None = all points train to their end; asha = bad ones are stopped early, see
    AshaConfig.
    """

    concurrency: int | None = None
    metric: Literal["auto", "eval_loss", "loss"] = "auto"
    scheduler: Literal["asha"] | None = None
    asha: AshaConfig = field(default_factory=AshaConfig)

    def problems(self) -> list[str]:
        if self.concurrency is None or self.concurrency >= 1:
            return []
        return [f"sweep.concurrency={self.concurrency} must be 1 or more, or null"]
