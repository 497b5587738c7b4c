"""Every benchmark starts as the command that the README names, from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_benchmark_says_how_it_is_used(program: Path, tmp_path: Path) -> None:
    """Python puts benchmarks/ first on the path: a file there must not hide one of our packages."""
    ended = subprocess.run(
        [sys.executable, str(program), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "--json" in ended.stdout
