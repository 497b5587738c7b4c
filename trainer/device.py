"""Where a rank computes."""

from __future__ import annotations

import torch

from model.kernels.build import built
from trainer.heap import keep_freed_memory

CPU = torch.device("cpu")


def choose_device(local_rank: int) -> torch.device:
    """The GPU of this rank's number on its node, made the current one; the CPU without GPUs, where
    this process's heap is set up for tensors and the kernels are compiled.

    ValueError where there are GPUs, but fewer than ranks: two ranks cannot share one.
    """
    if not torch.cuda.is_available():
        keep_freed_memory()
        built()  # now, rather than in the first step
        return CPU
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"rank {local_rank} of this machine has no GPU of its own, there are {count}; start "
            f"{count} rank(s) on it, or hide them (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
