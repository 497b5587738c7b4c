"""The loading benchmark runs and reports every part beside its baseline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_part_has_figures_and_a_baseline(tmp_path):
    sizes = ["--megabytes", "0.1", "--documents", "3000", "--packs", "4", "--workers", "1"]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "loading.py"), "--json", *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    report = json.loads(ended.stdout)
    assert set(report) == {"prepare", "plan", "hash", "loader"}
    for figures in report.values():
        assert any(name.startswith("baseline_") for name in figures)
        assert all(value >= 0 for value in figures.values())
    assert report["plan"]["of_it_alignment_slots_align_1"] == 0
