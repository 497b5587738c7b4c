"""What is shipped comes out as it was, from another process too."""

import dataclasses
from typing import Any

import torch
from torch.multiprocessing import get_context

from data.batch import Batch, Images, PackLayout
from data.shipment import Shipment


def batch() -> Batch:
    dice = torch.Generator().manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=dice).to(dtype)

    return Batch(
        input_ids=numbers(2, 5),
        labels=numbers(2, 5),
        position_ids=numbers(2, 5),
        seq_ids=numbers(2, 5),
        token_types=numbers(2, 5, dtype=torch.int8),
        engram_rows=numbers(2, 5, 0, 0),
        images=Images(numbers(3, 7, dtype=torch.bfloat16), numbers(1, 2)),
        sample_ids=(4, -1),
        layout=PackLayout(numbers(3, dtype=torch.int32), numbers(3, dtype=torch.int32), 5),
    )


def leaves(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [leaf for f in dataclasses.fields(value) for leaf in leaves(getattr(value, f.name))]
    return [value]


def assert_same(one: Batch, two: Batch) -> None:
    for a, b in zip(leaves(one), leaves(two), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a, b)
        else:
            assert a == b


def test_it_comes_out_as_it_was_and_can_be_written_to():
    made = batch()
    there = Shipment.of(made).unpack()
    assert_same(made, there)
    there.labels[0, 0] = -100
    there.images.grids[:] = 9
    assert torch.equal(there.input_ids, made.input_ids)
    assert torch.equal(there.layout.cu_seqlens, made.layout.cu_seqlens)


def test_it_comes_out_of_another_process():
    context = get_context("spawn")
    queue = context.Queue()
    taken = context.Event()
    child = context.Process(target=_send, args=(queue, taken))
    child.start()
    there = queue.get(timeout=60).unpack()
    taken.set()
    child.join(60)
    assert_same(batch(), there)


def _send(queue, taken):
    queue.put(Shipment.of(batch()))
    taken.wait(60)


def test_nothing_to_ship():
    assert Shipment.of(("no", "tensor")).unpack() == ("no", "tensor")


def test_pinning_copies_the_whole_once(monkeypatch):
    """Page-locked memory needs a GPU; here only what is asked of torch is looked at."""
    pinned: list[torch.Size] = []

    def pin(tensor):
        pinned.append(tensor.shape)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    made = batch()
    shipment = Shipment.of(made).pin_memory()
    assert len(pinned) == 1
    assert_same(made, shipment.unpack())
    assert_same(made, made.pin_memory())
    assert len(pinned) == 1 + 8  # a batch made in this process: its fields and images
