"""Time a training step with the CPU's kernels and with torch's operators, in turns.

    python benchmarks/kernels.py --model CONFIG.json --tokenizer TOKENIZER.json \
        --seq 1024 --docs 200,312,100,412 --steps 20 --threads 2 --json

Prints the median seconds of both, the quartiles of the ratio of two steps that follow each other,
and each kernel's calls and milliseconds in a step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext

from train_step import parser_of, prepared

from model.kernels.build import built
from model.kernels.library import Kernels, without_kernels
from trainer.garbage import set_up_spared


def main() -> None:
    args = parser_of(__doc__).parse_args()
    if built().library is None:
        raise SystemExit(f"there are no kernels here: {built().reason}")
    step = prepared(args)
    with set_up_spared():
        pairs = in_turns(step, args.steps)
        calls = calls_of(step)
    ratios = [theirs / ours for ours, theirs in pairs]
    report = {
        "kernels_s": statistics.median(ours for ours, _ in pairs),
        "torch_s": statistics.median(theirs for _, theirs in pairs),
        "ratio_quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
        "kernels": {
            name: {"calls": len(seconds), "ms": 1e3 * sum(seconds)}
            for name, seconds in sorted(calls.items(), key=lambda item: -sum(item[1]))
        },
    }
    if args.json:
        print(json.dumps(report))
        return
    low, middle, high = report["ratio_quartiles"]
    print(f"kernels {report['kernels_s']:.4f} s, torch {report['torch_s']:.4f} s a step")
    print(f"{middle:.2f} times as fast ({low:.2f} to {high:.2f} from quartile to quartile)")
    for name, found in report["kernels"].items():
        print(f"{name:18} {found['calls']:4} calls  {found['ms']:8.3f} ms")


def in_turns(step: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Seconds of a step by kernels and of one by torch, `count` times, each first in turn."""
    found: list[dict[bool, float]] = []
    for n in range(-1, count):  # a pair to warm up
        seconds = {}
        for by_torch in (False, True) if n % 2 else (True, False):
            with without_kernels() if by_torch else nullcontext():
                begin = time.perf_counter()
                step()
                seconds[by_torch] = time.perf_counter() - begin
        found.append(seconds)
    return [(seconds[False], seconds[True]) for seconds in found[1:]]


def calls_of(step: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of every call of every kernel in one step."""
    calls: dict[str, list[float]] = defaultdict(list)
    run = Kernels.run

    def timed(self: Kernels, name: str, *args) -> None:
        begin = time.perf_counter()
        run(self, name, *args)
        calls[name].append(time.perf_counter() - begin)

    Kernels.run = timed
    step()
    Kernels.run = run
    return calls


if __name__ == "__main__":
    main()
