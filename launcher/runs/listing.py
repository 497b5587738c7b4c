"""`dsv41 runs [FOLDER]`: a table of all runs, newest first."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.problems import Stop
from launcher.runs.names import all_runs
from launcher.runs.text import age, aligned, number
from launcher.runs.view import RunView, view_of
from trainer.exit_codes import ExitCode

TITLES = ("run", "state", "step", "loss", "tokens/s", "age", "attempts", "parent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the runs in a folder, or those of one name, newest first."
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="runs_dir, or runs_dir/NAME (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    folder: Path = args.folder
    try:
        if not folder.is_dir():
            raise Stop(
                ExitCode.USAGE, f"{folder} does not exist; name the folder that holds the runs"
            )
        runs = [view_of(run) for run in all_runs(folder)]
    except Stop as stop:
        print(f"dsv41 runs: {stop.message}", file=sys.stderr)
        return stop.code
    if args.json:
        print(json.dumps({"runs": [run.to_dict() for run in runs]}))
    elif not runs:
        print(f"{folder} holds no run yet; dsv41-train +experiment=tiny makes one")
    else:
        print("\n".join(table(runs)))
    return ExitCode.DONE


def table(runs: Sequence[RunView]) -> list[str]:
    """One line a run, below the titles."""
    now = time.time()
    rows = [
        (
            run.label,
            state_text(run),
            f"{run.step:,}/{'?' if run.total is None else f'{run.total:,}'}",
            number(run.last.get("loss"), "{:.3f}"),
            number(run.last.get("tokens_per_s"), "{:,.0f}"),
            age(now - run.created),
            str(len(run.attempts)),
            parent_text(run),
        )
        for run in runs
    ]
    return aligned([TITLES, *rows], right=range(2, 7))


def state_text(run: RunView) -> str:
    """The state in a few words: `failed: disk full`, `waiting in slurm job 12`."""
    if run.state == "failed":
        return f"failed: {run.reason}"
    if run.state == "waiting":
        return f"waiting in {run.reason}"
    return run.state


def parent_text(run: RunView) -> str:
    """The run that this one began with, as NAME/ID and the step; empty without one."""
    if run.lineage is None:
        return ""
    parent = Path(run.lineage["parent"])
    return f"{parent.parent.name}/{parent.name} at {run.lineage['step']:,}"
