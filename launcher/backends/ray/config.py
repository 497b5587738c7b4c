"""Which cluster of Ray a run takes place in, and what of it each rank gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RayConfig:
    """address: HOST:PORT of a running cluster, seen from one of its nodes, or "auto" for the one
    that Ray finds there; None = one on this machine alone, for this run alone.

    cpus_per_rank: what each rank is given, and so many threads. gpus_per_rank: None = one where the
    cluster has any, else none. wait_s: how long to wait for room in a running cluster.
    """

    address: str | None = None
    cpus_per_rank: int = 1
    gpus_per_rank: int | None = None
    wait_s: float = 300.0

    def problems(self) -> list[str]:
        found = []
        if self.address is not None and host_and_port(self.address) is None:
            found.append(
                f"launcher.ray.address={self.address} is no address of a cluster; use HOST:PORT as "
                "ray start --head prints it (6379, not the port of Ray's client), auto for the "
                "cluster of this node, or null for one of its own"
            )
        if self.cpus_per_rank < 1:
            found.append(f"launcher.ray.cpus_per_rank={self.cpus_per_rank} must be 1 or more")
        if self.gpus_per_rank is not None and self.gpus_per_rank not in (0, 1):
            found.append(
                f"launcher.ray.gpus_per_rank={self.gpus_per_rank}: a rank uses one GPU or none; "
                "use 1, 0, or null"
            )
        if self.wait_s < 0:
            found.append(f"launcher.ray.wait_s={self.wait_s} must be 0 or more")
        return found


def host_and_port(address: str) -> tuple[str, int] | None:
    """What an address names; ("auto", 0) leaves it to Ray; None if it is none."""
    if address == "auto":
        return "auto", 0
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)
