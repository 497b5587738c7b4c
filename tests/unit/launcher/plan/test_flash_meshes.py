"""The whole released model on 64, 256 and 1,024 ranks, none of which exist.

One rank is built for real on the meta device, over a process group that only pretends: what it
holds is counted and compared with sums written out here by hand, and with `dsv41 plan`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.plan.holdings import Holdings, holdings
from launcher.run_config import RunConfig
from launcher.schema import Report, build
from model.empty import without_memory
from model.transformer import DeepseekV41
from trainer.config import ParallelConfig
from trainer.optim import build_optimizer, optimizer_tensors
from trainer.sharding import mesh_of, shard_model

Composed = Callable[..., DictConfig]

# (matrices of this shape, rows, columns) that are cut by rows over all ranks of a copy
LAYERS, SOURCES, INDEXERS, ENGRAMS, TOWER = 40, 4, 8, 2, 32
BY_ROWS = [
    (LAYERS, 5120, 1),  # attn_norm
    (LAYERS, 5120, 1),  # ffn_norm
    (LAYERS, 1280, 1),  # q_norm
    (LAYERS, 512, 1),  # kv_norm
    (LAYERS, 1280, 5120),  # wq_a
    (LAYERS, 64 * 512, 1280),  # wq_b
    (LAYERS, 512, 5120),  # wkv
    (LAYERS, 8 * 1024, 64 * 512 // 8),  # wo_a
    (LAYERS, 5120, 8 * 1024),  # wo_b
    (LAYERS, 384, 5120),  # router
    (LAYERS, 2 * 2304, 5120),  # shared expert, gate and up
    (LAYERS, 5120, 2304),  # and down
    (SOURCES, 512, 1),  # compressor norm
    (SOURCES, 128, 512),  # indexer wk
    (SOURCES, 128, 1),  # and its norm
    (INDEXERS, 32 * 128, 1280),  # indexer wq_b
    (INDEXERS, 32, 5120),  # weights_proj
    (2 * ENGRAMS, 4, 5120),  # q_weight, k_weight
    (ENGRAMS, 5 * 5120, 3 * 8 * 256),  # wkv
    (2, 129280, 5120),  # embedding and head
    (4, 5120, 1),  # last norm, three delimiters
    (1, 1024, 3 * 14 * 14),  # patches
    (1, 1024, 1),
    (1, 5120, 9 * 1024),  # aligner
    (1, 5120, 5120),
    (2, 5120, 1),
    (TOWER, 3 * 1024, 1024),  # wqkv
    (TOWER, 3 * 1024, 1),
    (TOWER, 1024, 1024),  # wo
    (TOWER, 1024, 1),
    (TOWER, 2 * 2816, 1024),  # w1
    (TOWER, 1024, 2816),  # w2
]
EXPERTS = LAYERS * 384 * 3 * 2304 * 5120
EVERYWHERE = (
    2 * LAYERS * (24 * 4 * 5120 + 24 + 3)  # hyper-connections
    + LAYERS * 64  # sinks
    + (4 + 3) * 512 * 5120  # compressors: wkv of each source, wgate of those with a ratio above 1
    + (2 * TOWER + 1) * 1024  # the tower's norms
)
ROUTER_BIASES = 2 * LAYERS * 384
TABLES = (384_006_168, 384_016_682)


def elements(shards: int, place: int) -> int:
    """Of the parameters that the rank at this place among those of a copy holds."""
    found = EVERYWHERE + EXPERTS // shards
    for count, rows, columns in BY_ROWS:
        each = (rows + shards - 1) // shards
        found += count * columns * max(0, min(each, rows - place * each))
    return found


def test_the_sums_are_those_of_the_released_model() -> None:
    assert elements(1, 0) == 552_366_072_944


@contextmanager
def pretending(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_bytes(tensors: list[Tensor]) -> int:
    parts = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def planned(plan: Holdings, name: str, rank: int) -> int:
    (found,) = [c for c in plan.classes if c.name == name]
    return int(found.bytes[rank])


CASES = [
    pytest.param(
        {"dp_shard": 64, "cp": 1, "ep": 8, "engram_owners": 64}, 63, id="64 ranks, the last"
    ),
    pytest.param(
        {"dp_replicate": 2, "dp_shard": 32, "cp": 4, "ep": 32, "engram_owners": 64},
        200,
        id="256 ranks in two copies, 64 owners",
    ),
    pytest.param(
        {"dp_shard": 128, "cp": 8, "ep": 128, "engram_owners": 512},
        1017,
        id="1,024 ranks, 512 owners",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("sizes", "rank"), CASES)
def test_a_rank_holds_its_share_and_what_the_plan_says(
    composed: Composed, sizes: dict[str, int], rank: int
) -> None:
    begin = time.process_time()  # of this process: others may be at work on the machine
    words = [f"parallel.{name}={value}" for name, value in sizes.items()]
    cfg = composed("+experiment=flash_pretrain", "data.paths=[x]", *words)
    report = Report()
    config = build(RunConfig, OmegaConf.to_container(cfg, resolve=True), report=report)
    assert not report and isinstance(config, RunConfig)
    mesh = config.parallel
    world, shards = mesh.world, mesh.dp_shard * mesh.cp
    plan = holdings(config)

    with pretending(rank, world):
        place = mesh_of(mesh)
        with without_memory():
            model = DeepseekV41(config.model, distill=True, mesh=place)
        shard_model(model, place, dtype=torch.bfloat16)
        parameters: list[Tensor] = list(model.parameters())
        assert all(p.device.type == "meta" for p in parameters)
        expected = 4 * elements(shards, rank % shards)
        assert local_bytes(parameters) == expected
        assert local_bytes(list(model.buffers())) == 4 * ROUTER_BIASES
        assert planned(plan, "parameters", rank) == expected + 4 * ROUTER_BIASES
        assert planned(plan, "gradients", rank) == expected
        optimizer = build_optimizer(model, config.optim, config.model)
        state = local_bytes(list(optimizer_tensors(optimizer).values()))
        assert planned(plan, "optimiser", rank) == state

    for r in (0, 1, rank, world - 1):
        assert planned(plan, "parameters", r) == 4 * (elements(shards, r % shards) + ROUTER_BIASES)
        assert planned(plan, "Engram rows", r) == 4 * 256 * owned_rows(mesh, r)
    every = [c for c in plan.classes if not c.estimate]
    assert {c.name for c in every} > {"parameters", "gradients", "optimiser", "Engram rows"}
    for held in every:
        assert held.bytes.max() <= 1.05 * held.bytes.mean(), held.name
    whole = np.sum([held.bytes for held in every], axis=0)
    assert whole.max() <= 1.05 * whole.mean()
    if mesh.dp_replicate == 1:
        islands = 4 * (EVERYWHERE + ROUTER_BIASES) * (world - 1)
        total = sum(int(n) for n in next(c for c in every if c.name == "parameters").bytes)
        assert total - islands == 4 * (elements(1, 0) + ROUTER_BIASES)
    assert time.process_time() - begin < 60


def owned_rows(mesh: ParallelConfig, rank: int) -> int:
    owner = rank % mesh.owners
    each = [-(-rows // mesh.owners) for rows in TABLES]
    last = owner == mesh.owners - 1
    return sum(rows - owner * n if last else n for rows, n in zip(TABLES, each, strict=True))
