"""One line a case: worst figures, exact counts, what failed."""

from __future__ import annotations

import json
import math

from launcher.verify.gates import Check
from launcher.verify.report import Report

GRADIENTS = [
    Check("gradients", "layers.0.attn.wkv.weight", 2e-6, True, "at most 2e-05"),
    Check("gradients", "layers.3.engram.q_weight", 3.4e-5, True, "at most 1e-04"),
]
ROWS = [
    Check("rows", "engram_rows.1", 0, True, "exact", 400),
    Check("rows", "engram_rows.3", 2, False, "exact", 400),
]


def test_passing_line_names_the_worst_tensor() -> None:
    line = Report.of("tiny", "model", GRADIENTS, seconds=1.0).line(width=8)
    assert line == "tiny      pass     gradients 3.4e-05 (layers.3.engram.q_weight)"


def test_failing_line_names_the_gate_and_the_tensor() -> None:
    line = Report.of("tiny", "model", GRADIENTS + ROWS, seconds=1.0).line(width=4)
    assert line.startswith("tiny  FAIL ")
    assert "rows 798/800" in line
    assert line.endswith("| failed: rows engram_rows.3: 2 of 400 differ, exact")


def test_long_lists_of_failures_are_cut() -> None:
    failed = [Check("gradients", f"w{i}", 1.0, False, "at most 2e-05") for i in range(9)]
    line = Report.of("tiny", "model", failed, seconds=1.0).line(width=4)
    assert "w2: 1.0e+00, at most 2e-05; and 6 more" in line
    assert "w3:" not in line


def test_not_a_number_is_the_worst_of_all() -> None:
    checks = [
        Check("gradients", "a", 1e30, False, "at most 2e-05"),
        Check("gradients", "b", math.nan, False, "at most 2e-05"),
    ]
    report = Report.of("tiny", "model", checks, seconds=1.0)
    assert "gradients nan (b)" in report.line(width=4)
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["worst"]["gradients"]["subject"] == "b"
    assert document["worst"]["gradients"]["error"] is None
    assert [c["subject"] for c in document["failed"]] == ["a", "b"]


def test_no_comparison_is_no_pass() -> None:
    report = Report.of("tiny", "model", [], seconds=0.1)
    assert report.status == "FAIL"
    assert "nothing to compare" in report.line(width=4)
