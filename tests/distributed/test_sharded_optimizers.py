"""Optimisers on parameters that ranks divide: every mesh moves the weights as one rank does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.config import ModelConfig
from model.transformer import DeepseekV41
from tests.ranks import Ranks
from trainer.config import OptimConfig
from trainer.optim import ParameterOptimizer, build_optimizer, optimizer_tensors
from trainer.sharding import is_island

pytestmark = pytest.mark.xdist_group("ranks")

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = ModelConfig.from_released(json.loads((GOLDEN / "tiny_image/config.json").read_text()))
OPTIM = OptimConfig(
    name="pretrain",
    lr=1e-2,
    warmup_steps=0,
    hold_steps=0,
    decay_steps=0,
    final_lr=0.0,
    beta1=0.9,
    beta2=0.95,
    eps=1e-20,
    weight_decay=0.1,
    table_lr_multiplier=5.0,
)
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


def placed(full: Tensor, mesh, placements) -> Tensor:
    from torch.distributed.tensor import DTensor

    part = full
    for dim, place in enumerate(placements):
        if place.is_shard():
            chunks = part.chunk(mesh.size(dim), place.dim)
            rank = mesh.get_local_rank(dim)
            empty = part.narrow(place.dim, 0, 0)
            part = chunks[rank] if rank < len(chunks) else empty
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def placer(layout: Layout):
    """(name, whole tensor) -> the parameter or gradient as a rank of the layout has it."""
    if layout.world == 1:
        return lambda name, full: full.clone()
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    ranks = torch.arange(layout.world)
    shards = layout.shard * layout.ep
    dense = DeviceMesh("cpu", ranks.view(layout.replicate, shards))
    experts = DeviceMesh("cpu", ranks.view(layout.replicate, layout.shard, layout.ep))

    def place(name: str, full: Tensor) -> Tensor:
        if is_island(name):
            return full.clone()
        if re.search(r"\.experts\.", name):
            return placed(full, experts, (Replicate(), Shard(1), Shard(0)))
        return placed(full, dense, (Replicate(), Shard(0)))

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


def everything(model: nn.Module, optimizer: ParameterOptimizer) -> dict[str, Tensor]:
    found = dict(model.named_parameters()) | optimizer_tensors(optimizer)
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    return {name: tensor.detach() for name, tensor in whole.items()}


def on_ranks(layout: Layout, optim: OptimConfig) -> tuple[dict[str, Tensor], str]:
    """What rank 0 finds, and what tells whether the others find the same."""
    model, optimizer = trained(layout, optim)
    for name, parameter in model.named_parameters():
        for key, state in optimizer.state[parameter].items():
            if key != "step":
                assert getattr(state, "placements", None) == getattr(
                    parameter, "placements", None
                ), name
    found = everything(model, optimizer)
    digest = hashlib.sha256()
    for tensor in found.values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found if dist.get_rank() == 0 else {}, digest.hexdigest()


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    return {
        name: everything(*trained(Layout(), dataclasses.replace(OPTIM, name=name)))
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
    results = ranks.run(layout.world, on_ranks, layout, dataclasses.replace(OPTIM, name=name))
    assert len({digest for _, digest in results}) == 1
    found, expected = results[0][0], alone[name]
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        error = (found[key] - tensor).norm() / tensor.norm().clamp_min(1e-30)
        assert error <= 1e-6, key
