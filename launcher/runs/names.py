"""Which run a person means: its folder, NAME/ID, ID, or NAME for the newest of that name."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from launcher.problems import Stop
from launcher.run_dir import RunFolder
from trainer.exit_codes import ExitCode

HELP = "a run's folder, NAME/ID, an ID, or NAME for its newest run"


def add_run(parser: argparse.ArgumentParser, *, other: str = "") -> None:
    """The arguments that name a run, for `named`. other: what may stand there instead."""
    parser.add_argument("run", metavar="RUN", help=f"{HELP}; or {other}" if other else HELP)
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where RUN is looked for (default: runs)",
    )


def all_runs(folder: Path) -> list[RunFolder]:
    """The runs in a folder of runs, or in that of one name, newest first."""
    files = [*folder.glob("*/*/config.yaml"), *folder.glob("*/config.yaml")]
    found = []
    for file in files:
        run = RunFolder(file.parent)
        if not file.parent.name.startswith(".") and run.attempts.is_dir():
            found.append((file.stat().st_mtime_ns, run.path.name, run))
    return [run for *_, run in sorted(found, key=lambda f: f[:2], reverse=True)]


def label(folder: RunFolder) -> str:
    """NAME/ID."""
    path = folder.path.absolute()
    return f"{path.parent.name}/{path.name}"


def named(text: str, runs_dir: Path, *, other: str = "") -> RunFolder:
    """The run that `text` names. Stop 2 when it names none, with what may have been meant; other:
    what else the caller would have taken."""
    what = f"no run's folder, nor {other}" if other else "no run's folder"
    folder = RunFolder(Path(text))
    if folder.config_file.is_file():
        return folder
    if any(folder.path.glob("*/config.yaml")) and (own := all_runs(folder.path)):
        return own[0]  # runs_dir/NAME
    runs = all_runs(runs_dir)
    meant = text.strip("/")
    if not runs:
        there = "holds no run" if runs_dir.is_dir() else "does not exist"
        raise Stop(
            ExitCode.USAGE,
            f"{text} is {what}, and {runs_dir} {there}; name a run's folder, or the "
            "folder of runs with --runs-dir",
        )
    by_label = {label(run): run for run in runs}
    if meant in by_label:
        return by_label[meant]
    with_id = [run for run in runs if run.path.name == meant]
    if len(with_id) == 1:
        return with_id[0]
    if with_id:
        several = ", ".join(label(run) for run in with_id)
        raise Stop(ExitCode.USAGE, f"{text} names {len(with_id)} runs; use one of {several}")
    for run in runs:
        if run.path.parent.name == meant:
            return run
    known = [*by_label, *(run.path.name for run in runs)]
    known += dict.fromkeys(run.path.parent.name for run in runs)
    near = difflib.get_close_matches(meant, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the newest is {label(runs[0])}"
    what = f"{what}, nor" if other else "no"
    raise Stop(ExitCode.USAGE, f"{text} is {what} run in {runs_dir}; {hint} (dsv41 runs lists all)")
