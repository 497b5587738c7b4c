"""benchmarks/optim.py runs, and what it measures of the tables' rules holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "optim.py"


def report(*words: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--threads", "1", "--json", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_rule_is_measured_beside_its_floor() -> None:
    found = report("--rows", "20000", "--read", "500", "--repeat", "1")
    assert list(found["matrices"]) == ["adamw", "muon"]
    assert list(found["table"]) == ["adamw", "sinkhorn", "sparse_adam", "rowwise_adagrad"]
    for part in ("matrices", "table"):
        for figures in found[part].values():
            assert figures["seconds"] > 0
            assert figures["floor_seconds"] > 0
        assert found[part]["adamw"]["of_adamw"] == 1.0


@pytest.mark.long
def test_a_sparse_step_takes_a_fiftieth_of_a_dense_one() -> None:
    """Of two million rows of 64, four thousand are read."""
    table = report("--repeat", "5")["table"]
    for rule in ("sparse_adam", "rowwise_adagrad"):
        assert table[rule]["cpu_of_adamw"] < 0.02, table
        assert table[rule]["transient_bytes"] < 0.02 * table["adamw"]["transient_bytes"]
