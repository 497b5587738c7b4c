"""The model over several ranks: FSDP2, fp32 islands, and gradients that are sums.

Numerically sensitive parameters (the hyper-connections, attention sinks, compressor projections,
norms of the image tower) are fp32 islands: every rank holds them whole, and their gradients are
summed in one flat tensor. Everything else is sharded by layer and gathered in the model's type. The
head is a group of its own in fp32, and so is the embedding, whose gradient would saturate where
many rows add up in bfloat16.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import nn

from model.precision import is_fp32
from model.transformer import DeepseekV41
from trainer.config import ParallelConfig
from trainer.ranks import Ranks, is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_EXPERT = re.compile(r"\.ffn\.experts\.(w13|w2)$")


def shard_model(model: DeepseekV41, parallel: ParallelConfig, *, dtype: torch.dtype) -> None:
    """Shard `model` in place over the default process group: dp_shard ranks hold one copy.

    The model is whole and equal on all ranks. dtype: what matrices are gathered in. Gradients come
    out as sums over all ranks: the loss carries the step's label count, so nothing is divided.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    mesh = _mesh(parallel)
    islands = {p for name, p in model.named_parameters() if is_island(name)}
    experts = {p for name, p in model.named_parameters() if _EXPERT.search(name)}

    def policy(kind: torch.dtype) -> MixedPrecisionPolicy:
        # By default inputs are cast too: that would round the fp32 pre-mix and Engram values.
        return MixedPrecisionPolicy(
            param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    def placement(parameter: nn.Parameter) -> Shard | None:
        # Dim 0 counts experts: it belongs to expert parallelism.
        return Shard(1) if parameter in experts else None

    for layer in [*model.layers, *(model.vision.blocks if model.vision else [])]:
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy(dtype),
            shard_placement_fn=placement,
            ignored_params=islands,
        )
    for module in (model.embed, model.head):
        fully_shard(module, mesh=mesh, mp_policy=policy(torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=policy(dtype), ignored_params=islands)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it the factor becomes a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


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


def _mesh(parallel: ParallelConfig) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if parallel.dp_replicate == 1:
        return init_device_mesh(device, (parallel.dp_shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(
        device,
        (parallel.dp_replicate, parallel.dp_shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
