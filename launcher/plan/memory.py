"""Whether the devices have room for what their ranks will hold."""

from __future__ import annotations

from launcher.plan.holdings import Holdings
from launcher.run_config import RunConfig


def memory_problems(config: RunConfig, held: Holdings) -> list[str]:
    """Why the run does not fit into cluster.device_memory_gb: what the largest part is, and which
    setting lowers it. Empty when it fits, or when the memory is unknown."""
    memory = config.cluster.device_memory_gb
    most = held.device_bytes()
    if memory is None or most.max() <= memory * 1e9:
        return []
    rank = int(most.argmax())
    on_device = [c for c in held.classes if not c.host and c.lower]
    largest = max(on_device, key=lambda c: c.bytes[rank])
    return [
        f"cluster.device_memory_gb={memory:g}, but rank {rank} would hold {most[rank] / 1e9:,.1f} "
        f"GB. The largest part, {largest.bytes[rank] / 1e9:,.1f} GB, is {largest.name}; use "
        f"{largest.lower}"
    ]
