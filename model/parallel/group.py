"""Some ranks that work on one thing together, and what they say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """This rank among `size` ranks, numbered in the order of their global ranks.

    A group of one has no process group and every method is a no-op. In a larger one every member
    must make the same calls in the same order. No gradient passes through any of them.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over the members, in place; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, ...]: every member's tensor, all of one shape, in their order."""
        if self.size == 1:
            return tensor[None]
        out = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(out.unbind()), tensor.contiguous(), group=self.process_group)
        return out

    def reduce_scatter_sum(self, tensor: Tensor) -> Tensor:
        """tensor [size, ...]: the sum over the members of what each holds at this rank's place."""
        if self.size == 1:
            return tensor[0]
        out = torch.empty_like(tensor[0])
        dist.reduce_scatter(out, list(tensor.contiguous().unbind()), group=self.process_group)
        return out

    def all_to_all_rows(
        self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        """Rows of `tensor` to the members: the first send[0] to member 0, and so on.

        Returns the rows received, sum(receive) of them, in the members' order.
        """
        if self.size == 1:
            return tensor
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        dist.all_to_all_single(
            out, tensor.contiguous(), list(receive), list(send), group=self.process_group
        )
        return out

    def any(self, flag: bool) -> bool:
        """Whether any member says so: the same answer on all."""
        if self.size == 1:
            return flag
        votes = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.process_group)
        return bool(votes.item())
