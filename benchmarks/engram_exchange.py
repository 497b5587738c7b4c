"""Time the look-up of Engram rows and the way back of their gradients, beside a plain exchange.

    python benchmarks/engram_exchange.py --ranks 4 --json

On gloo ranks of this machine: 4,096 tokens x 24 rows a rank from one table of 1M x 256 fp32, row
ids distributed by Zipf's law with exponent 1.05 and spread over the table as a hash would. Both
start from the rows' ids and end with the values of every read, and with the gradient at the rows'
owners; ours plans in the same time what a training step plans while the one before computes. The
plain one exchanges every read, in equal splits as large as the largest, and makes a dense gradient
of the table. Prints for each the median seconds of a forward and backward (of the slowest rank) and
the bytes that a rank sends to others (mean over ranks).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.parallel.mesh import build_mesh

CONFIG = Path(__file__).parents[1] / "tests/golden/tiny_text/config.json"


def main() -> None:
    args = arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=run, args=(rank, args, port, answers)) for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see above")
    report = answers.get()
    if args.json:
        print(json.dumps(report))
        return
    for name, found in report.items():
        if isinstance(found, dict):
            sent = found["bytes_sent_per_rank"]
            print(f"{name:9} {found['seconds']:.3f} s  {sent / 1e6:.1f} MB sent a rank")


def run(rank: int, args: argparse.Namespace, port: int, answers: Any) -> None:
    """One rank; the first one answers for all."""
    torch.set_num_threads(1)
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.ranks)
    released = ModelConfig.from_released(json.loads(CONFIG.read_text()))
    config = replace(
        released,
        num_hidden_layers=released.engram_layer_ids[0] + 1,  # one table
        engram_num_embeddings=(args.rows, args.rows),
        engram_head_dim=args.dim,
    )
    tables = OwnerStore(
        config, seed=None, mesh=build_mesh(dp_shard=args.ranks, engram_owners=args.ranks)
    )
    tables.weight[0].normal_()
    ids = row_ids(rank, args)
    grad = torch.randn(ids.numel(), args.dim)
    cases: dict[str, Callable[[], tuple[Tensor, Tensor, int]]] = {
        "ours": lambda: ours(tables, ids, grad),
        "baseline": lambda: baseline(tables, ids, grad),
    }
    report: dict[str, Any] = {"unique_share": ids.unique().numel() / ids.numel()}
    results, bytes_sent = {}, {}
    for name, once in cases.items():
        values, gradient, sent = once()
        results[name] = (values, gradient.sum(0))
        bytes_sent[name] = torch.tensor([float(sent)])
        dist.all_reduce(bytes_sent[name])
        del values, gradient
    # In turns, so that other work on the machine disturbs both alike.
    turns = [{name: timed(once) for name, once in cases.items()} for _ in range(args.repeats)]
    for name in cases:
        report[name] = {
            "seconds": statistics.median(turn[name] for turn in turns),
            "bytes_sent_per_rank": int(bytes_sent[name].item() / args.ranks),
        }
    for one, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)
    if rank == 0:
        answers.put(report)
    dist.destroy_process_group()


def row_ids(rank: int, args: argparse.Namespace) -> Tensor:
    """int64 [1, tokens, 1, columns]: frequent rows are the same on all ranks, and anywhere."""
    weights = np.arange(1, args.rows + 1) ** -args.exponent
    dice = np.random.default_rng(rank)
    reads = args.tokens * args.columns
    drawn = np.searchsorted(np.cumsum(weights / weights.sum()), dice.random(reads))
    spread = np.random.default_rng(1234).permutation(args.rows)
    ids = spread[np.minimum(drawn, args.rows - 1)]
    return torch.from_numpy(ids).view(1, args.tokens, 1, args.columns)


def timed(once: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    once()
    dist.barrier()
    return time.perf_counter() - begin


def ours(tables: OwnerStore, ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, int]:
    """The values of all reads, the gradient of this rank's rows that were read, and bytes sent."""
    values = torch.empty(0)
    for window in tables.windows([ids]):
        (rows,) = window.rows(0)
        where = rows.inverse.flatten()
        values = rows.values.index_select(0, where)
        assert rows.grad_buffer is not None
        rows.grad_buffer.index_add_(0, where, grad)
    return values, tables.collect().grads[0], tables.take_figures().lookup_bytes


def baseline(tables: OwnerStore, ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, int]:
    """The same without any thought: every read travels, in splits of the largest's size, and the
    gradient is a whole table's."""
    world, table = dist.get_world_size(), tables.weight[0]
    per, flat = -(-tables.rows[0] // world), ids.flatten()
    owner = flat // per
    order = owner.argsort(stable=True)
    counts = owner.bincount(minlength=world)
    split = counts.max()
    dist.all_reduce(split, op=dist.ReduceOp.MAX)
    split = int(split)
    begins = torch.arange(world) * split - (counts.cumsum(0) - counts)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(flat)) + begins.repeat_interleave(counts)
    asked = torch.zeros(world * split, dtype=torch.int64)
    asked[slots] = flat - owner * per
    wanted = torch.empty_like(asked)
    dist.all_to_all_single(wanted, asked)
    found = torch.empty(world * split, table.shape[1])
    dist.all_to_all_single(found, table.index_select(0, wanted))
    values = found.index_select(0, slots)
    padded = torch.zeros(world * split, table.shape[1])
    padded.index_copy_(0, slots, grad)
    arrived = torch.empty_like(padded)
    dist.all_to_all_single(arrived, padded)
    gradient = torch.zeros_like(table).index_add_(0, wanted, arrived)
    sent = asked.nbytes + found.nbytes + padded.nbytes
    return values, gradient, sent * (world - 1) // world


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of one rank")
    parser.add_argument("--columns", type=int, default=24, help="rows that a token reads")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=256, help="of a row")
    parser.add_argument("--exponent", type=float, default=1.05, help="of Zipf's law")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
