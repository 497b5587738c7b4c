"""Engram tables divided over ranks: each reads and learns what one rank alone would."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.parallel.mesh import build_mesh

pytestmark = pytest.mark.xdist_group("ranks")

GOLDEN = Path(__file__).parents[1] / "golden"
MICRO_BATCHES = 3


def config_of(rows: tuple[int, int]) -> ModelConfig:
    released = json.loads((GOLDEN / "tiny_text/config.json").read_text())
    return dataclasses.replace(ModelConfig.from_released(released), engram_num_embeddings=rows)


def rows_of(rank: int, number: int, counts: Sequence[int]) -> Tensor:
    """The rows of a rank's micro-batch: [1, 7, 2, 4], some of them read often."""
    dice = torch.Generator().manual_seed(100 * rank + number)
    found = [torch.randint(0, count, (1, 7, 4), generator=dice) for count in counts]
    for layer, count in zip(found, counts, strict=True):
        layer[:, :2] = count - 1
    return torch.stack(found, dim=2)


def grads_of(rank: int, number: int, dim: int) -> Tensor:
    """A gradient for each of a micro-batch's reads, [2, 28, dim]: whole numbers, whose sums are
    the same in any order."""
    dice = torch.Generator().manual_seed(7 + 100 * rank + number)
    return torch.randint(-50, 50, (2, 28, dim), generator=dice).float()


def look_up(rows: tuple[int, int], owners: int, window_bytes: int) -> dict[str, Any]:
    """One step on this rank, after the tables have changed once and been published."""
    world = torch.distributed.get_world_size()
    mesh = build_mesh(dp_shard=world, engram_owners=owners)
    config = config_of(rows)
    store = OwnerStore(config, seed=3, mesh=mesh, window_bytes=window_bytes)
    before = store.fingerprint()
    rank = mesh.world.rank
    batches = [rows_of(rank, number, rows) for number in range(MICRO_BATCHES)]
    store.read_ahead(batches)
    for table in store.primary:
        table.weight.add_(1)
    store.publish(None)
    for table in store.primary:
        table.weight[::2].mul_(2)
    store.publish([torch.arange(0, len(table.weight), 2) for table in store.primary])
    other = store.open_window([rows_of(9, 9, rows)] * (rank + 1))  # an evaluation in between
    store.take_figures()
    read, number, windows = [], 0, 0
    for window in store.windows(batches):
        windows += 1
        for micro_batch in window.micro_batches():
            grads = grads_of(rank, number, config.engram_head_dim)
            for engram, grad in zip(micro_batch, grads, strict=True):
                read.append(engram.values[engram.inverse])
                assert engram.grad_buffer is not None
                engram.grad_buffer.index_add_(0, engram.inverse.flatten(), grad)
            number += 1
    tables = store.collect()
    figures = store.take_figures()
    return {
        "read": read,
        "other": [engram.values[engram.inverse] for engram in other.rows(rank)],
        "windows": windows,
        "ids": [ids + table.low for ids, table in zip(tables.ids, store.primary, strict=True)],
        "grads": tables.grads,
        "primary": [table.weight.clone() for table in store.primary],
        "whole": [
            store.as_global(index, table.weight).full_tensor()  # type: ignore[attr-defined]
            for index, table in enumerate(store.primary)
        ],
        "fingerprints": [before, store.fingerprint()],
        "figures": figures,
    }


@pytest.mark.parametrize(
    ("world", "owners", "rows", "windows"),
    [
        (2, 1, (384, 552), 3),
        (2, 2, (5, 3), 1),
        (3, 3, (385, 7), 3),
        (4, 1, (50, 51), 1),
        (4, 2, (383, 13), 3),
        (4, 4, (9, 5), 3),
    ],
)
def test_ranks_read_and_learn_what_one_does(ranks, world, owners, rows, windows) -> None:
    config = config_of(rows)
    found = ranks.run(world, look_up, rows, owners, 256 << 20 if windows == 1 else 64)
    one = OwnerStore(config, seed=3)
    assert all(result["fingerprints"][0] == one.fingerprint() for result in found)
    for table in one.primary:
        table.weight.add_(1)
    # Every other row of each primary was doubled: where these begin, a plain loop tells.
    for layer, count in enumerate(rows):
        for low, high in plain_division(count, owners, world // owners):
            one.weight[layer][low:high:2].mul_(2)
    dense = [torch.zeros_like(weight) for weight in one.weight]
    for rank, result in enumerate(found):
        assert result["windows"] == windows
        assert all(torch.equal(*pair) for pair in zip(result["whole"], one.weight, strict=True))
        assert result["fingerprints"][1] == one.fingerprint()
        other = rows_of(9, 9, rows)
        read = iter(result["read"])
        for number in range(MICRO_BATCHES):
            asked = rows_of(rank, number, rows)
            grads = grads_of(rank, number, config.engram_head_dim)
            for layer in range(2):
                ids = asked[:, :, layer]
                assert torch.equal(next(read), one.weight[layer][ids])
                dense[layer].index_add_(0, ids.flatten(), grads[layer])
        for layer in range(2):
            assert torch.equal(result["other"][layer], one.weight[layer][other[:, :, layer]])
    for layer, count in enumerate(rows):
        every = torch.cat([result["ids"][layer] for result in found])
        assert len(every.unique()) == len(every)
        total = torch.zeros_like(dense[layer])
        total[every] = torch.cat([result["grads"][layer] for result in found])
        assert torch.equal(total, dense[layer])
        read = torch.cat(
            [rows_of(r, n, rows)[:, :, layer].flatten() for r in range(world) for n in range(3)]
        )
        assert torch.equal(every.sort()[0], read.unique())
        lows = dict(enumerate(plain_division(count, owners, world // owners)))
        for rank, result in enumerate(found):
            low, high = lows[rank % owners * (world // owners) + rank // owners]
            ids = result["ids"][layer]
            assert torch.equal(ids, ids.unique()) and ((ids >= low) & (ids < high)).all()
            assert torch.equal(result["primary"][layer], one.weight[layer][low:high])


def plain_division(rows: int, owners: int, replicas: int) -> list[tuple[int, int]]:
    """Rows that each primary masters, owner by owner."""
    return [
        (int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0)
        for own in chunks(torch.arange(rows), owners)
        for part in chunks(own, replicas)
    ]


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    """torch.chunk, with empty ones at the end."""
    found = list(tensor.chunk(count)) if len(tensor) else []
    return found + [tensor[:0]] * (count - len(found))
