"""Context parallelism: each rank of a group has a stretch of columns of every row."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from model.parallel.group import Group


@dataclass(frozen=True)
class Columns:
    """The columns of B rows that this rank has: of as many equal stretches as the group has ranks,
    the one of its number. The default, one stretch, is all tokens of all rows laid end to end.

    Per-token tensors of a rank are [stretches * n, ...]: its n columns of one row, then the next.
    """

    group: Group = field(default_factory=Group)
    stretches: int = 1  # B, where rows are divided

    @property
    def divided(self) -> bool:
        return self.group.size > 1

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor over all tokens of all rows, [B * S, ...]."""
        if not self.divided:
            return whole
        by_rank = whole.unflatten(0, (self.stretches, self.group.size, -1))
        return by_rank[:, self.group.rank].flatten(0, 1)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The stretches of a per-token tensor, views; one alone is the tensor itself."""
        if self.stretches == 1:
            return (x,)
        return x.split(x.shape[0] // self.stretches)
