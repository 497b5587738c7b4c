"""`dsv41 sweep status|retry|best SWEEP`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from launcher.sweep.folder import SweepFolder, existing_sweep
from launcher.sweep.objective import objective
from trainer.exit_codes import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "status: a table of the points. retry: run again those that are not done, from their last "
        "checkpoints. best: the point with the lowest loss, and the command that trains it."
    )
    parser.add_argument("verb", choices=("status", "retry", "best"))
    parser.add_argument("sweep", type=Path, help="the sweep's folder, RUNS_DIR/NAME-sweep-ID")
    parser.add_argument("--json", action="store_true", help="print JSON (status, best)")


def run(args: argparse.Namespace) -> int:
    """Do what args.verb says; the exit code."""
    try:
        sweep = existing_sweep(args.sweep.absolute())
        with terminable():
            return {"status": _status, "retry": _retry, "best": _best}[args.verb](sweep, args)
    except Stop as stop:
        print(f"dsv41 sweep: {stop.message}", file=sys.stderr)
        return stop.code
    except Terminated:
        return ExitCode.AGAIN


def _status(sweep: SweepFolder, args: argparse.Namespace) -> int:
    if args.json:
        found = []
        for point in sweep.points():
            value = objective(point.folder.path, sweep.metric)
            view = point.view().to_dict()
            found.append({"point": point.label, "objective": value, **view})
        print(json.dumps(found, indent=1))
    else:
        from launcher.sweep.table import print_table

        print_table(sweep)
    return ExitCode.DONE


def _retry(sweep: SweepFolder, args: argparse.Namespace) -> int:
    from launcher.sweep.running import run_points

    left = [p for p in sweep.points() if not p.folder.finished() and not p.folder.is_held()]
    if not left:
        print("All points are done, or at work.")
        return ExitCode.DONE
    return run_points(sweep, left)


def _best(sweep: SweepFolder, args: argparse.Namespace) -> int:
    ranked = sweep.ranked()
    if not ranked:
        raise Stop(ExitCode.USAGE, f"no point of {sweep.path} has a loss yet")
    value, point = ranked[0]
    if args.json:
        told = {"point": point.label, "objective": value, "run": str(point.folder.path)}
        print(json.dumps({**told, "overrides": point.overrides}))
        return ExitCode.DONE
    print(f"{point.label}\nLoss    {value:.4f}\nRun     {point.folder.path}")
    print(f"Train   {shlex.join(['dsv41-train', *point.overrides])}")
    return ExitCode.DONE
