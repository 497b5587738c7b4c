"""Two ranks, of which one is killed in the middle of a save: what the next start finds.

The ranks are forks of the test's process: they are quickly made, and die for good.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer import faults
from trainer.checkpoint.store import Checkpoints
from trainer.ranks import Ranks
from trainer.state import TrainState

WHOLE = torch.arange(70.0).view(10, 7)
SURVIVED, SAW_IT = 0, 7


def forked(world: int, work: Callable[[], None], *, store: Path) -> list[int]:
    """How each rank ended: its exit code, or minus the signal that killed it."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=60),
                )
                work()
                code = SURVIVED
            except RuntimeError:  # gloo: the other rank has gone
                code = SAW_IT
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def opened(folder: Path, *, attempt: int) -> Checkpoints:
    return Checkpoints(
        folder,
        keep=2,
        attempt=attempt,
        ranks=Ranks.from_process_group(),
        say=lambda text: None,
        staging=1 << 20,
        slice_bytes=56,
    )


@pytest.mark.parametrize(
    ("rank", "point", "wait"),
    [
        (1, "save.slice", False),
        (1, "save.tensors", True),
        (0, "save.manifest", False),
        (0, "save.renamed", True),
    ],
)
def test_the_next_start_takes_the_last_whole_one(
    tmp_path: Path, rank: int, point: str, wait: bool
) -> None:
    folder = tmp_path / "checkpoints"

    def work() -> None:
        sharded = distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])
        checkpoints = opened(folder, attempt=1)
        checkpoints.save({"w": sharded}, TrainState(0, 2, "d", "p", step=2))
        faults.arm(f"kill@{point},rank={rank}")
        checkpoints.save({"w": sharded}, TrainState(0, 2, "d", "p", step=4), wait=wait)
        checkpoints.settle(wait=True)

    started = time.monotonic()
    ends = forked(2, work, store=tmp_path / "store")
    assert ends[rank] == -signal.SIGKILL
    assert ends[1 - rank] == SAW_IT  # it did not wait for ever
    assert time.monotonic() - started < 55

    later = opened(folder, attempt=2)
    newest = later.newest()
    assert newest is not None
    assert newest == later.path(4 if point == "save.renamed" else 2)
    target = torch.zeros(10, 7)
    later.load(newest, {"w": target})
    assert torch.equal(target, WHOLE)
    assert not list(folder.glob("*.tmp-*"))
