"""A command's link to the actor that keeps a run in a cluster (see `resident`).

Usage: python -P -m launcher.backends.ray.link RUN_DIR ADDRESS

A process of its own, as the driver of an attempt is, and in the run's code for the same reason. It
ends with the command; the actor does not. It reports connected, with `found`: whether there is such
an actor; then, when a line comes on its standard input and there was none, started; then ended,
once there is none any more. Or failed, with a text.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from launcher.backends.ray.cluster import CLUSTER, Refused, connected, last_line
from launcher.backends.ray.config import RayConfig
from launcher.backends.ray.rank import passed_on
from launcher.backends.ray.reports import Report
from launcher.backends.ray.resident import NAMESPACE, Resident, actor_name
from launcher.guard import die_with_parent
from launcher.resume import continued
from launcher.run_dir import RunFolder
from launcher.submission import Submission

LOOK_SECONDS = 0.5  # between two looks at the actor
ANSWER_SECONDS = 5.0  # that it has to answer, before it counts as silent, but not as gone
MEMORY = 256 << 20  # bytes; about what it takes, with the supervisor and the driver of an attempt
START_SECONDS = 120.0  # for a process of Ray's, and our imports in it


def main() -> None:
    die_with_parent()
    folder, address = RunFolder(Path(sys.argv[1])), sys.argv[2]
    report = Report()
    try:
        with connected(RayConfig(address=address), cpus=0, temporary="") as cluster:
            actor = _find(folder)
            report("connected", found=actor is not None)
            if actor is None:
                if not sys.stdin.readline():
                    return
                actor = _start(folder, cluster=cluster)
                report("started")
            _await_end(actor)
            report("ended")
    except Refused as refusal:
        report("failed", text=str(refusal))


def _find(folder: RunFolder) -> Any:
    """The run's actor; None when the cluster has none, or it is gone for good."""
    import ray

    try:
        return ray.get_actor(actor_name(folder), namespace=NAMESPACE)
    except ValueError:
        return None


def _start(folder: RunFolder, *, cluster: str) -> Any:
    """The run's new actor, at work: on this node as long as there is one. Refused if it cannot be,
    or another command was faster."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    limits = continued(folder, Submission.of(folder).given).resilience
    here = ray.get_runtime_context().get_node_id()
    environment = {
        **passed_on(),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(folder.code),
        CLUSTER: cluster,
    }
    try:
        actor: Any = (
            ray.remote(Resident)
            .options(
                name=actor_name(folder),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=limits.max_preemptions,
                num_cpus=0,
                memory=MEMORY,  # an actor that asks for nothing is put anywhere by Ray
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
            )
            .remote(folder.path, environment)
        )
    except ValueError as error:
        raise Refused(f"Another command has just started {folder.path}.") from error
    try:
        ray.get(actor.is_there.remote(), timeout=START_SECONDS)
    except RayError as error:
        ray.kill(actor)
        raise Refused(
            f"Ray could not start the run's supervisor: {last_line(error)}\n"
            f"Every node must see {folder.path} at that path, and have the same Python packages."
        ) from error
    return actor


def _await_end(actor: Any) -> None:
    """Until it is gone for good. One that Ray starts again, or that is silent, is not."""
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

    while True:
        try:
            ray.get(actor.is_there.remote(), timeout=ANSWER_SECONDS)
        except (ActorUnavailableError, GetTimeoutError):
            pass
        except RayActorError:
            return
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
