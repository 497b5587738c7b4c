"""Which points are worth their time: Ray Tune's asynchronous successive halving.

As in "A System for Massively Parallel Hyperparameter Tuning" (Li and others, 2020): a point that
reaches a rung and is not among the best 1 / reduction of those that have reached it by then ends
there. Nobody waits for the others, so the first ones always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from launcher.config import AshaConfig
from launcher.sweep.objective import Ladder
from trainer.metrics import Record

STEP, OBJECTIVE, POINT = "step", "objective", "point"  # in results, and in a trial's parameters


@dataclass
class Earlier:
    """A point that has been trained before, as far as a scheduler asks a trial."""

    trial_id: str
    config: dict[str, Any] = field(default_factory=dict)


class Asha(ASHAScheduler):
    """Ends no trial: it asks for the end of its point, which then takes its time to save.

    ask: told a point's name and the step at which others were better.
    """

    def __init__(self, config: AshaConfig, *, steps: int, ask: Callable[[str, int], None]) -> None:
        rungs = config.rungs(steps)
        super().__init__(
            time_attr=STEP,
            metric=OBJECTIVE,
            mode="min",
            max_t=max(steps, rungs[0]),
            grace_period=rungs[0],
            reduction_factor=config.reduction,
            stop_last_trials=False,  # at max_t the run ends by itself
        )
        self._ask = ask
        self._asked: set[str] = set()

    def remember(self, point: str, records: Iterable[Record], ladder: Ladder) -> None:
        """Compare others with a point that is not a trial now, by its metrics."""
        trial: Any = Earlier(f"earlier {point}")
        self.on_trial_add(None, trial)  # pyright: ignore[reportArgumentType]
        for record in records:
            if reached := ladder.add(record):
                result = {STEP: reached[0], OBJECTIVE: reached[1]}
                super().on_trial_result(None, trial, result)  # pyright: ignore

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        if trial.trial_id not in self._asked:
            decision = super().on_trial_result(tune_controller, trial, result)
            if decision == TrialScheduler.STOP:
                self._asked.add(trial.trial_id)
                self._ask(trial.config[POINT], result[STEP])
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        """A point's last value is compared with nothing: rungs have theirs."""
