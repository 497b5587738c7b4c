"""`dsv41 sweep status|retry|best SWEEP`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from launcher import freeze
from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from launcher.sweep.folder import SweepFolder, existing_sweep
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
        for value, point in sweep.measured():
            view = point.view()
            outcome = view.outcome
            ended = {
                "exit_code": None if outcome is None else int(outcome.code),
                "message": "" if outcome is None else outcome.message,
            }
            told = {"point": point.label, "objective": value, **view.to_dict()}
            told["reason"] = point.early or view.reason
            found.append({**told, **ended})
        print(json.dumps(found, indent=1))
        return ExitCode.DONE
    from launcher.sweep.running import draw_sweep
    from launcher.sweep.table import print_table

    print_table(sweep)
    for point in sweep.points():
        view = point.view()
        if view.state == "failed" and view.outcome is not None and view.outcome.message:
            print(f"\n{point.label}:\n  {view.outcome.message.splitlines()[0]}")
            print(f"  Look    dsv41 status {shlex.quote(str(point.folder.path))}")
    if (picture := draw_sweep(sweep)) is not None:
        print(f"\nPlot    {picture}")
    return ExitCode.DONE


def _retry(sweep: SweepFolder, args: argparse.Namespace) -> int:
    left = [p for p in sweep.points() if not (p.folder.finished() or p.early or p.view().active)]
    if not left:
        print("All points are done, stopped early, at work, or in the queue.")
        return ExitCode.DONE
    if freeze.load(left[0].folder.config_file).launcher.kind == "slurm":
        from launcher.sweep.array import enqueue_again

        enqueue_again(sweep, left, say=print)
        return ExitCode.DONE
    from launcher.sweep.running import run_points

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
