"""Errors of a run as outcomes: which exit code each one means, and what to tell the user."""

from __future__ import annotations

import torch
import torch.distributed as dist

from data.errors import CacheError, DataError, WorkerDiedError
from model.engram.tables.file_rows import BadTableError
from trainer.checkpoint.errors import DamagedCheckpointsError, NotFiniteError
from trainer.disk import DiskError
from trainer.exit_codes import ExitCode
from trainer.outcome import LOST_PEER, Outcome
from trainer.step import DivergedError

# What gloo and NCCL say when the other side has closed its connections.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "Connection refused",
)


def failure_outcome(error: BaseException, *, step: int) -> Outcome | None:
    """The outcome that `error` means, met after `step` finished steps; None if it is our bug."""
    match error:
        case DataError() | BadTableError():
            return Outcome(ExitCode.BAD_DATA, "bad data", step, str(error))
        case CacheError(full=full):
            code, reason = (
                (ExitCode.IO_ERROR, "disk full")
                if full
                else (ExitCode.CANNOT_CREATE, "cannot write")
            )
            return Outcome(code, reason, step, str(error))
        case WorkerDiedError():
            return Outcome(ExitCode.AGAIN, "a process was killed", step, str(error))
        case DiskError(full=True):
            return Outcome(ExitCode.IO_ERROR, "disk full", step, str(error))
        case DiskError():
            return Outcome(ExitCode.CANNOT_CREATE, "cannot write", step, str(error))
        case DamagedCheckpointsError():
            return Outcome(ExitCode.IO_ERROR, "damaged checkpoint", step, str(error))
        case NotFiniteError():
            message = (
                f"{error}. It was not saved, so earlier checkpoints are good. "
                "Lower optim.lr, lengthen optim.warmup_steps or lower train.clip_norm, and start a "
                "new run."
            )
            return Outcome(ExitCode.DIVERGED, "diverged", step, message)
        case DivergedError():
            message = (
                f"Step {step + 1} diverged: {error}. Its update was not made and no checkpoint "
                "written, so earlier ones are good. Lower optim.lr, lengthen optim.warmup_steps or "
                "lower train.clip_norm, and start a new run."
            )
            return Outcome(ExitCode.DIVERGED, "diverged", step, message)
        case _ if out_of_memory(error):
            message = (
                f"Out of memory after step {step}: {error}. Lower train.packs_per_micro_batch, "
                "data.pack_length or the model's sizes."
            )
            return Outcome(ExitCode.CONFIG, "out of memory", step, message)
        case _ if lost_peer(error):
            text = str(error).strip().partition("\n")[0][:300]
            return Outcome(ExitCode.AGAIN, LOST_PEER, step, f"Lost another rank: {text}")
    return None


def lost_peer(error: BaseException) -> bool:
    """Whether a collective failed since another rank is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_GONE)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch has no class of its own for that on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
