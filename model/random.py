"""Random values as functions of what they are for: there is no state and no order of drawing.

A stream is a 64-bit number, and each of its values is reached by a counter. So any process can make
any part of any tensor, in any order and any number of times, and it comes out the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 15  # values made at a time: small enough for a cache, and it bounds what they take
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, SplitMix64's increment
_TWICE_GOLDEN = _GOLDEN * 2 + (1 << 64)
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def stream_of(text: str) -> int:
    """The stream of this name."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def stream_of_numbers(first: int, *more: int) -> int:
    """The stream of these numbers, each of at most 63 bits, in this order."""
    x = _mix(torch.tensor([first], dtype=torch.int64))
    for number in more:
        x = _mix(x ^ number)
    return int(x)


def normal(counter: Tensor, *, stream: int, std: float) -> Tensor:
    """The normal values of deviation `std` at places `counter` (int64) of a stream, fp32.

    Each place hashes two numbers with SplitMix64, which Box and Muller's formula turns into one
    value. In double precision, so that no vector length of a processor shows after rounding. Takes
    48 bytes a value for the time of the call.
    """
    first = counter * _TWICE_GOLDEN
    first += stream
    second = first + _GOLDEN
    radius = _unit(_mix(first))
    radius.neg_().log1p_().mul_(-2).sqrt_()
    angle = _unit(_mix(second))
    angle.mul_(2 * torch.pi).cos_()
    return radius.mul_(angle).mul_(std).float()


def fill_normal(
    part: Tensor, *, shape: Sequence[int], offset: Sequence[int], stream: int, std: float
) -> None:
    """Fill `part`, the box at `offset` of a tensor of this shape, with the tensor's values.

    The value at flat index i of the whole tensor is `normal` at counter i. Little is held besides.
    """
    if part.numel() == 0:
        return
    assert part.is_contiguous()
    starts, length = _runs(part.shape, shape, offset)
    flat, device = part.view(len(starts), length), part.device
    steps = torch.arange(min(length, CHUNK), device=device)
    together = max(1, CHUNK // length)
    for row in range(0, len(starts), together):
        begin = starts[row : row + together].to(device)[:, None]
        for low in range(0, length, CHUNK):
            out = flat[row : row + together, low : low + CHUNK]
            counter = begin + low + steps[: out.shape[1]]
            out.copy_(normal(counter, stream=stream, std=std))


def _runs(part: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> tuple[Tensor, int]:
    """Where each run of neighbouring flat indices of a box begins, int64, and how long they are."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    cut = [d for d, size in enumerate(shape) if part[d] != size]
    last = cut[-1] if cut else 0
    first = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    starts = torch.tensor([first])
    for size, stride in zip(part[:last], strides[:last], strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    return starts, math.prod(part[last:])


def _unit(bits: Tensor) -> Tensor:
    """Upper 53 bits as a double in [0, 1); `bits` is overwritten."""
    bits >>= 11
    bits &= (1 << 53) - 1
    return bits.double().mul_(2.0**-53)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function in place, on int64, whose products wrap as unsigned ones do."""
    for by, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # A logical shift: the sign bit must not be copied.
        x ^= (x >> by).bitwise_and_((1 << (64 - by)) - 1)
        x *= factor
    return x
