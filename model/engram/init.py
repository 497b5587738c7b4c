"""Initial table rows as a function of seed, layer and row id alone."""

from __future__ import annotations

from torch import Tensor

from model.random import fill_normal, stream_of_numbers


def fill_rows(out: Tensor, low: int, *, layer: int, seed: int, std: float) -> None:
    """Fill out [n, dim], fp32, with the normal values of the rows from `low` on.

    Each element is a function of (seed, layer, row id, column), see `model.random`. So rows come
    out the same on any process, in any order, one at a time or all at once.
    """
    stream = stream_of_numbers(seed, layer * 2 + 1)
    shape = (low + len(out), out.shape[1])
    fill_normal(out, shape=shape, offset=(low, 0), stream=stream, std=std)
