"""The model over several ranks: FSDP2, fp32 islands, and gradients that are sums.

Numerically sensitive parameters (the hyper-connections, attention sinks, compressor projections,
norms of the image tower) are fp32 islands: every rank holds them whole, and their gradients are
summed in one flat tensor. Everything else is sharded by layer and gathered in the model's type. The
head is a group of its own in fp32, and so is the embedding, whose gradient would saturate where
many rows add up in bfloat16.
"""

from __future__ import annotations

import torch
from torch import nn

from model.block import Block
from model.parallel.mesh import Mesh, build_mesh
from model.precision import is_fp32
from model.transformer import DeepseekV41
from trainer.config import ParallelConfig
from trainer.ranks import Ranks, is_sharded


def mesh_of(parallel: ParallelConfig) -> Mesh:
    """The mesh that a configuration names, over the default process group if it has several ranks;
    all ranks call it together."""
    return build_mesh(
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        cp=parallel.cp,
        ep=parallel.ep,
        engram_owners=parallel.owners,
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
    from torch.distributed.tensor import Shard

    islands = {p for name, p in model.named_parameters() if is_island(name)}

    def policy(kind: torch.dtype) -> MixedPrecisionPolicy:
        # By default inputs are cast too: that would round the fp32 pre-mix and Engram values.
        return MixedPrecisionPolicy(
            param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    dense = {"mesh": mesh.meshes.dense, "mp_policy": policy(dtype), "ignored_params": islands}
    for layer in model.layers:
        assert isinstance(layer, Block)
        _divide_experts(layer.ffn.experts, mesh)
        fully_shard(
            layer.ffn.experts,
            mesh=mesh.meshes.experts,
            mp_policy=policy(dtype),
            shard_placement_fn=lambda parameter: Shard(1),
        )
    for layer in [*model.layers, *(model.vision.blocks if model.vision else [])]:
        fully_shard(layer, **dense)
    for module in (model.embed, model.head):
        fully_shard(module, mesh=mesh.meshes.dense, mp_policy=policy(torch.float32))
    fully_shard(model, **dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it the factor becomes a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def _divide_experts(experts: nn.Module, mesh: Mesh) -> None:
    """Leave each rank of an ep group its experts, as DTensors of the whole."""
    if mesh.ep.size == 1:
        return
    from torch.distributed.tensor import DTensor, Shard

    assert mesh.meshes is not None
    for name, whole in list(experts.named_parameters()):
        mine = whole.detach().chunk(mesh.ep.size)[mesh.ep.rank].clone()
        divided = DTensor.from_local(mine, mesh.meshes.ep, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(divided))


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
