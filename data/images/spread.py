"""Which rank of a context group sees which image: whole images, evenly by their patches."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(grids: Tensor, *, ranks: int) -> Tensor:
    """int64 [n]: the rank of each image of grids [n, 2] (patch rows and columns).

    The largest first, each to the rank with the fewest patches so far; of equal ones the first.
    """
    load, out = [0] * ranks, torch.zeros(len(grids), dtype=torch.int64)
    sizes = grids.prod(1).tolist()
    for image in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        load[rank] += sizes[image]
        out[image] = rank
    return out
