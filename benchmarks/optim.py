"""Time a step of every update rule beside AdamW on the same tensors, and beside its floor.

    python benchmarks/optim.py --rows 2000000 --dim 64 --read 4096 --threads 2 --json

`matrices`: Muon and AdamW on a few of a model's matrices. `table`: AdamW with a dense gradient,
Sinkhorn-balanced momentum, and the sparse rules, on one table of which a step has read some rows.
Each rule has `seconds` and `cpu_seconds` (the best of some steps, by the clock and by the
processor, which a busy machine disturbs less), both as parts of AdamW's in `of_adamw` and
`cpu_of_adamw`;
`floor_seconds`, what the bytes that it must move or the operations that it must do take at the
rates measured in the same run; and `transient_bytes`: what a step holds beyond weights and state,
the gradient included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In our own folder, which comes first, `data` is data.py.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of each start and stop

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from model.engram.primaries import PrimaryTable
from model.parallel.mesh import Mesh
from trainer.adamw import AdamW
from trainer.muon import STEPS, Muon
from trainer.table_optim import RowwiseAdagrad, SinkhornTables, SparseAdam

LR = 1e-3
# Shapes [stacked, rows, columns]: a query projection, an output projection, some experts.
MATRICES = ((1, 160, 640), (1, 320, 768), (8, 288, 320), (8, 320, 144))
Step = Callable[[], None]


@dataclass(frozen=True)
class OneTable:
    """A store that masters one whole table."""

    weight: Tensor
    layers: tuple[int, ...] = (0,)
    mesh: Mesh = Mesh()  # noqa: RUF009

    @property
    def primary(self) -> list[PrimaryTable]:
        return [PrimaryTable(0, 0, self.weight)]

    def as_global(self, index: int, tensor: Tensor) -> Tensor:
        return tensor


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "machine": machine(),
        "settings": {key: value for key, value in vars(args).items() if key != "json"},
    }
    report["matrices"] = matrices(args.repeat, report["machine"])
    report["table"] = table(args, report["machine"])
    if args.json:
        print(json.dumps(report))
        return
    for part in ("matrices", "table"):
        print(part)
        for rule, found in report[part].items():
            figures = "  ".join(f"{name} {value:.3g}" for name, value in found.items())
            print(f"  {rule:16s}{figures}")


def machine() -> dict[str, float]:
    """Bytes moved and operations done in a second, on work that nothing else slows."""
    source = torch.ones(64 << 20)
    target = torch.zeros_like(source)
    copy, _ = best(lambda: target.copy_(source), 3)
    a = torch.randn(1280, 1280)
    product, _ = best(lambda: a @ a, 5)
    return {"bytes_per_s": 2 * 4 * source.numel() / copy, "flops_per_s": 2 * 1280**3 / product}


def matrices(repeat: int, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """AdamW and Muon on MATRICES."""
    random = torch.Generator().manual_seed(0)
    named = [(str(shape), nn.Parameter(torch.randn(shape, generator=random))) for shape in MATRICES]
    params = [parameter for _, parameter in named]
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=random)
    elements = sum(parameter.numel() for parameter in params)
    flops = sum(stacked * newton_schulz(rows, columns) for stacked, rows, columns in MATRICES)
    muon = Muon(named, [(shape[-2],) for shape in MATRICES], lr=LR)
    found = {
        "adamw": measured(adamw_step(params), repeat, adamw_floor(elements, rates), elements),
        "muon": measured(muon.step, repeat, flops / rates["flops_per_s"], elements),
    }
    found["muon"]["flops"] = flops
    return compared(found)


def table(args: argparse.Namespace, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """AdamW, Sinkhorn and the sparse rules on one table."""
    random = torch.Generator().manual_seed(1)
    elements, read = args.rows * args.dim, args.read * args.dim
    ids = torch.randperm(args.rows, generator=random)[: args.read].sort().values
    grads = torch.randn(args.read, args.dim, generator=random)
    moved = 4 / rates["bytes_per_s"]

    weight = nn.Parameter(torch.zeros(args.rows, args.dim))
    weight.grad = torch.zeros_like(weight).index_copy_(0, ids, grads)
    step = adamw_step([weight])
    found = {"adamw": measured(step, args.repeat, adamw_floor(elements, rates), elements)}
    store: Any = OneTable(weight.detach())
    del weight, step

    rules: dict[str, tuple[Callable[[], Any], float]] = {
        # Momentum: decayed, then swept seven times; the weight: read and written.
        "sinkhorn": (lambda: SinkhornTables(store), 11 * elements * moved),
        # Weight and two moments, read and written, and the gradient.
        "sparse_adam": (
            lambda: SparseAdam(store, beta1=0.9, beta2=0.95, eps=1e-20),
            7 * read * moved,
        ),
        "rowwise_adagrad": (lambda: RowwiseAdagrad(store, eps=1e-20), 3 * read * moved),
    }
    for name, (make, floor) in rules.items():
        rule = make()
        found[name] = measured(
            lambda rule=rule: rule.step([ids], [grads], lr=LR), args.repeat, floor, read
        )
        del rule
    return compared(found)


def adamw_step(params: list[nn.Parameter]) -> Step:
    groups = [{"params": params, "weight_decay": 0.1}]
    return AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-20).step


def adamw_floor(elements: int, rates: dict[str, float]) -> float:
    """Weight and two moments, read and written, and the gradient."""
    return 7 * 4 * elements / rates["bytes_per_s"]


def newton_schulz(rows: int, columns: int) -> int:
    """Operations to orthogonalise a matrix: three products a step."""
    short, long = sorted((rows, columns))
    return len(STEPS) * (4 * short * short * long + 2 * short**3)


def measured(step: Step, repeat: int, floor: float, gradient: int) -> dict[str, float]:
    """One rule's figures; gradient: how many fp32 values its step is given."""
    step()
    seconds, cpu_seconds = best(step, repeat)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "floor_seconds": floor,
        "transient_bytes": 4 * gradient + peak_bytes(step),
    }


def compared(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    for figures in found.values():
        figures["of_adamw"] = figures["seconds"] / found["adamw"]["seconds"]
        figures["cpu_of_adamw"] = figures["cpu_seconds"] / found["adamw"]["cpu_seconds"]
    return found


def best(step: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Seconds of the fastest run, by the clock and by the processor: what else the machine does
    only ever adds. Short runs are repeated for half a second."""
    clock, processor = [], []
    while len(clock) < repeat or sum(clock) < 0.5:
        begin, used = time.perf_counter(), time.process_time()
        step()
        clock.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
    return min(clock), min(processor)


def peak_bytes(step: Step) -> int:
    """The most that a step holds at a time beyond what there was, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    held = most = 0
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    for event in sorted(results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64, help="of a row")
    parser.add_argument("--read", type=int, default=4096, help="distinct rows a step has read")
    parser.add_argument("--repeat", type=int, default=3, help="timed steps of each rule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
