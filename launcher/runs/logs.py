"""`dsv41 logs RUN [-f]`: the log of a rank, followed over rotations and attempts until the end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.problems import Stop
from launcher.run_dir import Attempt, RunFolder
from launcher.runs.listing import state_text
from launcher.runs.names import add_run, label, named
from launcher.runs.view import view_of
from trainer.exit_codes import ExitCode

POLL_S = 0.3
BLOCK = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows the last lines that a rank printed. -f goes on with those that come, through later "
        "attempts too, until the run ends."
    )
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="which rank (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt (default: newest)")
    parser.add_argument(
        "-n", "--lines", type=int, default=40, metavar="N", help="how many lines (default: 40)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object a line: attempt, rank, line"
    )


def run(args: argparse.Namespace) -> int:
    """Print the lines and return the exit code."""
    try:
        _run(args)
    except Stop as stop:
        print(f"dsv41 logs: {stop.message}", file=sys.stderr)
        return stop.code
    return ExitCode.DONE


def _run(args: argparse.Namespace) -> None:
    if args.lines < 0 or args.rank < 0:
        raise Stop(ExitCode.USAGE, "--lines and --rank must be 0 or more")
    folder = named(args.run, args.runs_dir)

    def show(attempt: Attempt, lines: Iterable[str]) -> None:
        for line in lines:
            text = line
            if args.json:
                text = json.dumps({"attempt": attempt.number, "rank": args.rank, "line": line})
            print(text)
        sys.stdout.flush()

    attempt = _attempt(folder, args.attempt, rank=args.rank, wait=args.follow)
    tail = Tail(attempt.log(args.rank))
    show(attempt, tail.last(args.lines))
    if not args.follow:
        show(attempt, tail.rest())
        return
    idle = True
    while True:
        ended = idle and _ended(folder, attempt, later=args.attempt is None)  # before the last look
        lines = tail.more()
        show(attempt, lines)
        idle = not lines
        if ended:
            show(attempt, tail.rest())
            if args.attempt is not None or folder.last_attempt() == attempt.number:
                break
            attempt = folder.attempt(attempt.number + 1)
            tail = Tail(attempt.log(args.rank))
            print(f"== attempt {attempt.number}", file=sys.stderr, flush=True)
        elif idle:
            time.sleep(POLL_S)
    view = view_of(folder)
    print(f"== {view.label}: {state_text(view)}, step {view.step:,}", file=sys.stderr)


def _attempt(folder: RunFolder, number: int | None, *, rank: int, wait: bool) -> Attempt:
    """The attempt to show. Stop 2 when there is none, or it has no such rank."""
    newest = folder.last_attempt()
    if number is None and not newest and wait:
        print(f"{label(folder)} has no attempt yet; waiting for it", file=sys.stderr, flush=True)
        while not (newest := folder.last_attempt()):
            if not view_of(folder).active:
                raise Stop(ExitCode.USAGE, f"{label(folder)} was never started")
            time.sleep(POLL_S)
    if not newest:
        raise Stop(ExitCode.USAGE, f"{label(folder)} has no attempt yet")
    if number is not None and not 1 <= number <= newest:
        raise Stop(
            ExitCode.USAGE, f"--attempt {number}: {label(folder)} has attempts 1 to {newest}"
        )
    attempt = folder.attempt(number or newest)
    while wait and not attempt.log(rank).exists() and not _ended(folder, attempt, later=False):
        time.sleep(POLL_S)
    if not attempt.log(rank).exists():
        ranks = sorted(int(p.stem[5:]) for p in attempt.path.glob("rank-*.log"))
        there = f"it has ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank has a log"
        raise Stop(
            ExitCode.USAGE,
            f"attempt {attempt.number} of {label(folder)} has no log of rank {rank}; {there}",
        )
    return attempt


def _ended(folder: RunFolder, attempt: Attempt, *, later: bool) -> bool:
    """Whether nothing more can come into the logs of `attempt`. later: wait for later attempts."""
    if folder.last_attempt() > attempt.number:
        return True
    view = view_of(folder)
    done = view.attempts[attempt.number - 1].ended is not None
    return not view.active or (done and not later)


class Tail:
    """A log that grows, is cut, or is renamed and begun anew; its older parts end in .1, .2 …"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb") if path.exists() else None
        self._cut = b""

    def last(self, count: int) -> list[str]:
        """The last whole lines that there are; `more` then goes on after them."""
        lines = self.more()
        parts = self._path.parent.glob(f"{self._path.name}.*")
        for part in sorted(parts, key=lambda p: p.stat().st_mtime, reverse=True):
            if len(lines) >= count:
                break
            lines = part.read_bytes().decode("utf-8", "replace").splitlines() + lines
        return lines[len(lines) - min(count, len(lines)) :]

    def more(self) -> list[str]:
        """The whole lines that have come since."""
        lines: list[str] = []
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        if self._file is None:
            return lines
        replaced = self._replaced()  # asked first: what is renamed gets no more lines
        lines += self._read()
        if replaced:
            self._file.close()
            self._file = self._path.open("rb")
            lines += self._read()
        elif os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            lines += self._read()
        return lines

    def rest(self) -> list[str]:
        """What is left at the end, also a line that was cut short."""
        lines = self.more()
        if self._cut:
            lines.append(self._cut.decode("utf-8", "replace"))
            self._cut = b""
        return lines

    def _replaced(self) -> bool:
        assert self._file is not None
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:  # between the renaming and the new one
            return False

    def _read(self) -> list[str]:
        assert self._file is not None
        return list(self._lines(iter(lambda: self._file.read(BLOCK), b"")))  # pyright: ignore

    def _lines(self, blocks: Iterator[bytes]) -> Iterator[str]:
        for block in blocks:
            *whole, self._cut = (self._cut + block).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
