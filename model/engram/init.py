"""Initial table rows as a function of seed, layer and row id alone."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, SplitMix64's increment
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def initial_rows(ids: Tensor, dim: int, *, layer: int, seed: int, std: float) -> Tensor:
    """Normal values of deviation `std`, fp32 [n, dim], for row ids [n] int64.

    A counter-based generator: each element hashes (seed, layer, id, column) with SplitMix64 and
    turns two such numbers into one normal value by Box and Muller. So rows come out the same on any
    process, in any order, one at a time or all at once.
    """
    start = _mixed(torch.tensor([seed], dtype=torch.int64, device=ids.device))
    start = _mixed(start ^ (layer * 2 + 1))
    counter = ids[:, None] * dim + torch.arange(dim, device=ids.device)
    first = _mixed(start + counter * 2 * _GOLDEN)
    second = _mixed(start + (counter * 2 + 1) * _GOLDEN)
    radius = torch.sqrt(-2 * torch.log1p(-_unit(first)))
    return (radius * torch.cos(_unit(second) * (2 * torch.pi)) * std).float()


def initial_table(rows: int, dim: int, *, layer: int, seed: int, std: float) -> Tensor:
    """`initial_rows` of all row ids in turn, some at a time: the hash needs ten times the room."""
    table = torch.empty(rows, dim)
    for low in range(0, rows, CHUNK):
        ids = torch.arange(low, min(low + CHUNK, rows))
        table[low : low + CHUNK] = initial_rows(ids, dim, layer=layer, seed=seed, std=std)
    return table


def _unit(bits: Tensor) -> Tensor:
    """Upper 53 bits as a double in [0, 1)."""
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64, whose products wrap as the unsigned ones do."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift: the sign bit must not be copied."""
    return (x >> by) & ((1 << (64 - by)) - 1)
