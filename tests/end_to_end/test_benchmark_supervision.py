"""What watching over a run costs, measured as the benchmark does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "supervision.py"


@pytest.mark.long
def test_supervision_takes_less_than_a_hundredth_of_a_step() -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--steps", "25", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    parts = json.loads(ended.stdout)["parts"]
    assert 0 < parts["all"]["share"] < 0.01
    assert 0 < parts["supervisor"]["share"] < 0.01
