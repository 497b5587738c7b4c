"""A window's look-ups cost the same in one micro-batch or in many."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.engram.owners import OwnerStore
from model.engram.rows import project_rows

TOKENS, COLUMNS, DIM, PARTS = 16384, 12, 64, 32


@pytest.mark.slow
def test_32_micro_batches_cost_little_more_than_one_of_the_same_rows(make_config: Callable) -> None:
    config = replace(make_config(), engram_num_embeddings=(50_000, 50_000), engram_head_dim=DIM)
    store = OwnerStore(config, seed=None)
    for weight in store.weight:
        weight.normal_()
    dice = torch.Generator().manual_seed(0)
    ranks = torch.rand(1, TOKENS, 2, COLUMNS, generator=dice) ** 3  # some rows are read often
    rows = (ranks * 50_000).long()
    weight = torch.randn(8, COLUMNS * DIM, requires_grad=True)

    def look_up(batches: list[Tensor]) -> list[Tensor]:
        for window in store.windows(batches):
            for micro_batch in window.micro_batches():
                for layer in micro_batch:
                    project_rows(layer, weight, torch.float32).sum().backward()
        return store.collect().grads

    one, many = [rows], list(rows.split(TOKENS // PARTS, dim=1))
    for whole, parts in zip(look_up(one), look_up(many), strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-3)
    # The processor's time, and the least of some turns: other work on the machine counts little.
    seconds = {PARTS: [], 1: []}
    for _ in range(4):
        for batches in (one, many):
            begin = time.process_time()
            look_up(batches)
            seconds[len(batches)].append(time.process_time() - begin)
    ratio = min(seconds[PARTS]) / min(seconds[1])
    print(f"32 micro-batches cost {ratio:.2f} times one")
    assert ratio <= 1.3
