"""The collectives of the trainer, all of them, behind one small class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether this is a DTensor, without the second and the 40 MB that importing its class costs
    a run of one rank, which has none."""
    return hasattr(tensor, "to_local")


@dataclass(frozen=True)
class Ranks:
    """This rank among `world`; every method is a no-op for one rank, without a process group.

    With more ranks the default process group must exist, and every rank must make the same calls
    in the same order. group: that of all ranks which is used; None = the default one.
    """

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def from_process_group(cls) -> Ranks:
        """The ranks of the default process group; a single rank when there is none."""
        if not dist.is_initialized():
            return cls()
        return cls(rank=dist.get_rank(), world=dist.get_world_size())

    def apart(self) -> Ranks:
        """The same ranks with a process group of their own on the CPU, for another thread: its
        calls do not mix with ours. All ranks call this together."""
        return self if self.world == 1 else replace(self, group=dist.new_group(backend="gloo"))

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes shared files and speaks."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over the ranks, in place; returns it."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: the same answer on every rank."""
        return bool(self.largest(int(flag)))

    def largest(self, number: int) -> int:
        """The largest number that any rank has, on every rank."""
        if self.world == 1:
            return number
        votes = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        return int(votes.item())

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world > 1:
            dist.barrier(group=self.group)

    def from_first(self, value: T) -> T:
        """Rank 0's value (anything that pickles), on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's value (anything that pickles), in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)
