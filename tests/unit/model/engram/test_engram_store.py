"""Tables: windows of rows, and initial values that depend on seed, layer and row alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import EngramStoreConfig
from model.engram.init import fill_rows
from model.engram.owners import OwnerStore


@pytest.fixture
def store(make_config: Callable) -> OwnerStore:
    return OwnerStore(make_config(), seed=3)


def some_ids(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 384, shape, generator=generator)
    return torch.stack([first, torch.randint(0, 552, shape, generator=generator)], dim=2)


def test_a_window_holds_each_row_once_and_gives_every_read(store: OwnerStore) -> None:
    batches = [some_ids((2, 7, 6), 0), some_ids((1, 9, 6), 1)]
    window = store.open_window(batches)
    for layer in range(2):
        wanted = sorted({i for b in batches for i in b[:, :, layer].flatten().tolist()})
        assert window.ids[layer].tolist() == wanted
        assert window.ids[layer].dtype == torch.int64
        assert window.grads[layer].dtype == torch.float32
        assert window.grads[layer].shape == window.values[layer].shape == (len(wanted), 16)
        assert not window.grads[layer].any()
    for i, batch in enumerate(batches):
        for layer, rows in enumerate(window.rows(i)):
            assert rows.inverse.shape == batch[:, :, layer].shape
            read = rows.values[rows.inverse]
            assert torch.equal(read, store.weight[layer][batch[:, :, layer]])
            assert rows.grad_buffer is window.grads[layer]


def test_tables_of_the_host_are_those_of_the_device(make_config: Callable) -> None:
    """On a CPU there is one memory."""
    config = make_config()
    host = OwnerStore(replace(config, engram=EngramStoreConfig("host")), seed=3)
    device = OwnerStore(config, seed=3)
    assert host.fingerprint() == device.fingerprint()
    batches = [some_ids((2, 7, 6), 0)]
    (one,), (other,) = host.windows(batches), device.windows(batches)
    for pair in zip(one.values + one.ids, other.values + other.ids, strict=True):
        assert torch.equal(*pair)


def test_frozen_tables_have_windows_without_gradient(make_config: Callable) -> None:
    store = OwnerStore(make_config(), seed=3, learns=False)
    batches = [some_ids((2, 7, 6), 0)]
    store.read_ahead(batches)
    (window,) = store.windows(batches)
    assert window.grads == store.open_window(batches).grads == []
    for layer, rows in enumerate(window.rows(0)):
        assert rows.grad_buffer is None
        assert torch.equal(rows.values[rows.inverse], store.weight[layer][batches[0][:, :, layer]])
    assert store.collect().ids == []


def test_gradients_of_windows_are_collected_by_row(make_config: Callable) -> None:
    batches = [some_ids((1, 9, 6), seed) for seed in range(4)]
    for window_bytes in (1, 1 << 20):  # a micro-batch at a time, and all at once
        store = OwnerStore(make_config(), seed=3, window_bytes=window_bytes)
        dense = [torch.zeros_like(weight) for weight in store.weight]
        number = 0
        for window in store.windows(batches):
            assert len(window.inverses) == (1 if window_bytes == 1 else 4)
            for micro_batch in window.micro_batches():
                for layer, rows in enumerate(micro_batch):
                    ids = batches[number][:, :, layer].flatten()
                    grads = torch.randint(-9, 9, (len(ids), 16)).float()
                    assert rows.grad_buffer is not None
                    rows.grad_buffer.index_add_(0, rows.inverse.flatten(), grads)
                    dense[layer].index_add_(0, ids, grads)
                number += 1
        tables = store.collect()
        for layer, (ids, grads) in enumerate(zip(tables.ids, tables.grads, strict=True)):
            read = torch.cat([batch[:, :, layer].flatten() for batch in batches])
            assert torch.equal(ids, read.unique())
            assert torch.equal(
                torch.zeros_like(dense[layer]).index_copy_(0, ids, grads), dense[layer]
            )


def test_the_window_is_a_copy(store: OwnerStore) -> None:
    window = store.open_window([some_ids((1, 4, 6), 0)])
    before = window.values[0].clone()
    store.weight[0].zero_()
    assert torch.equal(window.values[0], before)


@pytest.mark.parametrize(("layer", "bad"), [(0, 384), (1, 552), (0, -1), (1, 2**40)])
def test_a_row_outside_its_table_is_refused(store: OwnerStore, layer: int, bad: int) -> None:
    ids = some_ids((1, 4, 6), 0)
    ids[0, 2, layer, 3] = bad
    with pytest.raises(ValueError, match=rf"layer {[1, 3][layer]} reach .*{bad}.*another geometry"):
        store.open_window([ids])


def test_a_row_past_the_smaller_table_alone_is_fine(store: OwnerStore) -> None:
    ids = some_ids((1, 4, 6), 0)
    ids[0, 0, 1, 0] = 551
    assert store.open_window([ids]).ids[1][-1] == 551


def test_tables_are_those_of_existing_layers(make_config: Callable) -> None:
    full = OwnerStore(make_config(), seed=3)
    short = OwnerStore(make_config(num_hidden_layers=3), seed=3)
    assert [w.shape for w in full.weight] == [(384, 16), (552, 16)]
    assert short.layers == (1,)
    assert torch.equal(short.weight[0], full.weight[0])
    none = OwnerStore(make_config(engram_layer_ids=(), engram_num_embeddings=()), seed=3)
    assert none.weight == [] and none.open_window([torch.zeros(1, 4, 0, 0).long()]).rows(0) == []


def rows_from(low: int, count: int, dim: int = 16, **changes: Any) -> Tensor:
    out = torch.empty(count, dim)
    fill_rows(out, low, **{"layer": 1, "seed": 0, "std": 0.02, **changes})
    return out


def test_rows_depend_on_seed_layer_and_id_alone() -> None:
    table = rows_from(0, 300)
    for low, count in ((0, 7), (3, 1), (250, 50), (299, 1)):
        assert torch.equal(rows_from(low, count), table[low : low + count])
    for other in (rows_from(0, 300, layer=2), rows_from(0, 300, seed=1)):
        assert (other != table).float().mean() > 0.999
    assert torch.equal(rows_from(5, 1) * 2, rows_from(5, 1, std=0.04))


def test_values_look_normal_and_independent() -> None:
    std = 0.02
    x = rows_from(0, 6000, std=std).double() / std
    assert abs(float(x.mean())) < 0.015
    assert float(x.std()) == pytest.approx(1.0, abs=0.01)
    levels = torch.tensor([0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999]).double()
    found = torch.quantile(x.flatten(), levels)
    torch.testing.assert_close(found, torch.special.ndtri(levels), rtol=0.04, atol=0.02)
    # No column, neighbouring row or neighbouring element tells anything of another.
    correlation = torch.corrcoef(x.T) - torch.eye(16)
    assert correlation.abs().max() < 0.06
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1])):
        assert abs(float((a * b).mean())) < 0.015
    assert x.flatten().unique().numel() > 0.999 * x.numel()


def test_rows_past_32_bits_are_rows_of_their_own() -> None:
    ids = [384_006_167, 384_006_167 + 2**32, 2**24, 2**24 + 1]
    rows = torch.cat([rows_from(low, 1, dim=256, layer=14) for low in ids])
    assert rows.isfinite().all()
    assert torch.cdist(rows, rows)[~torch.eye(4, dtype=torch.bool)].min() > 0.1
