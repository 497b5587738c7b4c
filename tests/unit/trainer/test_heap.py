"""Freed tensors' memory stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 20
PROGRAM = f"""
import resource, sys, torch
from trainer.device import choose_device

if sys.argv[1] == "rank":
    choose_device(0)

def step():
    kept = [torch.ones(1 << 21) for _ in range(6)]  # 8 MB each
    while kept:
        kept.pop(0)

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, how],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is told")
def test_a_rank_on_the_cpu_asks_the_system_for_its_memory_once() -> None:
    plain, rank = faults("plain"), faults("rank")
    assert plain > 500 * STEPS  # or this test tells nothing
    assert rank < plain / 10
