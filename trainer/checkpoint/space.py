"""What checkpoints take, on the disk and in memory, told before the first step."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.checkpoint.folders import finished
from trainer.checkpoint.shards import Shard
from trainer.disk import DiskError, describe_disk, megabytes, nearest_existing
from trainer.ranks import Ranks

SLICE_OVERHEAD = 2048  # bytes of container and index for each slice, rounded up


def stored_bytes(shards: Iterable[Shard], *, slice_bytes: int) -> int:
    """Bytes that tensors take on the disk, each counted whole however it is sharded."""
    total = 0
    for shard in shards:
        size = shard.local.element_size()
        for length in shard.size:
            size *= length
        total += size + SLICE_OVERHEAD * (shard.holders + size // slice_bytes)
    return total


def require_space(
    folder: Path, shards: Mapping[str, Shard], count: int, *, ranks: Ranks, slice_bytes: int
) -> None:
    """DiskError on all ranks unless `count` checkpoints fit on the disk, with those there now."""
    message = ""
    if ranks.first:
        present = sum(f.stat().st_size for p in finished(folder) for f in p.rglob("*"))
        needed = count * stored_bytes(shards.values(), slice_bytes=slice_bytes) - present
        if needed > shutil.disk_usage(nearest_existing(folder)).free:
            message = (
                f"Checkpoints need {megabytes(needed)} more, but {describe_disk(folder)}. "
                "Free space there, choose another runs_dir, or lower checkpoint.keep."
            )
    if message := ranks.from_first(message):
        raise DiskError(message, full=True)


def require_memory(shards: Mapping[str, Shard], *, limit: int, ranks: Ranks) -> None:
    """ValueError on all ranks unless the copies that saves in the background make fit into the
    memory that is free now on every host. A share is counted as if this rank wrote all of it."""
    mine = min(limit, sum(shard.local.nbytes for shard in shards.values()))
    hosts: dict[str, int] = {}
    free: dict[str, int] = {}
    for host, needed, available in ranks.all_gather_objects(
        (socket.gethostname(), mine, _available_memory())
    ):
        hosts[host] = hosts.get(host, 0) + needed
        if available is not None:
            free[host] = available
    for host, available in free.items():
        if hosts[host] > available:
            raise ValueError(
                f"checkpoint.async needs {megabytes(hosts[host])} of memory on {host} for copies "
                f"of what is saved, and {megabytes(available)} are free there. Lower "
                "checkpoint.staging_mb: what does not fit is written while training waits."
            )


def _available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
