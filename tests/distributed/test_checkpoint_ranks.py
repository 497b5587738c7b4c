"""Checkpoints of several ranks: cut anew for any other mesh, agreed on when something fails."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import Ranks as Pool
from trainer import faults
from trainer.checkpoint.errors import NotFiniteError
from trainer.checkpoint.shards import shard_of
from trainer.checkpoint.store import Checkpoints
from trainer.checkpoint.writing import SLICE_BYTES
from trainer.disk import DiskError
from trainer.ranks import Ranks
from trainer.state import TrainState

pytestmark = pytest.mark.xdist_group("ranks")

STATE = TrainState(0, 2, "d", "p", step=5)


def whole_tensors() -> dict[str, Tensor]:
    """One of each kind, with sizes that divide by nothing."""
    return {
        "matrix": torch.arange(77.0).view(11, 7),
        "experts": torch.arange(4 * 6 * 5.0).view(4, 6, 5),
        "table": torch.arange(35.0).view(7, 5),
        "short table": torch.arange(6.0).view(3, 2),  # some ranks hold no row
        "row steps": torch.arange(7, dtype=torch.int32),
        "island": torch.arange(9.0).bfloat16(),
        "step": torch.tensor(3.0),
    }


def cut(whole: dict[str, Tensor], *, ep: int, owners: int, copies: int) -> dict[str, Tensor]:
    """The same over this world: parameters over all ranks or over each of `copies` replicas,
    experts over ep on dim 0 and the rest on dim 1, tables over owners and then their replicas."""
    world = dist.get_world_size()
    if world == 1:
        return whole
    dense = init_device_mesh("cpu", (copies, world // copies))
    experts = init_device_mesh("cpu", (world // ep, ep))
    tables = init_device_mesh("cpu", (owners, world // owners))
    ways = {
        "matrix": (dense, (Replicate(), Shard(0))),
        "experts": (experts, (Shard(1), Shard(0))),
        "table": (tables, (Shard(0), Shard(0))),
        "short table": (tables, (Shard(0), Shard(0))),
        "row steps": (tables, (Shard(0), Shard(0))),
    }
    return {
        name: distribute_tensor(tensor, *ways[name]) if name in ways else tensor.clone()
        for name, tensor in whole.items()
    }


def opened(folder: Path, **options: int) -> Checkpoints:
    ranks = Ranks.from_process_group()
    return Checkpoints(
        folder, keep=2, attempt=1, ranks=ranks, say=lambda text: None, slice_bytes=40, **options
    )


def save_over_a_mesh(folder: Path, mesh: dict[str, int], staging: int | None) -> list[int]:
    tensors = cut(whole_tensors(), **mesh)
    for name, tensor in tensors.items():
        shard = shard_of(tensor)
        there = tuple(
            slice(o, o + n) for o, n in zip(shard.offsets, shard.local.shape, strict=True)
        )
        assert torch.equal(whole_tensors()[name][there], shard.local), name
    options = {} if staging is None else {"staging": staging}
    checkpoints = opened(folder, **options)
    checkpoints.save(tensors, STATE, wait=staging is None)
    for tensor in tensors.values():  # the next update
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(77)
    total = torch.ones(1)
    for _ in range(50):  # training's collectives, while the thread does its own
        dist.all_reduce(total)
        total /= dist.get_world_size()
    assert total == 1
    checkpoints.settle(wait=True)
    return [shard_of(tensor).local.nbytes for tensor in tensors.values()]


def load_over_a_mesh(folder: Path, mesh: dict[str, int]) -> None:
    empty = {name: torch.full_like(tensor, 99) for name, tensor in whole_tensors().items()}
    tensors = cut(empty, **mesh)
    checkpoints = opened(folder)
    newest = checkpoints.newest()
    assert newest is not None and checkpoints.load(newest, tensors) == STATE
    for name, expected in whole_tensors().items():
        tensor = tensors[name]
        got = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(got, expected), name


@pytest.mark.parametrize(
    ("mesh", "staging"),
    [
        pytest.param({"ep": 2, "owners": 4, "copies": 1}, None, marks=pytest.mark.slow),
        ({"ep": 4, "owners": 2, "copies": 2}, 100),
        ({"ep": 1, "owners": 1, "copies": 2}, 1 << 20),
    ],
    ids=["waited for", "in the background, small buffer", "in the background"],
)
def test_what_four_ranks_saved_loads_into_any_mesh(
    ranks: Pool, tmp_path: Path, mesh: dict[str, int], staging: int | None
) -> None:
    ranks.run(4, save_over_a_mesh, tmp_path, mesh, staging)
    for world, other in [
        (1, {"ep": 1, "owners": 1, "copies": 1}),
        (2, {"ep": 2, "owners": 1, "copies": 1}),
        (3, {"ep": 1, "owners": 3, "copies": 1}),
        (4, {"ep": 2, "owners": 2, "copies": 1}),
    ]:
        ranks.run(world, load_over_a_mesh, tmp_path, other)
    folder = tmp_path / "step_00000005"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {f"__{rank}_0.distcp" for rank in range(4)} < files.keys()
    # What all ranks hold is not written by the first alone.
    sizes = [files[f"__{rank}_0.distcp"]["size"] for rank in range(4)]
    assert max(sizes) < 1.6 * sum(sizes) / 4


def save_again_and_again(folder: Path) -> list[int]:
    """How many plans were made for saves of equal, equal, more, and again equal tensors."""
    checkpoints, made = opened(folder), []
    tensors = cut(whole_tensors(), ep=1, owners=2, copies=1)
    planner: Any = DefaultSavePlanner
    plan = planner._create_global_plan

    def counted(self, plans):
        made.append(len(plans))
        return plan(self, plans)

    planner._create_global_plan = counted
    try:
        for step, more in enumerate(({}, {}, {"new": torch.ones(3)}, {"new": torch.ones(3)})):
            named = tensors | more
            for tensor in named.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
            checkpoints.save(named, TrainState(0, 2, "d", "p", step=step))
            target = {
                name: torch.zeros(tensor.shape, dtype=tensor.dtype)
                for name, tensor in named.items()
            }
            checkpoints.load(checkpoints.path(step), target)
            for name, tensor in named.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(target[name], whole), (step, name)
    finally:
        planner._create_global_plan = plan
    return made


def test_saves_that_are_cut_alike_are_planned_once(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_again_and_again, tmp_path)
    assert first == [2, 2] and second == []


def fail_on_one_rank(folder: Path, staging: int | None) -> list[str]:
    """What each rank hears of five saves of which only the first and the last succeed."""
    checkpoints = opened(folder, **({} if staging is None else {"staging": staging}))
    rank, heard = dist.get_rank(), []

    def attempt(tensors: dict[str, Tensor], step: int) -> str:
        try:
            checkpoints.save(tensors, TrainState(0, 2, "d", "p", step=step), wait=staging is None)
            while checkpoints.saving:
                dist.barrier()  # a step
                checkpoints.settle()
        except (DiskError, NotFiniteError, faults.FaultError) as error:
            return f"{type(error).__name__} {getattr(error, 'full', '')} {error}"
        return "saved"

    tensors = cut(whole_tensors(), ep=1, owners=2, copies=1)
    try:
        heard.append(attempt(tensors, 2))
        faults.arm("disk-full@save.slice,rank=1,visit=2")
        heard.append(attempt(tensors, 4))
        faults.arm("")
        if rank == 1:
            shard_of(tensors["table"]).local[0] = float("nan")
        heard.append(attempt(tensors, 6))
        if rank == 1:
            shard_of(tensors["table"]).local[0] = 0
        faults.arm("raise@save.manifest")  # where only the first rank comes
        heard.append(attempt(tensors, 7))
        faults.arm("")
        heard.append(attempt(tensors, 8))
    finally:
        faults.arm("")
    return heard


@pytest.mark.parametrize("staging", [None, 1 << 20], ids=["waited for", "in the background"])
def test_what_one_rank_cannot_write_all_ranks_hear_of(
    ranks: Pool, tmp_path: Path, staging: int | None
) -> None:
    first, second = ranks.run(2, fail_on_one_rank, tmp_path, staging)
    assert [h.split()[0] for h in first] == [h.split()[0] for h in second]
    assert first[0] == first[4] == "saved"
    assert first[1].startswith("DiskError True Rank 1: No space left while saving step 4")
    assert second[1].startswith("DiskError True No space left while saving step 4")
    assert first[2] == "NotFiniteError  Rank 1: table is not finite after step 6"
    assert second[3].startswith("FaultError  Rank 0: raise at save.manifest")
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000008"]


def save_on_own_disks(folder: Path) -> str:
    own = folder / str(dist.get_rank())
    try:
        opened(own).save(cut(whole_tensors(), ep=1, owners=2, copies=1), STATE)
    except DiskError as error:
        return str(error)
    return "saved"


def test_a_disk_that_the_ranks_do_not_share_is_noticed(ranks: Pool, tmp_path: Path) -> None:
    for text in ranks.run(2, save_on_own_disks, tmp_path):
        assert "__1_0.distcp was written by another rank" in text
        assert "must share the disk" in text
    assert os.listdir(tmp_path / "0") == []


def damage_seen(folder: Path) -> str:
    newest = opened(folder).newest()
    assert newest is not None
    return newest.name


def test_the_ranks_share_the_verification(ranks: Pool, tmp_path: Path) -> None:
    for step in (1, 2):
        alone = Checkpoints(tmp_path, keep=2, attempt=1, ranks=Ranks(), say=print, slice_bytes=40)
        alone.save(whole_tensors(), TrainState(0, 2, "d", "p", step=step))
    for file in ("trainer.json", ".metadata", "__0_0.distcp"):
        path = tmp_path / "step_00000002" / file
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert ranks.run(3, damage_seen, tmp_path) == ["step_00000001"] * 3
        (aside,) = tmp_path.glob("*.damaged-001")
        aside.rename(tmp_path / "step_00000002")
        path.write_bytes(content)
    assert ranks.run(3, damage_seen, tmp_path) == ["step_00000002"] * 3


def plan_for_a_published_table() -> tuple[int, int, int]:
    """MB that knowing the place of this rank's rows takes, the first of them, and how many."""
    rows, dim, world = 384_000_001, 256, dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    each = -(-rows // world)
    mine = min(each, rows - dist.get_rank() * each)
    table = DTensor.from_local(
        torch.empty(mine, dim, device="meta"),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size([rows, dim]),
        stride=(dim, 1),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shard = shard_of(table)
    slices = list(shard.slices(SLICE_BYTES))
    assert sum(count for _, count in slices) == mine
    assert max(count for _, count in slices) * dim * 4 <= SLICE_BYTES
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) // 1024, shard.offsets[0], mine


def test_the_place_of_many_rows_takes_no_memory(ranks: Pool) -> None:
    first, second = ranks.run(2, plan_for_a_published_table)
    assert first[1:] == (0, 192_000_001) and second[1:] == (192_000_001, 192_000_000)
    assert max(first[0], second[0]) < 50
