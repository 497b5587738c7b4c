"""Initial table rows as a function of seed, layer and row id alone."""

from __future__ import annotations

import torch
from torch import Tensor

from model.random import CHUNK, normal, stream_of_numbers


def initial_rows(ids: Tensor, dim: int, *, layer: int, seed: int, std: float) -> Tensor:
    """Normal values of deviation `std`, fp32 [n, dim], for row ids [n] int64.

    Each element is a function of (seed, layer, id, column), see `model.random`. So rows come out
    the same on any process, in any order, one at a time or all at once.
    """
    counter = ids[:, None] * dim + torch.arange(dim, device=ids.device)
    return normal(counter, stream=stream_of_numbers(seed, layer * 2 + 1), std=std)


def initial_table(rows: int, dim: int, *, layer: int, seed: int, std: float) -> Tensor:
    """`initial_rows` of all row ids in turn."""
    table = torch.empty(rows, dim)
    fill_rows(table, 0, layer=layer, seed=seed, std=std)
    return table


def fill_rows(out: Tensor, low: int, *, layer: int, seed: int, std: float) -> None:
    """`initial_rows` of row ids from `low` on into out [n, dim], some at a time: the hash needs ten
    times the room."""
    step = max(1, CHUNK // out.shape[1])
    for first in range(0, len(out), step):
        here = out[first : first + step]
        ids = torch.arange(low + first, low + first + len(here))
        here.copy_(initial_rows(ids, out.shape[1], layer=layer, seed=seed, std=std))
