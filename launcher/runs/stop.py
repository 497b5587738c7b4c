"""`dsv41 stop RUN`: ask a run to save a checkpoint and end, wait for it, and say how it ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.backends.slurm.tools import SlurmError, slurm
from launcher.problems import Stop
from launcher.run_dir import RunFolder
from launcher.runs.listing import state_text
from launcher.runs.names import add_run, label, named
from launcher.runs.text import as_typed
from launcher.runs.view import RunView, is_worked_on, read_json, view_of
from trainer.disk import put_text
from trainer.exit_codes import ExitCode
from trainer.signals import request_stop

POLL_S = 0.3
TELL_S = 15.0  # between two lines about what it still does
AGAIN_S = 0.2  # between two signals of --now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Asks a run to finish its step, save a checkpoint and end, and waits until it has. Works "
        "from every machine that sees the run's folder. A run that waits in Slurm's queue is taken "
        "out of it. dsv41 resume goes on later."
    )
    add_run(parser)
    parser.add_argument(
        "--now", action="store_true", help="leave at once, without a checkpoint of this moment"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Stop the run and return the exit code: 0 once nothing works on it any more."""
    try:
        folder = named(args.run, args.runs_dir)
        view = view_of(folder)
        if view.state == "waiting":
            stopped = dequeue(view)
        elif not view.active and not view.may_return:
            raise Stop(ExitCode.USAGE, f"{view.label} is not running ({state_text(view)})")
        else:
            stopped = stop(folder, now=args.now, lost=view.may_return, quiet=args.json)
    except Stop as failure:
        print(f"dsv41 stop: {failure.message}", file=sys.stderr)
        return failure.code
    if args.json:
        print(json.dumps({**stopped.to_dict(), "exit_code": 0}))
    else:
        print(f"{stopped.label}: {state_text(stopped)}, step {stopped.step:,}")
        if stopped.state != "done":
            print(f"Resume  dsv41 resume {as_typed(folder.path)}")
    return ExitCode.DONE


def dequeue(view: RunView) -> RunView:
    """Take a run's job, which has not begun or is to come back, out of the queue. Stop 78 with
    Slurm's words when it does not let us."""
    known = read_json(view.folder.submitted_file)
    job = str(known["job"])
    try:
        slurm("scancel", job)
    except SlurmError as error:
        raise Stop(
            ExitCode.CONFIG,
            f"{view.label} is {state_text(view)}, which does not let go of it: {error}\n"
            f"Try on a login node of the cluster: scancel {job}",
        ) from error
    put_text(view.folder.submitted_file, json.dumps({**known, "cancelled": True}) + "\n")
    return view_of(view.folder)


def stop(folder: RunFolder, *, now: bool, lost: bool, quiet: bool) -> RunView:
    """Ask, wait until nothing works on the run, and look at it.

    lost: nothing does, but a supervisor that is started again finds what was asked of the attempt
    before it.
    """
    told, signalled = time.monotonic(), -math.inf
    holder = Holder.of(folder) if now else None
    asked = 0
    while is_worked_on(folder) or (lost and not asked):
        newest = folder.last_attempt()
        if newest > asked:  # also one that was begun while we waited
            attempt = folder.attempt(newest)
            request_stop(attempt.stop_file, ExitCode.INTERRUPTED, why="dsv41 stop", now=now)
            if not asked and not quiet:
                print(_asked(folder, now=now, lost=lost), file=sys.stderr, flush=True)
            asked = newest
        if holder is not None and time.monotonic() - signalled >= AGAIN_S:
            signalled = time.monotonic()
            holder.interrupt()
        if not quiet and time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            view = view_of(folder)
            print(f"still {view.reason}, step {view.step:,}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    return view_of(folder)


def _asked(folder: RunFolder, *, now: bool, lost: bool) -> str:
    if lost:
        return f"asked {label(folder)}, which is lost: if its supervisor is started again, it ends"
    if now:
        return f"asked {label(folder)} to leave at once"
    return (
        f"asked {label(folder)} to stop after the step under way, with a checkpoint; waiting "
        "(Ctrl-C ends the waiting, not the stopping)"
    )


@dataclass(frozen=True)
class Holder:
    """The process on this machine that is itself the only rank of a run, which in the middle of a
    step only a signal reaches. A supervisor reads the stop file at any time."""

    pid: int
    folder: Path

    @classmethod
    def of(cls, folder: RunFolder) -> Holder | None:
        """None when there is no such process, or it is on another machine."""
        last = folder.last_attempt()
        known = next(iter(folder.attempt(last).events()), {}) if last else {}
        if known.get("backend") != "local" or known.get("host") != socket.gethostname():
            return None
        holder = cls(int(str(known.get("pid", 0))), folder.path.resolve())
        return holder if holder.holds() else None

    def holds(self) -> bool:
        """Whether the process has the run's folder open, as one that works on it does; a process
        number may have been given out again."""
        files = Path(f"/proc/{self.pid}/fd")
        with contextlib.suppress(OSError):
            return any(os.path.realpath(file) == str(self.folder) for file in files.iterdir())
        return False

    def interrupt(self) -> None:
        """Send it what Ctrl-C sends."""
        if self.holds():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)
