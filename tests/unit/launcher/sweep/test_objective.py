"""How good a point is, from its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.sweep.objective import objective

STEPS = [{"step": n, "loss": float(n)} for n in range(1, 21)]
EVALUATED = [{"step": 10, "eval_loss": 7.0}, {"step": 20, "eval_loss": 5.0}]


def written(folder: Path, *records: dict, tail: str = "") -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


@pytest.mark.parametrize(
    ("metric", "records", "expected"),
    [
        ("auto", [*STEPS, *EVALUATED], 5.0),
        ("auto", STEPS, 15.5),
        ("loss", [*STEPS, *EVALUATED], 15.5),
        ("eval_loss", STEPS, None),
        ("auto", [{"step": 1, "loss": None}], None),
        ("auto", [], None),
    ],
)
def test_what_counts(tmp_path: Path, metric: str, records: list[dict], expected) -> None:
    assert objective(written(tmp_path, *records), metric) == expected


def test_a_line_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    assert objective(written(tmp_path, *STEPS, tail='{"step": 21, "lo'), "loss") == 15.5


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert objective(tmp_path, "auto") is None
