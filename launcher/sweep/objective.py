"""How good a run is, in one number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAST_STEPS = 10  # single steps are noisy; so many are averaged


def objective(run: Path, metric: str) -> float | None:
    """The last eval_loss of a run, or the mean loss of its last steps; None without any.

    metric: eval_loss, loss, or auto for the first of them that there is.
    """
    losses: list[float] = []
    evaluated = None
    for record in _records(run / "metrics.jsonl"):
        if isinstance(record.get("loss"), float):
            losses.append(record["loss"])
        if isinstance(record.get("eval_loss"), float):
            evaluated = record["eval_loss"]
    if metric != "loss" and evaluated is not None:
        return evaluated
    if metric == "eval_loss" or not losses:
        return None
    last = losses[-LAST_STEPS:]
    return sum(last) / len(last)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # the last one, half written
            return
