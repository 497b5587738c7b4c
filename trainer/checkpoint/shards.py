"""The part of each tensor that this rank holds, as checkpoints write and read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.ranks import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """`local`: this rank's part, plain. `offsets`: where it begins in the whole tensor of `size`,
    which may be its end when the part is empty. `holders`: how many parts the whole is cut into."""

    local: Tensor
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    holders: int = 1

    def slices(self, most: int) -> Iterator[tuple[int, int]]:
        """(first row, rows) in dim 0 of the part, together all of it, each of `most` bytes or one
        row. A rank without a share has none."""
        rows = self.local.shape[0] if self.local.dim() else 1
        if 0 in self.local.shape and 0 not in self.size:
            return
        step = rows
        if self.local.nbytes > most:
            step = max(1, most * rows // self.local.nbytes)
        for first in range(0, max(rows, 1), max(step, 1)):
            yield first, min(step, rows - first)


def shards_of(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """This rank's part of each tensor, by name."""
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


def shard_of(tensor: Tensor) -> Shard:
    """This rank's part of `tensor`; all of it when it is not sharded."""
    if is_sharded(tensor):
        return _of_dtensor(tensor)
    size = tuple(tensor.shape)
    return Shard(tensor.detach(), (0,) * len(size), size)


def _of_dtensor(tensor: DTensor) -> Shard:
    """Where a DTensor's part lies is worked out here: torch's own function makes an index of all
    its rows, and of a large table that takes gigabytes."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert here is not None, "every rank is in every mesh"
    size, holders = tuple(tensor.shape), 1
    offsets, left = [0] * len(size), list(size)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        assert type(placement) is Sharded, placement
        dim, parts = placement.dim, mesh.size(axis)
        each = -(-left[dim] // parts)
        low = min(here[axis] * each, left[dim])
        offsets[dim] += low
        left[dim] = min(each, left[dim] - low)
        holders *= parts
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(left), (local.shape, left)
    return Shard(local, tuple(offsets), size, holders)
