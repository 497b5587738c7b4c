"""Ray's actor for one rank: it is where the rank is to be, and the rank is a child of it.

A process of its own keeps Ray's imports, threads and signal handlers out of the training, and is
started exactly as every other launcher starts it. It ends with the actor (see `launcher.guard`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.backends.protocol import Plan
from launcher.guard import as_parent
from launcher.processes import end_tree, without_rank


@dataclass(frozen=True)
class Seat:
    """Where an actor is. gpus: the ids that its node knows its GPUs by."""

    node: str
    address: str
    gpus: tuple[str, ...]


class Rank:
    """One rank of an attempt. Each method returns soon, so that the next one is heard: Ray calls
    them one after another, in the thread whose end the kernel tells the rank of."""

    def __init__(self, plan: Plan, *, attempt: int) -> None:
        self._plan = plan
        self._attempt = plan.folder.attempt(attempt)
        self._process: subprocess.Popen | None = None

    def seat(self) -> Seat:
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Seat(context.get_node_id(), ray.util.get_node_ip_address(), tuple(gpus))

    def free_port(self) -> int:
        """A port of this node that nobody uses now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def start(self, environment: Mapping[str, str], *, node: int) -> None:
        """Start the rank that `environment` names. What only Ray would say goes to the log of the
        node; what rank 0 would show on a terminal, to a file that the supervisor shows there."""
        folder = self._plan.folder
        own = {k: v for k, v in without_rank().items() if not k.startswith("RAY_")}
        speaks = environment["RANK"] == "0"
        with (
            (self._attempt.path / f"agent-{node:05d}.log").open("ab") as log,
            (self._attempt.path / "terminal.log").open("ab") as terminal,
        ):
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "launcher.worker"),
                    *(str(folder.path), str(self._attempt.number)),
                ],
                env={**own, **self._plan.environment(), **environment, **as_parent()},
                stdin=subprocess.DEVNULL,
                stdout=terminal if speaks else log,
                stderr=terminal if speaks else log,
                cwd=folder.path,
            )

    def wait(self, seconds: float) -> int | None:
        """The rank's exit code, negative for a signal; None if it runs on for so long."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the rank by force; returns when it and all that it started are gone."""
        if self._process is not None and self._process.poll() is None:
            end_tree(self._process.pid)
            self._process.wait()


# Of the user's environment, what a rank on another machine has to know as well.
PASSED_ON = ("DSV41_", "WANDB_", "HF_", "NCCL_", "GLOO_", "TORCH_", "OMP_")


def passed_on() -> dict[str, str]:
    """That part of this process's environment."""
    return {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}


def places(plan: Plan, seats: list[Seat], *, port: int) -> list[dict[str, str]]:
    """What makes each actor's rank the rank that it is, in the environment: ranks in the order of
    `seats`, an equal share of neighbours on each node.

    All GPUs of a node are shown to all of its ranks, in the order of the ranks, as torchrun does:
    ranks that see only their own cannot reach each other's memory.
    """
    share = plan.ranks_per_node
    found = []
    for rank in range(plan.world):
        first = rank - rank % share
        gpus = [gpu for seat in seats[first : first + share] for gpu in seat.gpus]
        found.append(
            {
                **passed_on(),
                "RANK": str(rank),
                "WORLD_SIZE": str(plan.world),
                "LOCAL_RANK": str(rank - first),
                "LOCAL_WORLD_SIZE": str(share),
                "MASTER_ADDR": "127.0.0.1" if plan.nodes == 1 else seats[0].address,
                "MASTER_PORT": str(port),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            }
        )
    return found
