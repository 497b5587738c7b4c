"""What a person sees while a run goes on: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from trainer.metrics import Record

Say = Callable[[str], None]


class ProgressView(Protocol):
    """Shows records as they are logged, and other messages without tearing the display."""

    def show(self, record: Record) -> None:
        """Show the record of a training step."""
        ...

    def say(self, text: str) -> None:
        """Show a message."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found."""
        ...


class LineProgress:
    """One readable line per record, for pipes and log files."""

    def __init__(self, *, steps: int, say: Say) -> None:
        self._steps = steps
        self._say = say

    def show(self, record: Record) -> None:
        width = len(str(self._steps))
        self._say(f"step {record['step']:>{width}}/{self._steps}  {summary(record, self._steps)}")

    def say(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        pass


class BarProgress:
    """One live bar; messages scroll by above it."""

    def __init__(self, *, steps: int, first_step: int, console: Console | None = None) -> None:
        self._steps = steps
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=console or Console(),
        )
        self._task: TaskID = self._bar.add_task("starting", total=steps, completed=first_step - 1)
        self._bar.start()

    def show(self, record: Record) -> None:
        self._bar.update(
            self._task, completed=record["step"], description=summary(record, self._steps)
        )

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def summary(record: Record, steps: int) -> str:
    """Loss, speed, learning rate and time left of one step's record, in one line."""
    loss = "   n/a" if record["loss"] is None else f"{record['loss']:6.3f}"
    left = (steps - record["step"]) * record["step_s"]
    return (
        f"loss {loss}  {record['tokens_per_s']:7,.0f} tokens/s  "
        f"lr {record['lr']:.2e}  {duration(left)} left"
    )


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m 05s or 2h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
