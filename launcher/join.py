"""`dsv41 join RUN --node K`: this machine's share of a run that another one supervises.

It starts an agent for each attempt that the first node begins, and ends with the run. Nothing is
decided here: the runs' folder, which all nodes share, says what goes on. A SIGTERM leads to a
checkpoint of all ranks, and to the end of this command; the run then waits for another node.
"""

from __future__ import annotations

import argparse
import sys
import time

from launcher.backends.torchrun import join, meeting_file
from launcher.decide import Next
from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from launcher.run_dir import Attempt, RunFolder
from launcher.runs.names import add_run, named
from trainer.exit_codes import ExitCode

LOOK_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--node", type=int, required=True, help="this machine's number, from 1; the first node is 0"
    )


def run(args: argparse.Namespace) -> int:
    try:
        folder = RunFolder(named(args.run, args.runs_dir).path.absolute())
        with terminable():
            return _follow(folder, args.node)
    except Stop as stop:
        print(f"dsv41 join: {stop.message}", file=sys.stderr)
        return stop.code
    except Terminated:
        return ExitCode.AGAIN


def _follow(folder: RunFolder, node: int) -> int:
    done = 0
    while True:
        attempt = _next_attempt(folder, after=done)
        if attempt is None:
            return ExitCode.DONE
        done = attempt.number
        print(f"Attempt {done}: starting the ranks of node {node}.", flush=True)
        agent = join(folder, attempt, node=node)
        try:
            while agent.poll() is None and attempt.ending() is None:
                time.sleep(LOOK_SECONDS)
        except Terminated:
            print("Told to end: after this step, with a checkpoint.", flush=True)
            agent.tell()
            while agent.poll() is None:
                time.sleep(LOOK_SECONDS)
            raise
        finally:
            agent.kill()


def _next_attempt(folder: RunFolder, *, after: int) -> Attempt | None:
    """The next attempt that takes several nodes and goes on; None when the run has ended."""
    while True:
        last = folder.last_attempt()
        attempt = folder.attempt(last)
        ending = attempt.ending() if last else None
        if last > after and ending is None and meeting_file(attempt).is_file():
            return attempt
        if ending is not None and ending != Next.AGAIN.value:
            return None
        time.sleep(LOOK_SECONDS)
