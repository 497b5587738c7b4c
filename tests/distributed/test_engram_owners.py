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
from model.engram.exchange import Exchange, Pending
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
    for table in store.primary:
        table.weight.add_(1)
    store.publish(None)
    store.read_ahead(batches)
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
    check_bytes(found, world, windows)
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


def check_bytes(found: list[dict[str, Any]], world: int, windows: int) -> None:
    """A row travels once each way, with its number; what is sent is counted on its sender."""
    reads = MICRO_BATCHES * 2 * 7 * 4
    figures = [result["figures"] for result in found]
    assert all(own.reads == reads and 0 < own.distinct <= reads for own in figures)
    dim = found[0]["grads"][0].shape[1]
    counts = world * world * 2 * windows * 8
    bound = sum(own.distinct for own in figures) * (8 + 4 * dim + 4 * dim) + counts
    assert 0 < sum(own.lookup_bytes for own in figures) <= bound
    assert all(own.waited > 0 and own.replica_bytes == 0 for own in figures)


def published(owners: int) -> list[int]:
    """Bytes that this rank sends for no change, for some rows, and for all."""
    mesh = build_mesh(dp_shard=torch.distributed.get_world_size(), engram_owners=owners)
    store = OwnerStore(config_of((40, 24)), seed=3, mesh=mesh)
    none = torch.zeros(0, dtype=torch.int64)
    found = []
    for ids in ([none, none], [torch.tensor([0, 2]), torch.tensor([1])], None):
        store.publish(ids)
        figures = store.take_figures()
        assert figures.lookup_bytes == 0
        found.append(figures.replica_bytes)
    return found


def test_changed_rows_alone_go_to_the_copies(ranks) -> None:
    row = 4 * 16
    assert ranks.run(4, published, 4) == [[0, 0, 0]] * 4
    for sent in ranks.run(4, published, 2):  # one copy each, of a quarter of the rows
        assert sent == [4, 4 + 3 * (4 + row), 16 * row]
    for sent in ranks.run(4, published, 1):
        assert sent == [3 * 4, 3 * (4 + 3 * (4 + row)), 3 * 16 * row]


def order_of_work() -> list[str]:
    """Messages that begin, and windows that the caller has, of a step in three windows."""
    mesh = build_mesh(dp_shard=torch.distributed.get_world_size(), engram_owners=2)
    rows = (40, 24)
    store = OwnerStore(config_of(rows), seed=3, mesh=mesh, window_bytes=64)
    batches = [rows_of(mesh.world.rank, number, rows) for number in range(MICRO_BATCHES)]
    begin, log = Exchange.begin, []

    def logged(self: Exchange, send: dict[int, Tensor], receive: Any) -> Pending:
        kinds = {tensor.dtype for tensor in send.values()}
        log.append("ids" if kinds == {torch.int32} else "rows")
        return begin(self, send, receive)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "begin", logged)
        store.read_ahead(batches)
        store.publish([torch.zeros(0, dtype=torch.int64)] * 2)
        log.append("step")
        for _ in store.windows(batches):
            log.append("window")
        store.collect()
    return log


def test_rows_and_gradients_travel_while_a_window_is_worked_on(ranks) -> None:
    before = ["ids", "rows", "step"]  # the first window's travel while the parameters learn
    first = ["rows", "window"]  # rows of the second
    second = ["rows", "rows", "window"]  # gradients of the first, rows of the third
    last = ["rows", "window", "rows"]  # gradients of the second, and at the end the third
    for log in ranks.run(2, order_of_work):
        assert log == [*before, *first, *second, *last]


def summed(threads: int) -> list[Tensor]:
    """Sums of real numbers, which depend on their order."""
    torch.set_num_threads(threads)
    rows = (40, 24)
    mesh = build_mesh(dp_shard=torch.distributed.get_world_size(), engram_owners=1)
    store = OwnerStore(config_of(rows), seed=3, mesh=mesh, window_bytes=64)
    rank = mesh.world.rank
    number = 0
    for window in store.windows([rows_of(rank, n, rows) for n in range(MICRO_BATCHES)]):
        for micro_batch in window.micro_batches():
            for engram, grad in zip(micro_batch, grads_of(rank, number, 16), strict=True):
                assert engram.grad_buffer is not None
                engram.grad_buffer.index_add_(0, engram.inverse.flatten(), grad / 3)
            number += 1
    torch.set_num_threads(1)
    return store.collect().grads


def test_sums_are_the_same_bits_on_two_threads(ranks) -> None:
    for one, two in zip(ranks.run(2, summed, 1), ranks.run(2, summed, 2), strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


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
