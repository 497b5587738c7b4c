"""Exact top-k with a rule for ties: the lower position wins."""

from __future__ import annotations

import torch
from torch import Tensor


def ordered(scores: Tensor, position: Tensor) -> Tensor:
    """int64 keys that order like (score, then lower position first); -inf scores sort last.

    scores [..., n] of any float type, without NaN; position broadcastable to it, int64 in
    [0, 2^31). All keys of a row differ when its positions do, so a plain top-k over them is exact.
    """
    # Adding 0.0 turns -0.0 into 0.0: equal scores must have equal bits.
    bits = (scores.float() + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.long() << 32) | (0x7FFFFFFF - position)


def positions_of(keys: Tensor) -> Tensor:
    """The positions inside keys made by `ordered`."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


def chosen_positions(scores: Tensor, position: Tensor, k: int) -> Tensor:
    """The k best positions of each row by score: int64 [..., k], ascending, -1 where absent.

    Entries at -inf are never chosen. Ties keep the lower position; the released code leaves them
    open.
    """
    count = min(k, scores.shape[-1])
    keys = ordered(scores, position).topk(count, dim=-1, sorted=False).values
    dead = ordered(keys.new_full((), -torch.inf, dtype=torch.float32), keys.new_zeros(()))
    absent = torch.iinfo(torch.int64).max
    found = torch.where(keys > dead, positions_of(keys), absent).sort(dim=-1).values
    found = found.masked_fill_(found == absent, -1)
    return torch.nn.functional.pad(found, (0, k - count), value=-1)
