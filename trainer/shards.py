"""The part of a parameter that this rank holds, and with whom it shares the rest."""

from __future__ import annotations

from torch import Tensor

from model.parallel.group import Group
from trainer.ranks import is_sharded


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank, any other tensor itself; writing into it writes the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_group(tensor: Tensor, *, dim: int) -> Group:
    """The ranks among which dimension `dim` is divided, by torch.chunk; one if it is whole here.

    Other dimensions may be divided too, over other ranks.
    """
    if not is_sharded(tensor):
        return Group()
    mesh = tensor.device_mesh
    found = [n for n, place in enumerate(tensor.placements) if place.is_shard(dim % tensor.dim())]
    assert len(found) <= 1, f"dimension {dim} of {tensor.placements} is divided twice"
    if not found or mesh.size(found[0]) == 1:
        return Group()
    return Group(mesh.get_local_rank(found[0]), mesh.size(found[0]), mesh.get_group(found[0]))
