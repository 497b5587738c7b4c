"""Which part of a tensor this rank holds."""

from __future__ import annotations

from torch import Tensor


def held_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(what this rank holds of `tensor`, the index in the whole at which it begins).

    A tensor that is not divided is held whole. What is held shares memory with `tensor`; it may be
    empty, where a dimension has no share for this rank.
    """
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), (0,) * tensor.ndim
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(shape), (tensor.placements, local.shape, shape)
    return local, tuple(offset)
