"""An attempt's driver: the process that Ray knows, between the supervisor and the actors.

Usage: python -P -m launcher.backends.ray.driver RUN_DIR ATTEMPT FOLDER

A process of its own, for each attempt: what Ray prints, the signal handlers it installs and the
state it keeps stay away from the supervisor, and an attempt to connect that hangs can be ended. It
works in the run's code snapshot, since the actors import from where their driver is, and not from
PYTHONPATH. It ends with the supervisor, the actors with it, and with them the ranks.

It reports connected, placed, waiting, failed or ended (see `Report`); the end of its standard input
means: end everything. FOLDER: for the files of a cluster of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.backends.protocol import Plan
from launcher.backends.ray.cluster import Refused, connected, is_alive, joined, last_line, room
from launcher.backends.ray.config import RayConfig
from launcher.backends.ray.rank import Rank, Seat, places
from launcher.backends.ray.reports import Report
from launcher.guard import PARENT
from launcher.processes import KILL_SECONDS, descendants, killed_by, send
from launcher.reduce import Death
from launcher.resume import continued
from launcher.run_dir import Attempt, RunFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome
from trainer.signals import requested_stop

LOOK_SECONDS = 0.5  # between two looks at the supervisor's orders
TURN_SECONDS = 2.0  # that an actor waits for its rank before it hears of anything else
PEERS_SECONDS = 30.0  # that ranks have to notice that one has died, before they are ended
ORPHAN_SECONDS = 3.0  # that ranks have to end once the supervisor is gone
LOST_SECONDS = 20.0  # until the cluster knows that a node is gone whose actor is


class Orders:
    """What the supervisor wants, as a thread reads it.

    A supervisor that is gone wants the end too, at once: the main thread has ORPHAN_SECONDS for the
    ranks, then this process and the cluster that it may have started end by force. SIGKILL to this
    process alone would leave some of that cluster's processes behind.
    """

    def __init__(self, *, parent: int, temporary: str) -> None:
        self.ended = threading.Event()
        self._parent, self._temporary = parent, temporary
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        sys.stdin.read()
        self.ended.set()
        while os.getppid() == self._parent:  # one that dies closes its files a moment before
            time.sleep(LOOK_SECONDS)
        time.sleep(ORPHAN_SECONDS)
        send(descendants(os.getpid()), signal.SIGKILL)
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # a session of our own


def main() -> None:
    parent = int(os.environ.pop(PARENT, os.getppid()))
    folder = RunFolder(Path(sys.argv[1]))
    attempt, temporary = folder.attempt(int(sys.argv[2])), sys.argv[3]
    report, orders = Report(), Orders(parent=parent, temporary=temporary)
    config = continued(folder, attempt.given())
    plan = Plan(
        folder,
        world=config.parallel.world,
        nodes=config.launcher.nodes,
        grace_s=config.resilience.grace_s,
    )
    where = joined(config.launcher.ray)
    try:
        with connected(where, cpus=plan.world * where.cpus_per_rank, temporary=temporary):
            report("connected")
            _drive(where, plan, attempt, report=report, orders=orders)
    except Refused as refusal:
        report("failed", text=str(refusal))
    finally:  # a supervisor that is gone does not
        shutil.rmtree(temporary, ignore_errors=True)


def _drive(
    config: RayConfig, plan: Plan, attempt: Attempt, *, report: Report, orders: Orders
) -> None:
    def unwanted() -> bool:
        return orders.ended.is_set() or requested_stop(attempt.stop_file) is not None

    def say(text: str) -> None:
        report("waiting", text=text)

    with room(config, plan, say=say, unwanted=unwanted) as group:
        if group is None:
            _stopped(plan, attempt)
            report("ended", deaths=[])
            return
        crew = Crew(plan, attempt, group)
        try:
            crew.start()
            report("placed")
            deaths = crew.watch(orders)
        finally:
            crew.end()
        report("ended", deaths=[[death.rank, death.how] for death in deaths])


class Crew:
    """The actors of an attempt, and the ranks that they start."""

    def __init__(self, plan: Plan, attempt: Attempt, group: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._plan, self._seats = plan, list[Seat]()
        bundle = group.bundle_specs[0]
        actor, share = ray.remote(Rank), plan.ranks_per_node
        self._actors = [
            actor.options(
                num_cpus=bundle["CPU"] / share,
                num_gpus=bundle.get("GPU", 0) / share,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank // share
                ),
            ).remote(plan, attempt=attempt.number)
            for rank in range(plan.world)
        ]

    def start(self) -> None:
        """Start all ranks. Refused when a node cannot run them."""
        import ray
        from ray.exceptions import RayError

        try:
            self._seats = ray.get([actor.seat.remote() for actor in self._actors])
            port: Any = ray.get(self._actors[0].free_port.remote())
            here = places(self._plan, self._seats, port=port)
            share = self._plan.ranks_per_node
            ray.get(
                [
                    actor.start.remote(place, node=rank // share)
                    for rank, (actor, place) in enumerate(zip(self._actors, here, strict=True))
                ]
            )
        except RayError as error:
            raise Refused(
                f"Ray could not start the ranks: {last_line(error)}\n"
                f"Every node must see {self._plan.folder.path} at that path, and have the same "
                "Python packages."
            ) from error

    def watch(self, orders: Orders) -> list[Death]:
        """Until all ranks have ended, or the supervisor wants them to; those that died badly.

        Once one has, the others may find words of their own, but not for long.
        """
        import ray
        from ray.exceptions import RayError

        deaths, lost = list[Death](), dict[int, Exception]()
        waiting = {a.wait.remote(TURN_SECONDS): rank for rank, a in enumerate(self._actors)}
        patience: float | None = None
        while waiting and not orders.ended.is_set():
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=LOOK_SECONDS)
            for ref in ready:
                rank = waiting.pop(ref)
                try:
                    code = ray.get(ref)
                except RayError as error:
                    lost[rank] = error
                    continue
                if code is None:
                    waiting[self._actors[rank].wait.remote(TURN_SECONDS)] = rank
                elif code < 0:
                    deaths.append(Death(rank, killed_by(-code)))
            if (deaths or lost) and patience is None:
                patience = time.monotonic() + PEERS_SECONDS
            if patience is not None and time.monotonic() > patience:
                break
        return deaths + self._explained(lost)

    def end(self) -> None:
        """End all ranks by force; returns when they are gone, as far as their nodes answer."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ends = [actor.end.remote() for actor in self._actors]
            ray.wait(ends, num_returns=len(ends), timeout=TURN_SECONDS + KILL_SECONDS)
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)  # pyright: ignore[reportArgumentType]

    def _explained(self, lost: dict[int, Exception]) -> list[Death]:
        """A node takes all its ranks with it, and is one cause; the cluster learns of it late."""
        deadline = time.monotonic() + LOST_SECONDS
        nodes = {self._seats[rank].node: self._seats[rank] for rank in lost}
        while nodes and time.monotonic() < deadline:
            gone = {node for node in nodes if not is_alive(node)}
            if gone:
                return [
                    Death(None, f"Node {nodes[node].address} (Ray's {node[:8]}) was lost")
                    for node in sorted(gone)
                ]
            time.sleep(LOOK_SECONDS)
        return [
            Death(rank, f"was lost with its Ray actor ({last_line(error)})")
            for rank, error in sorted(lost.items())
        ]


def _stopped(plan: Plan, attempt: Attempt) -> None:
    """Ranks that were told to end before they began have ended as they were told."""
    code = requested_stop(attempt.stop_file) or ExitCode.AGAIN
    for rank in range(plan.world):
        text = "Stopped while it waited for room in the Ray cluster."
        attempt.write_outcome(rank, Outcome(code, "stopped", 0, text))


if __name__ == "__main__":
    main()
