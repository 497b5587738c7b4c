"""How good a run is, in one number."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from trainer.metrics import Record, read_metrics

LAST_STEPS = 10  # single steps are noisy; so many are averaged


class Measure:
    """How good a run is after the records that were added so far, the lower the better.

    The last eval_loss, or the mean loss of the last steps. metric: eval_loss, loss, or auto for
    the first of them that there is.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._losses: deque[float] = deque(maxlen=LAST_STEPS)
        self._evaluated: float | None = None

    def add(self, record: Record) -> bool:
        """Whether the record says something new of how good the run is."""
        evaluated = record.get("eval_loss")
        if isinstance(evaluated, float):
            self._evaluated = evaluated
            return self._metric != "loss"
        if not isinstance(record.get("loss"), float):
            return False
        self._losses.append(record["loss"])
        return self._metric == "loss" or (self._metric == "auto" and self._evaluated is None)

    @property
    def value(self) -> float | None:
        """None when there was nothing to measure."""
        if self._metric != "loss" and self._evaluated is not None:
            return self._evaluated
        if self._metric == "eval_loss" or not self._losses:
            return None
        return sum(self._losses) / len(self._losses)


class Ladder:
    """How good a run was at each of the steps `rungs`, or where it first had a value past it."""

    def __init__(self, metric: str, rungs: Sequence[int]) -> None:
        self.measure = Measure(metric)
        self._rungs = sorted(rungs)
        self._last = (0, False)

    def add(self, record: Record) -> tuple[int, float] | None:
        """The step and value with which a rung is reached by this record, if one is. What a resumed
        run repeats is known already."""
        step = record["step"]
        place = (step, "eval_loss" in record)  # the evaluation of a step follows its loss
        if place <= self._last:
            return None
        self._last = place
        new, value = self.measure.add(record), self.measure.value
        if not new or value is None or not self._rungs or step < self._rungs[0]:
            return None
        self._rungs = [rung for rung in self._rungs if rung > step]
        return step, value


def objective(run: Path, metric: str) -> float | None:
    """How good a run is by its metrics, see `Measure`; None when it has none."""
    file = run / "metrics.jsonl"
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return _value(file, metric, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=4096)
def _value(file: Path, metric: str, state: tuple[int, ...]) -> float | None:
    """A live table asks for all points each second, and most of them do not change. state: of the
    file."""
    measure = Measure(metric)
    for record in read_metrics(file):
        measure.add(record)
    return measure.value
