"""A driver's way into a cluster, and room for its ranks there."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from launcher.backends.protocol import Plan
from launcher.backends.ray.config import RayConfig, host_and_port
from launcher.backends.ray.reach import no_head

PROBE_SECONDS = 5.0  # for an answer from the address
QUIET_SECONDS = 5.0  # of waiting for room before a person is told
OWN_WAIT_SECONDS = 60.0  # for room in a cluster where nobody else is
OBJECT_STORE = 100 << 20  # bytes; nothing of a run travels through it
CLUSTER = "DSV41_RAY_CLUSTER"  # environment: the one that a run is in, whatever it was told then
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class Refused(Exception):
    """The run cannot be there as things are; the text says why and what to do."""


def joined(config: RayConfig) -> RayConfig:
    """With the address of the cluster that this process was started in: for a point of a sweep that
    has its own, and for a supervisor in a cluster, where another node may call it otherwise."""
    return replace(config, address=os.environ.get(CLUSTER, config.address))


@contextmanager
def connected(config: RayConfig, *, cpus: int, temporary: str) -> Iterator[str]:
    """While entered, this process is a driver in the cluster, whose address it gets. cpus: of one
    that this starts. temporary: a folder for that, so that nobody else's driver finds it. Refused
    with Ray's words if there is none.
    """
    if config.address is not None:
        _reach(config.address)
    import ray

    try:
        if config.address is None:
            _start(cpus, temporary=temporary)
        else:
            ray.init(address=config.address, **QUIET)
    except Exception as error:  # Ray raises whatever it met
        raise Refused(
            f"Ray: {str(error).strip()}\n"
            + (
                "It could not start a cluster on this machine."
                if config.address is None
                else f"launcher.ray.address={config.address} must be a cluster of the same versions"
                " of Ray and Python, and this machine one of its nodes; null starts one here."
            )
        ) from error
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@contextmanager
def room(
    config: RayConfig, plan: Plan, *, say: Callable[[str], None], unwanted: Callable[[], bool]
) -> Iterator[Any]:
    """While entered, the cluster keeps room for the ranks: a placement group with one bundle a
    node, or None once it is `unwanted`. say: told when it takes a while. Refused when there is
    none in config.wait_s."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = demand(config, plan, gpus=any("GPU" in node for node in _nodes()))
    strategy = "STRICT_SPREAD" if plan.nodes > 1 else "PACK"
    group = placement_group([bundle] * plan.nodes, strategy=strategy)
    try:
        begun, told = time.monotonic(), False
        patience = OWN_WAIT_SECONDS if config.address is None else config.wait_s
        while not group.wait(1):
            waited = time.monotonic() - begun
            if unwanted():
                yield None
                return
            if waited > patience:
                raise Refused(
                    f"After {waited:.0f} s Ray has no room for the run: {_want(plan, bundle)}\n"
                    "Add nodes, use a smaller mesh, or ask for less a rank "
                    "(launcher.ray.cpus_per_rank, gpus_per_rank); launcher.ray.wait_s is how long "
                    "to wait."
                )
            if waited > QUIET_SECONDS and not told:
                say(f"Waiting for room in the Ray cluster: {_want(plan, bundle)}")
                told = True
        yield group
    finally:
        if ray.is_initialized():
            with suppress(Exception):  # the cluster may be gone, and the room with it
                remove_placement_group(group)


def demand(config: RayConfig, plan: Plan, *, gpus: bool) -> dict[str, float]:
    """What one node's share of the ranks takes. gpus: whether the cluster has any."""
    each = config.gpus_per_rank if config.gpus_per_rank is not None else int(gpus)
    found = {"CPU": float(config.cpus_per_rank * plan.ranks_per_node)}
    return {**found, "GPU": float(each * plan.ranks_per_node)} if each else found


def is_alive(node: str) -> bool:
    """Whether the cluster still counts on a node."""
    import ray

    return any(known["NodeID"] == node and known["Alive"] for known in ray.nodes())


def last_line(error: Exception) -> str:
    """What of an error of Ray's, a screen and more, says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _start(cpus: int, *, temporary: str) -> None:
    """A cluster of this machine, which ends with this process."""
    import ray

    for last in (False, True):  # Ray waits 30 s for its node, too short for a machine that is busy
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                _temp_dir=temporary,
                **QUIET,
            )
            return
        except Exception:
            ray.shutdown()
            if last:
                raise


def _reach(address: str) -> None:
    """Refused where no cluster's head is."""
    place = host_and_port(address)
    assert place is not None, address
    host, port = place
    if host == "auto":
        return
    if problem := no_head(host, port, seconds=PROBE_SECONDS):
        raise Refused(
            f"The Ray cluster at {address} cannot be reached: {problem}.\n"
            "Start it (ray start --head prints its address), or give another "
            "launcher.ray.address; null starts one here for this run alone."
        )


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _want(plan: Plan, bundle: dict[str, float]) -> str:
    there = "; ".join(_text(node) for node in _nodes()) or "none"
    each = " each, on different nodes" if plan.nodes > 1 else ""
    return f"it needs {plan.nodes} x {_text(bundle)}{each}. Nodes there: {there}."


def _text(resources: dict[str, float]) -> str:
    known = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {name}" for name, number in known.items())
