"""One tile of attention on the CPU by a kernel: nothing larger than a query's scores exists."""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.tiles import KeyGradients, Keys, Tile
from model.kernels.library import Kernels, kernels


class FusedTile:
    """What `Tile` is, for q [Q, H, d] fp32; it keeps the queries and their outputs alone."""

    def __init__(
        self, run: Kernels, keys: Keys, q: Tensor, low: int, *, workspace_bytes: int
    ) -> None:
        self.kernels, self.keys, self.q, self.low = run, keys, q.contiguous(), low
        self.workspace_bytes = workspace_bytes
        self._output = torch.empty_like(self.q)
        self.log_sum = self.q.new_empty(*q.shape[:2], 1)
        made = self._output, self.log_sum
        self.kernels.run("attend_forward", *self._sizes(), self.q, *self._keys(), *made)

    def settle(self) -> None:
        """Nothing to do: backward makes probabilities of its own."""

    def output(self) -> Tensor:
        return self._output

    def mass(self) -> Tensor:
        far = self.keys.entries, self.keys.selected
        assert self.keys.selected is not None
        mass = self.q.new_empty(len(self.q), self.keys.selected.shape[1])
        self.kernels.run("attend_mass", *self._sizes(), self.q, *far, self.log_sum, mass)
        return mass

    def backward(self, grad: Tensor, output: Tensor, into: KeyGradients) -> Tensor:
        entries, by_q = self.keys.entries, torch.empty_like(self.q)
        count = 0 if entries is None else len(entries)
        room = 4 * self.q.shape[-1] * (count + len(self.q))  # of a thread's own sums
        sizes = *self._sizes(), count, max(1, self.workspace_bytes // room)
        given = output, self.log_sum, grad.contiguous()
        made = by_q, into.near, into.entries, into.sink
        self.kernels.run("attend_backward", *sizes, self.q, *self._keys(), *given, *made)
        return by_q

    def _sizes(self) -> tuple[int, ...]:
        chosen = 0 if self.keys.selected is None else self.keys.selected.shape[1]
        return self.low, *self.q.shape, self.keys.window, chosen

    def _keys(self) -> tuple[Tensor | None, ...]:
        keys = self.keys
        return keys.near, keys.start, keys.sink, keys.entries, keys.selected


def tile_of(
    keys: Keys, q: Tensor, low: int, log_sum: Tensor | None = None, *, workspace_bytes: int
) -> Tile | FusedTile:
    """The tile of queries q [Q, H, d] from `low` on, by the kernel where it serves; see `Tile`."""
    q = q.float()
    if run := kernels(q, keys.near, width=q.shape[-1]):
        return FusedTile(run, keys, q, low, workspace_bytes=workspace_bytes)
    return Tile(keys, q, low, log_sum)
