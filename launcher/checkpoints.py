"""`dsv41 checkpoint list|verify|prune`: what a run has saved, whether it is whole, and less of it.

Reads files alone: no model is built and no tensor loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from launcher.run_dir import RunFolder
from launcher.runs.names import add_run, named
from trainer.checkpoint.folders import finished, remove, step_of
from trainer.checkpoint.manifest import ManifestError, damage, read_manifest
from trainer.disk import disk_error, megabytes
from trainer.exit_codes import ExitCode
from trainer.state import TrainState, mesh_text

PATIENCE = 5.0  # seconds of silence while files are read
ACTIONS = {
    "list": "what there is: step, time, size, whether all files are there",
    "verify": "read every byte and name each damaged file",
    "prune": "remove all whole ones but the newest --keep",
}


@dataclass
class Entry:
    """One folder. state: whole, damaged, unfinished (a save that was cut short) or set aside (found
    damaged at a start). verified: whether every byte was read. bytes: as they are on the disk."""

    path: str
    step: int | None
    state: str
    written: str
    bytes: int
    verified: bool = False
    mesh: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        verified = " (verified)" if self.verified and self.state == "whole" else ""
        text = f"{Path(self.path).name:<26} {self.written}  {megabytes(self.bytes):>14}  "
        lines = [f"{text}{self.state}{verified}  {mesh_text(self.mesh)}".rstrip()]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join(
        [
            "Looks after the checkpoints of a run.",
            "",
            *(f"  {name:<8} {purpose}" for name, purpose in ACTIONS.items()),
            "",
            "Exit code: 0 all is well, 2 nothing to look at, 65 a checkpoint is damaged,",
            "73/74 the disk refuses, 78 a process is working on the run (prune).",
        ]
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    add_run(parser, other="its checkpoints/, or one checkpoint (not for prune)")
    parser.add_argument(
        "--keep", type=int, metavar="N", help="prune: how many stay, those read and found whole"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="prune: say what would go, and leave it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Do the action, print, and return the exit code."""
    try:
        with terminable():
            return _run(args)
    except Stop as stop:
        message, code = stop.message, stop.code
    except Terminated:
        message, code = "asked to stop; what is left is as it was.", ExitCode.AGAIN
    except OSError as error:
        place = Path(args.run) if Path(args.run).exists() else args.runs_dir
        failure = disk_error(error, doing="looking after checkpoints", path=place)
        code = ExitCode.IO_ERROR if failure.full else ExitCode.CANNOT_CREATE
        message = str(failure)
    print(f"dsv41 checkpoint {args.action}: {message}", file=sys.stderr)
    return code


def _run(args: argparse.Namespace) -> int:
    if (args.action == "prune") != (args.keep is not None):
        raise Stop(ExitCode.USAGE, "--keep N belongs to prune, which needs it")
    if args.dry_run and args.action != "prune":
        raise Stop(ExitCode.USAGE, "--dry-run belongs to prune")
    if args.action == "prune" and args.keep < 1:
        raise Stop(ExitCode.USAGE, f"--keep={args.keep} must be 1 or more")
    folder = _meant(args.run, args.runs_dir)
    if args.action == "prune":
        return _prune(folder, args)
    verify = args.action == "verify"
    entries = []
    for path in _folders(folder):
        entries.append(_entry(path, verify=verify and step_of(path) is not None))
        if not args.json:
            print(entries[-1].line(), flush=True)
    bad = any(entry.state == "damaged" for entry in entries)
    code = ExitCode.BAD_DATA if verify and bad else ExitCode.DONE
    if verify and not any(entry.verified for entry in entries):
        raise Stop(ExitCode.USAGE, f"{folder} holds no checkpoint to verify")
    if args.json:
        print(json.dumps({"exit_code": code, "checkpoints": [asdict(e) for e in entries]}))
    elif not entries:
        print(f"{folder} has no checkpoint yet")
    return code


