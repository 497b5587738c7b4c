"""Measure what watching over a run takes of its time, on every rank and beside them.

    python benchmarks/supervision.py --json

Gloo ranks of this machine do steps that only sleep, so that whatever CPU they use is supervision's:
first nothing, then each part alone, then all of them as in training. While the last ones run a
supervisor watches them as it watches an attempt. Prints CPU seconds a step (of the rank that takes
most, all of its threads; less those of a step with nothing) and their share of the step's time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.backends.protocol import Plan
from launcher.reduce import Death
from launcher.run_dir import Attempt, RunFolder
from launcher.supervisor import StopRequests, watch
from launcher.watch.watchdog import Watchdog
from trainer import phase
from trainer.heartbeat import Heartbeat
from trainer.metrics import MetricsLog
from trainer.ranks import Ranks
from trainer.signals import StopSignals

# What a step of one micro-batch enters.
PHASES = ("data", "count", "engram", "forward", "backward", "reduce", "update", "record", "agree")
RECORD = {f"figure_{n}": 1.0 / (1 + n) for n in range(40)}  # about as long as a real one
NOTHING, ALL = "nothing", "all"
PARTS = ("heartbeat", "phases", "stop file", "agreement", "metrics")


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        report = measured(args, RunFolder(Path(folder)).new_attempt())
    if args.json:
        print(json.dumps(report))
        return
    print(f"a step: {args.step_s:g} s, {args.ranks} ranks")
    for name, found in report["parts"].items():
        print(f"{name:11} {1e3 * found['cpu_s']:7.3f} ms of CPU a step  {found['share']:8.3%}")


def measured(args: argparse.Namespace, attempt: Attempt) -> dict[str, Any]:
    """The report: {step_s, ranks, wall_s: {nothing, all}, parts: {name: {cpu_s, share}}}."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    answers, ready = context.SimpleQueue(), context.Event()
    ranks = [
        context.Process(target=run, args=(rank, args, port, attempt.path, ready, answers))
        for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    while not ready.wait(0.2):
        if not all(process.is_alive() for process in ranks):
            raise SystemExit("a rank failed; see above")
    supervisor = watched(args, attempt, ranks)
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see above")
    found, wall = answers.get()
    taken = {name: max(0.0, found[name] - found[NOTHING]) for name in (*PARTS, ALL)}
    taken["supervisor"] = supervisor * args.step_s
    return {
        "step_s": args.step_s,
        "ranks": args.ranks,
        "wall_s": wall,
        "parts": {name: {"cpu_s": cpu, "share": cpu / args.step_s} for name, cpu in taken.items()},
    }


class Processes:
    """The ranks as a supervisor sees those of an attempt."""

    def __init__(self, ranks: Sequence[BaseProcess]) -> None:
        self._ranks = ranks

    def poll(self) -> list[Death] | None:
        return None if any(rank.is_alive() for rank in self._ranks) else []

    def kill(self) -> None:
        pass


def watched(args: argparse.Namespace, attempt: Attempt, ranks: Sequence[BaseProcess]) -> float:
    """CPU seconds of a supervisor in a second, while the ranks go on with all parts."""
    plan = Plan(RunFolder(attempt.path.parents[1]), world=args.ranks, nodes=1, grace_s=60.0)
    began, cpu = time.monotonic(), time.process_time()
    watchdog = Watchdog(attempt, world=args.ranks, hang_s=600.0, say=print, now=began)
    watch(Processes(ranks), attempt, plan, StopRequests(60.0), watchdog)
    return (time.process_time() - cpu) / (time.monotonic() - began)


def run(
    rank: int, args: argparse.Namespace, port: int, folder: Path, ready: Any, answers: Any
) -> None:
    """One rank; the first one answers for all, and says when the last part begins."""
    torch.set_num_threads(1)
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.ranks)
    ranks = Ranks.from_process_group()
    found, wall = {}, {}
    for name in (NOTHING, *PARTS, ALL):
        if name == ALL and ranks.first:
            ready.set()
        cpu, seconds = timed(args, ranks, Attempt(folder), PARTS if name == ALL else (name,))
        found[name] = ranks.largest(int(1e9 * cpu)) / 1e9
        if name in (NOTHING, ALL):
            wall[name] = seconds
    if ranks.first:
        answers.put((found, wall))
    dist.destroy_process_group()


def timed(
    args: argparse.Namespace, ranks: Ranks, attempt: Attempt, parts: tuple[str, ...]
) -> tuple[float, float]:
    """CPU seconds and the median of the wall-clock seconds of a step with `parts`."""
    with ExitStack() as entered:
        if "heartbeat" in parts:
            entered.enter_context(Heartbeat(attempt.path, rank=ranks.rank))
        file = attempt.stop_file if ranks.first else None
        stop = entered.enter_context(StopSignals(file=file))
        log = MetricsLog(attempt.path / f"metrics-{ranks.rank}.jsonl", last_step=0)
        entered.callback(log.close)
        work: dict[str, Callable[[int], object]] = {
            "phases": lambda step: [phase.enter(name) for name in PHASES],
            "stop file": lambda step: stop.exit_code,
            "agreement": lambda step: ranks.largest(0),
            "metrics": lambda step: log.write({"step": step, **RECORD}) if ranks.first else None,
        }
        chosen = [work[name] for name in parts if name in work]
        ranks.barrier()
        walls, cpu = list[float](), time.process_time()
        for step in range(args.steps):
            began = time.perf_counter()
            time.sleep(args.step_s)
            for once in chosen:
                once(step)
            walls.append(time.perf_counter() - began)
        taken = time.process_time() - cpu
    return taken / args.steps, statistics.median(walls)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="with each part")
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds of a step")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
