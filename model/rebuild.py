"""Not keeping tensors for backward that are cheap to make again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def rebuilding(make: Callable[[], Sequence[Tensor]]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Operations in this context do not keep the tensors that are named to the yielded function.

    Name a tensor before its first use (the function returns it). Backward calls `make` once, which
    must give tensors of the same bits, in the order of naming, from what is kept anyway; they are
    dropped after their last use.
    """
    shared = _Shared(make)

    def pack(kept: Tensor) -> Tensor | _Note:
        index = shared.find(kept)
        return kept if index is None else _Note(shared, index, kept.shape)

    def unpack(kept: Tensor | _Note) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.tensor()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield shared.name
    shared.named.clear()


class _Shared:
    """One context's tensors; rebuilt together, alive from a backward's first use to its last."""

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self.make, self.notes, self.pending = make, 0, 0
        self.values: Sequence[Tensor] | None = None
        # Held until the context ends: a freed tensor's address could go to another that is kept.
        self.named: list[Tensor] = []

    def name(self, tensor: Tensor) -> Tensor:
        self.named.append(tensor)
        return tensor

    def find(self, kept: Tensor) -> int | None:
        for index, tensor in enumerate(self.named):
            same = kept.data_ptr() == tensor.data_ptr() and kept.numel() == tensor.numel()
            # Not so for a transposed view, say: the rebuilt tensor would be read in another order.
            if same and kept.dtype == tensor.dtype and _plain(kept) and _plain(tensor):
                return index
        return None

    def take(self, index: int) -> Tensor:
        if self.values is None:
            with torch.no_grad():
                self.values, self.pending = self.make(), self.notes
        value, self.pending = self.values[index], self.pending - 1
        if self.pending == 0:
            self.values = None
        return value


def _plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _Note:
    def __init__(self, shared: _Shared, index: int, shape: torch.Size) -> None:
        self.shared, self.index, self.shape = shared, index, shape
        shared.notes += 1

    def tensor(self) -> Tensor:
        return self.shared.take(self.index).view(self.shape)
