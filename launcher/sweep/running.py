"""Points that are to run -> the pool, the table, the picture, and the closing lines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import freeze
from launcher.sweep.folder import Point, SweepFolder
from launcher.sweep.pool import Pool
from launcher.sweep.table import LiveTable, print_table
from trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.sweep.tune.pool import TunedPool

LAST_LINES = 4  # of a failed point's output


def run_points(
    sweep: SweepFolder, points: Sequence[Point], *, first: bool = True, last: bool = True
) -> int:
    """Run them; the exit code: that of the last one that failed, or 0. first, last: whether they
    are the first of this command, and the last, so that its opening and closing lines are due.

    A point that was stopped early has not failed. Stop 78 when there is no cluster for them.
    """
    if first:
        print(f"Sweep   {sweep.path}", flush=True)
    with LiveTable(sweep, total=len(points)) as shown:
        pool = _pool(sweep, points, changed=shown.changed)
        codes = pool.run()
    failed = [p for p in points if codes.get(p.folder.path) != ExitCode.DONE and not p.early]
    if last or pool.stopped is not None:
        tell_end(sweep)
    for point in failed:
        if point.folder.path in codes:
            _tell(point)
    if pool.lost:
        print(f"\n{pool.lost}", file=sys.stderr)
    if failed:
        print(f"Again   dsv41 sweep retry {sweep.path}", file=sys.stderr, flush=True)
    if pool.stopped is not None:
        return ExitCode.INTERRUPTED if pool.stopped == signal.SIGINT else ExitCode.AGAIN
    if pool.lost:
        return ExitCode.AGAIN
    return codes[failed[-1].folder.path] if failed else ExitCode.DONE


def tell_end(sweep: SweepFolder) -> None:
    """The closing lines: the table, unless it is on the screen, the plot, and what is next."""
    if not sys.stdout.isatty():
        print()
        print_table(sweep)
    if (picture := draw_sweep(sweep)) is not None:
        print(f"Plot    {picture}")
    print(f"Best    dsv41 sweep best {sweep.path}", flush=True)


def _pool(
    sweep: SweepFolder,
    points: Sequence[Point],
    *,
    changed: Callable[[Point | None, int | None], None],
) -> Pool | TunedPool:
    if freeze.load(points[0].folder.config_file).sweep.scheduler is None:
        return Pool(points, sweep.concurrency or 1, changed=changed)
    from launcher.sweep.tune.pool import TunedPool

    return TunedPool(sweep, points, changed=changed)


def _tell(point: Point) -> None:
    """The last lines of a failed point, and where the others are."""
    lines = [line for line in point.log.read_text("utf-8", errors="replace").splitlines() if line]
    told = [f"  {line}" for line in lines[-LAST_LINES:]]
    print(f"\n{point.label}:", *told, f"  Log     {point.log}", sep="\n", file=sys.stderr)


def draw_sweep(sweep: SweepFolder) -> Path | None:
    """All points' curves in one picture; None when there is nothing to draw."""
    from dataclasses import replace

    from trainer.plot import draw, load_curves

    curves = []
    for point in sweep.points():
        try:
            curves.append(replace(load_curves(point.folder.path), label=point.label))
        except ValueError:  # no step yet
            continue
    if not curves:
        return None
    try:
        draw(curves, sweep.picture)
    except OSError:
        return None
    return sweep.picture
