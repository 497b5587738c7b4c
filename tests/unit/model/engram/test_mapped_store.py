"""Windows out of files equal windows out of memory, read ahead or not, and carry no gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore
from model.engram.tables.file_rows import BadTableError
from model.engram.tables.table import Table


@pytest.fixture
def stores(write_tables: Callable) -> Iterator[tuple[MappedStore, OwnerStore]]:
    """The same tables in files and in memory."""
    files = write_tables("fp8")
    mapped, local = MappedStore(files.read_by(), token_map=None), OwnerStore(files.config, seed=0)
    for layer, weight in zip(local.layers, local.weight, strict=True):
        weight.copy_(files.values(layer))
    yield mapped, local
    mapped.close()


def some_ids(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 384, shape, generator=generator)
    return torch.stack([first, torch.randint(0, 552, shape, generator=generator)], dim=2)


def assert_equal_windows(found, wanted) -> None:
    for one, other in zip(found.ids + found.values, wanted.ids + wanted.values, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found.inverses, wanted.inverses, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_windows_equal_those_of_tables_in_memory(stores) -> None:
    mapped, local = stores
    assert (mapped.layers, mapped.rows) == (local.layers, local.rows)
    batches = [some_ids((2, 7, 6), 0), some_ids((1, 9, 6), 1)]
    found, wanted = mapped.open_window(batches), local.open_window(batches)
    assert_equal_windows(found, wanted)
    assert found.grads == []
    assert all(rows.grad_buffer is None for rows in found.rows(1))
    with pytest.raises(ValueError, match="another geometry"):
        mapped.open_window([torch.full((1, 2, 2, 6), 384)])


def test_each_row_is_read_once_in_ascending_order(stores, monkeypatch) -> None:
    mapped, _ = stores
    asked: list[np.ndarray] = []
    read = Table.read
    monkeypatch.setattr(Table, "read", lambda t, ids: (asked.append(ids), read(t, ids))[1])
    batches = [some_ids((2, 50, 6), 3), some_ids((2, 50, 6), 4)]
    mapped.open_window(batches)
    for layer, ids in enumerate(asked):
        wanted = sorted({i for b in batches for i in b[:, :, layer].flatten().tolist()})
        assert ids.tolist() == wanted


def test_what_is_read_ahead_is_what_is_read_now(stores) -> None:
    mapped, local = stores
    steps = [[some_ids((2, 30, 6), s), some_ids((2, 30, 6), s + 50)] for s in range(6)]
    mapped.read_ahead(steps[0])
    for present, following in zip(steps, [*steps[1:], None], strict=True):
        if following is not None:
            mapped.read_ahead(following)
        other = [some_ids((1, 8, 6), 99)]  # an evaluation in between
        assert_equal_windows(mapped.open_window(other), local.open_window(other))
        (found,) = mapped.windows(present)
        assert_equal_windows(found, local.open_window(present))


def test_reading_goes_on_while_the_caller_computes(stores, monkeypatch) -> None:
    mapped, _ = stores
    started, released = threading.Event(), threading.Event()
    read = Table.read

    def slow(table: Table, ids: np.ndarray) -> Tensor:
        started.set()
        assert released.wait(10)
        return read(table, ids)

    monkeypatch.setattr(Table, "read", slow)
    batches = [some_ids((1, 9, 6), 0)]
    mapped.read_ahead(batches)
    assert started.wait(10)  # this thread is free meanwhile
    released.set()
    assert len(next(mapped.windows(batches)).values) == 2


def test_a_failure_in_the_background_comes_out_where_the_rows_are_used(stores, monkeypatch) -> None:
    mapped, _ = stores

    def damaged(table: Table, ids: np.ndarray) -> Tensor:
        raise BadTableError("row 3")

    batches = [some_ids((1, 9, 6), 0)]
    with monkeypatch.context() as patch:
        patch.setattr(Table, "read", damaged)
        mapped.read_ahead(batches)
        with pytest.raises(BadTableError, match="row 3"):
            next(mapped.windows(batches))
    assert len(mapped.open_window(batches).values) == 2


def test_closing_leaves_no_thread(write_tables: Callable) -> None:
    before = threading.active_count()
    store = MappedStore(write_tables("fp8").read_by(), token_map=None)
    store.read_ahead([some_ids((1, 9, 6), 0)])
    store.close()
    assert threading.active_count() == before


def test_fingerprints_tell_the_source(stores) -> None:
    mapped, local = stores
    found = mapped.fingerprint()
    assert found["store"] == "mapped"
    assert found["source"].startswith("/")
    assert [t["name"] for t in found["tables"]] == [
        "layers.1.engram.embed.weight",
        "layers.3.engram.embed.weight",
    ]
    before = local.fingerprint()
    local.weight[1][-1, 0] += 1
    assert local.fingerprint()["tables"][0] == before["tables"][0]
    assert local.fingerprint()["tables"][1] != before["tables"][1]
