"""Optimisers on parameters that ranks divide: every mesh moves the weights as one rank does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.parallel.group import Group
from model.parallel.mesh import build_mesh
from model.transformer import DeepseekV41
from tests.builders import optim_config
from tests.ranks import Ranks
from trainer import muon
from trainer.config import OptimConfig
from trainer.gradients import Gradient, clip, gradient_norm, parameter_gradients
from trainer.optim import ParameterOptimizer, build_optimizer, optimizer_tensors
from trainer.ranks import Ranks as TrainerRanks
from trainer.sharding import is_island
from trainer.shards import local_part
from trainer.table_optim import build_table_optimizer

pytestmark = pytest.mark.xdist_group("ranks")

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = ModelConfig.from_released(json.loads((GOLDEN / "tiny_image/config.json").read_text()))
OPTIM = optim_config(name="pretrain", eps=1e-20)
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """replicate copies over shard * ep ranks each; ep divides the experts, shard their rows."""

    replicate: int = 1
    shard: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.ep


def values(name: str, like: Tensor) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def chunk(full: Tensor, count: int, place: int, dim: int) -> Tensor:
    """What torch.chunk gives a place, which may be nothing."""
    chunks = full.chunk(count, dim)
    return chunks[place] if place < len(chunks) else full.narrow(dim, 0, 0)


def part(name: str, full: Tensor, layout: Layout, rank: int) -> Tensor:
    """What a rank of the layout holds of a tensor, which belongs to the parameter of this name."""
    if full.dim() == 0 or is_island(name):
        return full
    place = rank % (layout.shard * layout.ep)
    if ".experts." in name:
        shard, own = divmod(place, layout.ep)
        return chunk(chunk(full, layout.ep, own, 0), layout.shard, shard, 1)
    return chunk(full, layout.shard * layout.ep, place, 0)


def placer(layout: Layout):
    """(name, whole tensor) -> the parameter or gradient as a rank of the layout has it."""
    if layout.world == 1:
        return lambda name, full: full.clone()
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ranks = torch.arange(layout.world)
    shards = layout.shard * layout.ep
    dense = DeviceMesh("cpu", ranks.view(layout.replicate, shards))
    experts = DeviceMesh("cpu", ranks.view(layout.replicate, layout.shard, layout.ep))

    def place(name: str, full: Tensor) -> Tensor:
        own = part(name, full, layout, dist.get_rank()).clone()
        if is_island(name):
            return own
        expert = ".experts." in name
        return DTensor.from_local(
            own,
            experts if expert else dense,
            (Replicate(), Shard(1), Shard(0)) if expert else (Replicate(), Shard(0)),
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    return place


def trained(layout: Layout, optim: OptimConfig) -> tuple[nn.Module, ParameterOptimizer]:
    """The smallest model after some steps on made-up gradients; no image in the first step."""
    place = placer(layout)
    with torch.device("meta"):
        model = DeepseekV41(MODEL, distill=True)
    for name, parameter in list(model.named_parameters()):
        path, _, own = name.rpartition(".")
        whole = 0.02 * values(name, parameter)
        setattr(model.get_submodule(path), own, nn.Parameter(place(name, whole)))
    optimizer = build_optimizer(model, optim, MODEL)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            if step > 0 or not name.startswith(("vision", "aligner")):
                parameter.grad = place(name, values(f"{name} {step}", parameter))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def held(layout: Layout, optim: OptimConfig) -> dict[str, Tensor]:
    """Parameters and optimiser state as this rank holds them, by name."""
    model, optimizer = trained(layout, optim)
    for name, parameter in model.named_parameters():
        for key, state in optimizer.state[parameter].items():
            placements = getattr(parameter, "placements", None)
            assert key == "step" or getattr(state, "placements", None) == placements, name
    found = dict(model.named_parameters()) | optimizer_tensors(optimizer)
    return {name: local_part(tensor.detach()) for name, tensor in found.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    return {
        name: held(Layout(), dataclasses.replace(OPTIM, name=name))
        for name in ("pretrain", "adamw")
    }


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("pretrain", Layout(shard=2)),
        ("pretrain", Layout(shard=3)),
        ("pretrain", Layout(replicate=2, ep=2)),
        ("pretrain", Layout(shard=2, ep=2)),
        ("adamw", Layout(shard=2, ep=2)),
    ],
    ids=str,
)
def test_every_mesh_steps_like_one_rank(ranks: Ranks, alone, name, layout) -> None:
    found = ranks.run(layout.world, held, layout, dataclasses.replace(OPTIM, name=name))
    shards = layout.shard * layout.ep
    for rank, mine in enumerate(found):
        assert mine.keys() == alone[name].keys()
        for key, whole in alone[name].items():
            expected = part(key.split("/")[0], whole, layout, rank)
            error = (mine[key] - expected).norm() / whole.norm().clamp_min(1e-30)
            assert error <= 1e-6, (rank, key)
            twin = 0 if is_island(key.split("/")[0]) else rank % shards
            assert torch.equal(mine[key], found[twin][key]), (rank, key)


def travel(blocks: tuple[int, ...]) -> tuple[list[int], int]:
    """(how many matrices this rank orthogonalises at a time, rows that it sends) of five [6, 4]
    over two ranks."""
    place = placer(Layout(shard=2))
    named = [(str(n), nn.Parameter(place("w", torch.randn(6, 4)))) for n in range(5)]
    for name, weight in named:
        weight.grad = place("w", values(name, weight))
    batches, rows = [], []
    orthogonalised, send_rows = muon.orthogonalised, Group.all_to_all_rows

    def counting(matrices: Tensor) -> Tensor:
        batches.append(len(matrices))
        return orthogonalised(matrices)

    def sending(self: Group, tensor: Tensor, *, send, receive) -> Tensor:
        rows.append(sum(send) - send[self.rank])
        return send_rows(self, tensor, send=send, receive=receive)

    with (
        mock.patch.object(muon, "orthogonalised", counting),
        mock.patch.object(Group, "all_to_all_rows", sending),
        mock.patch.object(muon, "BATCH_BYTES", 2 * 4 * 6 * 4),
    ):
        muon.Muon(named, [blocks] * len(named), lr=0.1).step()
    return batches, sum(rows)


def test_whole_matrices_are_shared_out_and_heads_in_a_shard_stay(ranks: Ranks) -> None:
    # Four matrices at a time, two a rank; every rank sends its half of what is not its own, and
    # gets that back.
    assert ranks.run(2, travel, (6,)) == [([2, 1], 6 + 9), ([2, 0], 9 + 6)]
    # A head of three rows is whole on one rank; four of them fit a batch.
    assert ranks.run(2, travel, (3, 3)) == [([4, 1], 0)] * 2


def norms(layout: Layout, bad: float | None) -> tuple[float, float, float]:
    """(norm, norm again once clipped to 1, what the tables' rows alone have) of made-up gradients
    of the model and of a table of 11 rows that the ranks divide; `bad`: in a row of the last."""
    place = placer(layout)
    with torch.device("meta"):
        model = DeepseekV41(MODEL)
    found: list[Gradient] = []
    group = TrainerRanks.from_process_group()
    for name, parameter in model.named_parameters():
        empty = nn.Parameter(place(name, torch.zeros(parameter.shape)))
        empty.grad = place(name, values(name, parameter))
        found += parameter_gradients([empty], group)
    table = torch.randn(11, 4, generator=torch.Generator().manual_seed(0)) * 100
    share = -(-11 // layout.world)
    mine = table[group.rank * share :][:share].clone()
    if bad is not None and group.rank == layout.world - 1:
        mine[0, 0] = bad
    rows = Gradient(mine)
    norm = gradient_norm([*found, rows], group)
    clip([*found, rows], norm=norm, limit=1.0)
    return norm, gradient_norm([*found, rows], group), gradient_norm([rows], group)


@pytest.mark.parametrize(
    "layout", [Layout(shard=3), Layout(replicate=2, ep=2), Layout(shard=2, ep=2)], ids=str
)
def test_the_norm_counts_every_element_once(ranks: Ranks, layout: Layout) -> None:
    (whole,) = {norms(Layout(), None)}
    for found in ranks.run(layout.world, norms, layout, None):
        assert found == pytest.approx(whole, rel=1e-6)
    assert whole[1] == pytest.approx(1.0, rel=1e-5)
    for bad in (math.nan, math.inf):
        told = ranks.run(layout.world, norms, layout, bad)
        assert not any(math.isfinite(norm) for norm, _, _ in told)


TABLE_OPTIM = {
    rule: dataclasses.replace(OPTIM, eps=1e-6, tables=rule)
    for rule in ("sinkhorn", "sparse_adam", "rowwise_adagrad")
}


def learn_tables(sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Tables and their state, whole, after some steps by each rule."""
    mesh = build_mesh(**sizes)
    found = {}
    for rule, optim in TABLE_OPTIM.items():
        store = OwnerStore(MODEL, seed=3, mesh=mesh)
        optimizer = build_table_optimizer(store, optim)
        assert optimizer is not None
        for step in range(STEPS):
            ids, grads = [], []
            for table, count in zip(store.primary, store.rows, strict=True):
                random = torch.Generator().manual_seed(100 * table.layer + step)
                rows = torch.randperm(count, generator=random)[: count // 3].sort().values
                grad = torch.randn(len(rows), MODEL.engram_head_dim, generator=random)
                own = (rows >= table.low) & (rows < table.low + len(table.weight))
                ids.append(rows[own] - table.low)
                grads.append(grad[own])
            optimizer.step(ids, grads, lr=1e-2)
        for index, table in enumerate(store.primary):
            found[f"{rule} {table.layer}"] = store.as_global(index, table.weight)
        found |= {f"{rule} {name}": tensor for name, tensor in optimizer.tensors().items()}
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 3, "engram_owners": 3},
        {"dp_replicate": 2, "dp_shard": 2, "engram_owners": 2},
        {"dp_shard": 2, "engram_owners": 1},
    ],
    ids=str,
)
def test_tables_learn_as_on_one_rank(ranks: Ranks, sizes: dict[str, int]) -> None:
    expected = learn_tables({})
    world = sizes.get("dp_replicate", 1) * sizes["dp_shard"]
    first, *others = ranks.run(world, learn_tables, sizes)
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (first[name] - tensor).double().norm()
        assert error <= 1e-6 * tensor.double().norm(), name
        assert all(torch.equal(other[name], first[name]) for other in others)
