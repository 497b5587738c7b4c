"""Values as functions of stream and place, against Python's own integers and mathematics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import random
from model.engram.init import fill_rows
from model.random import fill_normal, normal, stream_of, stream_of_numbers

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def value(stream: int, counter: int) -> float:
    units = [
        (mixed((stream + (2 * counter + part) * GOLDEN) & MASK) >> 11) * 2.0**-53 for part in (0, 1)
    ]
    return math.sqrt(-2 * math.log1p(-units[0])) * math.cos(2 * math.pi * units[1])


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def test_the_hash_is_splitmix64() -> None:
    values = [0, 1, 2**63, MASK, 0x123456789ABCDEF, MASK - 12345]
    found = random._mix(torch.tensor([signed(v) for v in values]))
    assert [v & MASK for v in found.tolist()] == [mixed(v) for v in values]


def test_a_stream_of_numbers_hashes_each() -> None:
    for seed, layer in ((0, 1), (5, 29), (2**62 + 1, 3)):
        assert stream_of_numbers(seed, layer) & MASK == mixed(mixed(seed) ^ layer)


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_a_value_by_hand(stream: int, counter: int) -> None:
    found = normal(torch.tensor([counter]), stream=stream, std=0.5)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(0.5 * value(stream & MASK, counter), rel=1e-6, abs=1e-9)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(shape, offset, size) of a box, perhaps empty, in a tensor of one to four dimensions."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    offset = [draw(st.integers(0, n)) for n in shape]
    return shape, offset, [draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]


@settings(deadline=None)
@given(boxes(), st.integers(1, 40))
def test_any_part_of_a_tensor_is_that_part_of_the_whole(
    box: tuple[list[int], list[int], list[int]], chunk: int
) -> None:
    shape, offset, size = box
    whole = normal(torch.arange(math.prod(shape)), stream=7, std=1.0).view(shape)
    part = torch.full(size, float("nan"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "CHUNK", chunk)
        fill_normal(part, shape=shape, offset=offset, stream=7, std=1.0)
    held = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
    assert torch.equal(part, whole[held])


def test_a_part_is_rounded_to_its_own_type() -> None:
    wide, narrow = torch.empty(300), torch.empty(300, dtype=torch.bfloat16)
    for part in (wide, narrow):
        fill_normal(part, shape=(300,), offset=(0,), stream=1, std=1.0)
    assert torch.equal(wide.bfloat16(), narrow)


def test_streams_of_names_differ() -> None:
    counter = torch.arange(50_000)
    one, two = (normal(counter, stream=stream_of(f"{n}/a"), std=1.0).double() for n in (1, 2))
    assert abs(float((one * two).mean())) < 0.02
    assert abs(float(one.mean())) < 0.02 and abs(float(one.std()) - 1) < 0.01


def test_a_part_of_a_tensor_too_large_to_exist() -> None:
    """The last rows of a table of 2^37 values, whose flat indices no 32 bits hold."""
    part = torch.empty(2, 256)
    fill_normal(part, shape=(2**29, 256), offset=(2**29 - 2, 0), stream=3, std=1.0)
    assert float(part[1, 255]) == pytest.approx(value(3, 2**37 - 1), rel=1e-6)


def test_a_row_of_a_table_by_hand() -> None:
    """The last of the released model's largest table."""
    row, seed, layer = 384_016_681, 5, 14
    out = torch.empty(1, 256)
    fill_rows(out, row, layer=layer, seed=seed, std=0.02)
    stream = mixed(mixed(seed) ^ (2 * layer + 1))
    expected = [0.02 * value(stream, row * 256 + column) for column in range(256)]
    assert out[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
