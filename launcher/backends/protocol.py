"""What a supervisor asks of whatever starts ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from launcher.reduce import Death
from launcher.run_dir import Attempt, RunFolder
from trainer import faults
from trainer.signals import GRACE

SUPERVISED = "DSV41_SUPERVISED"  # set for ranks that end with the process that started them
OWNED = "DSV41_OWNED"  # set for commands that end, runs too, with the one that started them


@dataclass(frozen=True)
class Plan:
    """What to start: `world` ranks of the run in `folder`, an equal share on each node.

    grace_s: how long ranks that the cluster told to end have for it.
    """

    folder: RunFolder
    world: int
    nodes: int
    grace_s: float

    @property
    def ranks_per_node(self) -> int:
        return self.world // self.nodes

    def environment(self) -> dict[str, str]:
        """What every rank's environment has more than this process's.

        A user's own data/ must not shadow ours; and threads that spin while they wait cost other
        ranks of the node their time.
        """
        threads = max(1, (os.cpu_count() or 1) // self.ranks_per_node)
        return {
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(self.folder.code),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            SUPERVISED: "1",
            GRACE: str(self.grace_s),
            **({faults.VARIABLE: asked} if (asked := os.environ.get(faults.VARIABLE)) else {}),
        }


class Handle(Protocol):
    """An attempt's processes."""

    def poll(self) -> list[Death] | None:
        """None while any of them runs; then what is known of those that died badly."""
        ...

    def kill(self) -> None:
        """End everything at once; returns when all are gone."""
        ...


class Backend(Protocol):
    """Starts the ranks of attempts; Stop where it cannot."""

    def start(self, attempt: Attempt, plan: Plan) -> Handle: ...


class Fate(Enum):
    """What becomes of the machines that a supervisor was given.

    stays: they are still ours. preempted: others get them, and the job comes back by itself. time:
    the time that they were given for is over, or will be soon. cancelled: somebody ended the job.
    """

    STAYS = "stays"
    PREEMPTED = "preempted"
    TIME = "time"
    CANCELLED = "cancelled"


class Job(Protocol):
    """The job of a batch system that a supervisor runs in."""

    @property
    def id(self) -> str: ...

    def fate(self, *, stopped: bool) -> Fate:
        """Asked when an attempt ended before it was done. stopped: its ranks were told to end,
        though not by a person through the run's folder."""
        ...

    def make_way(self, fate: Fate, wait: Callable[[float], bool]) -> None:
        """Have the job come back later, and stay until the system ends this process. wait: for
        some seconds; True when a signal has come. Stop 75 when the job cannot come back."""
        ...
