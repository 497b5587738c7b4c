"""The model over several ranks: FSDP2, fp32 islands, and gradients that are sums.

Numerically sensitive parameters (the hyper-connections, attention sinks, compressor projections,
norms of the image tower) are fp32 islands: every rank holds them whole, and their gradients are
summed in one flat tensor. Everything else is sharded by layer and gathered in the model's type. The
head is a group of its own in fp32, and so is the embedding, whose gradient would saturate where
many rows add up in bfloat16.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from model.block import Block
from model.parallel.mesh import Mesh, build_mesh
from model.precision import is_fp32
from model.transformer import DeepseekV41
from trainer.config import ParallelConfig
from trainer.device import CPU
from trainer.ranks import Ranks, is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.tensor import Shard


def mesh_of(
    parallel: ParallelConfig, *, device: torch.device = CPU, tables: torch.device = CPU
) -> Mesh:
    """The mesh that a configuration names, over the default process group if it has several ranks;
    all ranks call it together. device, tables: where they hold parameters and Engram tables."""
    return build_mesh(
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        cp=parallel.cp,
        ep=parallel.ep,
        engram_owners=parallel.owners,
        device=device.type,
        tables=tables.type,
    )


def shard_model(model: DeepseekV41, mesh: Mesh, *, dtype: torch.dtype) -> None:
    """Shard `model` in place over `mesh`; a world of one changes nothing.

    The model is whole and equal on all ranks, or has no memory (meta). dtype: what matrices are
    gathered in. Gradients come out as sums over all ranks: the loss carries the step's label count,
    so nothing is divided.
    """
    if mesh.meshes is None:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # A layer that hands on what another published returns its own argument: nobody changes it.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    islands = {p for name, p in model.named_parameters() if is_island(name)}

    def policy(kind: torch.dtype) -> MixedPrecisionPolicy:
        # By default inputs are cast too: that would round the fp32 pre-mix and Engram values.
        return MixedPrecisionPolicy(
            param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    dense = {"mesh": mesh.meshes.dense, "mp_policy": policy(dtype), "ignored_params": islands}
    experts = _expert_placement(mesh)
    for layer in model.layers:
        assert isinstance(layer, Block)
        own = _divided(layer.ffn.experts, mesh)
        # In the layer's own call, not a call of its own: what is run again in backward must find
        # the parameters that the layer was called with.
        fully_shard(layer, shard_placement_fn=dict.fromkeys(own, experts).get, **dense)
    for block in model.vision.blocks if model.vision else []:
        fully_shard(block, **dense)
    for module in (model.embed, model.head):
        fully_shard(module, mesh=mesh.meshes.dense, mp_policy=policy(torch.float32))
    fully_shard(model, **dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it the factor becomes a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def _divided(experts: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """Leave each rank of an ep group its experts, as DTensors of the whole; the parameters."""
    if mesh.ep.size == 1:
        return list(experts.parameters())
    from torch.distributed.tensor import DTensor, Shard

    assert mesh.meshes is not None
    for name, whole in list(experts.named_parameters()):
        mine = whole.detach().chunk(mesh.ep.size)[mesh.ep.rank].clone()
        divided = DTensor.from_local(mine, mesh.meshes.ep, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(divided))
    return list(experts.parameters())


def _expert_placement(mesh: Mesh) -> Shard | ShardPlacementResult:
    """Dim 1 over the ranks that ep leaves: dim 0 counts experts."""
    from torch.distributed.tensor import Shard

    if mesh.ep.size == 1:
        return Shard(1)
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    assert mesh.meshes is not None
    over = mesh.meshes.experts
    if over.ndim == 1:
        return ShardPlacementResult(Shard(1), FSDPMeshInfo(over, shard_mesh_dim=0))
    return ShardPlacementResult(
        Shard(1), HSDPMeshInfo(over, shard_mesh_dim=1, replicate_mesh_dim=0)
    )


def is_island(name: str) -> bool:
    """Whether the parameter of this name stays whole and fp32 on every rank."""
    return is_fp32(name) and name != "head.weight"


def reduce_islands(model: nn.Module, ranks: Ranks) -> None:
    """Sum the gradients of unsharded parameters over the ranks, all in one fp32 all-reduce."""
    if ranks.world == 1:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None and not is_sharded(p.grad)]
    flat = ranks.all_reduce_sum(torch.cat([grad.flatten().float() for grad in grads]))
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