def _prune(meant: Path, args: argparse.Namespace) -> int:
    """Newest first: read until `keep` are found whole; whole ones older than those go.

    So one that is kept is known to be good. Damaged ones neither count nor go.
    """
    if step_of(meant) is not None:
        raise Stop(ExitCode.USAGE, f"{meant} is one checkpoint; name its run")
    kept, gone, bad = [], [], []
    with _held(meant) as held:
        folder = _checkpoints(meant)
        for path in reversed(finished(folder)):
            full = len(kept) >= args.keep
            entry = _entry(path, verify=not full)
            (bad if entry.state != "whole" else gone if full else kept).append(entry)
        # Where no lock tells, a folder of this kind may be a save under way.
        leftovers = sorted(folder.glob("step_*.tmp-*")) if held else []
        gone += [_entry(path, verify=False) for path in leftovers]
        if not args.dry_run:
            for entry in gone:
                remove(Path(entry.path))
    code = ExitCode.BAD_DATA if bad else ExitCode.DONE
    if args.json:
        lists = {"kept": kept, "removed": gone, "damaged": bad}
        document = {name: [asdict(e) for e in entries] for name, entries in lists.items()}
        print(json.dumps({"exit_code": code, "dry_run": args.dry_run, **document}))
        return code
    for what, entries in (
        ("kept", kept),
        ("would be removed" if args.dry_run else "removed", gone),
        ("damaged, left alone", bad),
    ):
        for entry in entries:
            print(f"{what}: {entry.line()}")
    print(f"{megabytes(sum(e.bytes for e in gone))} {'to free' if args.dry_run else 'freed'}")
    return code


def _meant(text: str, runs_dir: Path) -> Path:
    """A run's folder, or one of checkpoints, or one checkpoint. Stop 2 when there is none."""
    path = Path(text)
    if path.is_dir() and (
        step_of(path) is not None
        or path.name == "checkpoints"
        or (path / "checkpoints").is_dir()
        or finished(path)
    ):
        return path
    return named(text, runs_dir, other="a folder of checkpoints").path


def _checkpoints(folder: Path) -> Path:
    """The folder of checkpoints of what is meant."""
    is_run = RunFolder(folder).config_file.is_file() or (folder / "checkpoints").is_dir()
    return folder / "checkpoints" if is_run else folder


def _folders(folder: Path) -> list[Path]:
    return [folder] if step_of(folder) is not None else _saves(_checkpoints(folder))


def _saves(place: Path) -> list[Path]:
    others = [p for p in place.glob("step_*") if p.is_dir() and step_of(p) is None]
    return [*finished(place), *sorted(others)]


def entries(folder: Path) -> list[Entry]:
    """What lies in a run's folder of checkpoints, by names and sizes; nothing is read."""
    return [_entry(path, verify=False) for path in _saves(folder)]


def _entry(path: Path, *, verify: bool) -> Entry:
    step = step_of(path)
    problems = []
    if step is not None:
        problems = damage(path, contents=verify, read=_Reading(path).add)
    state = "damaged" if problems else "whole"
    if step is None:
        state = "set aside" if ".damaged-" in path.name else "unfinished"
    try:
        mesh = TrainState.read(path).mesh
    except (OSError, ValueError, TypeError):
        mesh = {}
    return Entry(
        path=str(path),
        step=step,
        state=state,
        written=f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d %H:%M:%SZ}",
        bytes=sum(f.stat().st_size for f in path.rglob("*") if f.is_file()),
        verified=verify,
        mesh=mesh,
        problems=problems,
    )


class _Reading:
    """Speaks up now and then while a checkpoint is read."""

    def __init__(self, path: Path) -> None:
        try:
            self._total = sum(entry.size for entry in read_manifest(path).values())
        except ManifestError:
            self._total = 0
        self._name = path.name
        self._done = 0
        self._told = time.monotonic()

    def add(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._told >= PATIENCE:
            self._told = time.monotonic()
            share = f"{100 * self._done / max(self._total, 1):.0f} % of {megabytes(self._total)}"
            print(f"{self._name}: read {share}", file=sys.stderr, flush=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Keep other processes off the run while something of it is removed; False if it is none."""
    run = RunFolder(folder.parent if folder.name == "checkpoints" else folder)
    if not run.config_file.is_file():
        yield False
        return
    with run.held() as ours:
        if not ours:
            raise Stop(
                ExitCode.CONFIG,
                f"another process is working on {run.path}; wait until it ends. It keeps the "
                "newest checkpoint.keep by itself",
            )
        yield True
