"""Whether the machine of a rank can do its part, before anything is built on it."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from launcher.problems import Stop
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 64 << 20  # bytes of it that loader workers need to hand over batches


def require_healthy_node(config: RunConfig, *, local_rank: int) -> None:
    """Stop 78, naming the machine, when it lacks an accelerator that the job has asked for, when
    that computes wrongly, or when loader workers would find no shared memory."""
    found = [*_accelerator(config, local_rank), *_shared_memory(config)]
    if found:
        raise Stop(
            ExitCode.CONFIG,
            f"The node {socket.gethostname()} is not fit: {'; '.join(found)}.\n"
            "Leave it out (launcher.slurm.extra=['--exclude=NODE'] under Slurm) and tell whoever "
            "runs the cluster.",
        )


def _accelerator(config: RunConfig, local_rank: int) -> list[str]:
    if config.launcher.kind != "slurm" or config.launcher.slurm.gpus_per_node is None:
        return []
    import torch

    seen = torch.cuda.device_count()
    if seen <= local_rank:
        return [f"rank {local_rank} of it sees {seen} accelerator(s)"]
    try:
        ones = torch.ones(64, 64, device=f"cuda:{local_rank}")
        wrong = not bool(((ones @ ones) == 64).all())
    except RuntimeError as error:
        return [f"accelerator {local_rank}: {str(error).partition(chr(10))[0]}"]
    return [f"accelerator {local_rank} multiplies wrongly"] if wrong else []


def _shared_memory(config: RunConfig) -> list[str]:
    if not config.data.workers or not SHARED_MEMORY.is_dir():
        return []
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= LEAST_SHARED:
        return []
    return [f"{SHARED_MEMORY} has {free >> 20} MiB left, and loader workers pass batches there"]
