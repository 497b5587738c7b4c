"""How good a run is, in one number."""

from __future__ import annotations

from pathlib import Path

from trainer.metrics import read_metrics

LAST_STEPS = 10  # single steps are noisy; so many are averaged


def objective(run: Path, metric: str) -> float | None:
    """The last eval_loss of a run, or the mean loss of its last steps; None without any.

    metric: eval_loss, loss, or auto for the first of them that there is.
    """
    losses: list[float] = []
    evaluated = None
    file = run / "metrics.jsonl"
    for record in read_metrics(file) if file.exists() else []:
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
