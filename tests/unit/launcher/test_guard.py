"""A process ends with its parent, even one that is gone before the process has looked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.guard import PARENT, as_parent
from launcher.processes import alive

ROOT = Path(__file__).parents[3]
CHILD = """
import os, sys, time
from launcher.guard import PARENT, die_with_parent
time.sleep(float(sys.argv[1]))
die_with_parent()
assert PARENT not in os.environ
print("guarded", flush=True)
time.sleep(600)
"""
PARENT_PROGRAM = """
import os, subprocess, sys, time
from launcher.guard import as_parent
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], sys.argv[2]], env=os.environ | as_parent(),
    start_new_session=True,
)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_no_child_outlives_its_parent(late: float) -> None:
    """late: seconds that the child takes before it looks; by then its parent is gone."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_PROGRAM, CHILD, str(late)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if not late:
        assert parent.stdout.readline() == "guarded\n"
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 30
    try:
        while alive(child):
            assert time.monotonic() < end, "an orphan"
            time.sleep(0.1)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_child_learns_whose_it_is() -> None:
    assert as_parent() == {PARENT: str(os.getpid())}
