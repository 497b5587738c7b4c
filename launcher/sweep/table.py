"""A sweep as a table: live on a terminal, a line a change elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.runs.view import RunView
from launcher.sweep.folder import Point, SweepFolder
from launcher.sweep.objective import objective

REFRESH_SECONDS = 1.0
WIDTH = 400  # columns of a table that goes to no terminal


def table_of(sweep: SweepFolder) -> Table:
    """One row a point: its state, how far it is, how good it is."""
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", sweep.metric.replace("auto", "loss"), "point"):
        table.add_column(name, justify="right" if name not in ("run", "state", "point") else "left")
    measured = sweep.measured()
    found = [value for value, point in measured if value is not None and not point.early]
    best = min(found, default=None)
    for value, point in measured:
        view = point.view()
        step = f"{view.last.get('step', 0)}/{view.total or '?'}"
        shown = "" if value is None else f"{value:.4f}"
        if value is not None and value == best:
            shown, best = f"{shown} *", None  # the first of equal ones
        # As Text: a list like [a.txt] would be taken for markup, and vanish.
        table.add_row(
            point.folder.path.name, Text(point.state(view)), step, shown, Text(point.label)
        )
    return table


class LiveTable:
    """What the pool tells, shown while entered."""

    def __init__(self, sweep: SweepFolder, *, total: int) -> None:
        self._sweep, self._total, self._begun = sweep, total, 0
        self._live = None
        if sys.stdout.isatty():
            self._live = Live(
                get_renderable=lambda: table_of(sweep), refresh_per_second=1 / REFRESH_SECONDS
            )

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, point: Point | None, code: int | None) -> None:
        """Say that a point has begun (code None) or ended; on a terminal the table shows it."""
        if self._live is not None or point is None:
            return
        if code is None:
            self._begun += 1
            print(f"Point {self._begun} of {self._total}: {point.label}", flush=True)
        else:
            self.ended(point, point.view())

    def ended(self, point: Point, view: RunView) -> None:
        """Say how a point ended."""
        if self._live is not None:
            return
        value = objective(point.folder.path, self._sweep.metric)
        good = f", loss {value:.4f}" if value is not None else ""
        print(f"{point.label}: {point.state(view)}{good}", flush=True)


def print_table(sweep: SweepFolder) -> None:
    """On a terminal in its width, elsewhere one line a point."""
    width = None if sys.stdout.isatty() else WIDTH
    Console(width=width, soft_wrap=width is not None).print(table_of(sweep))
