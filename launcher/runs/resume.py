"""`dsv41 resume RUN [NAME=VALUE ...]`: go on with a run, or begin a new one where it stands.

Without changes it is the same run: same id, same snapshot of the code, next attempt. So it is with
changes of how it is launched, watched or shown, which its attempts keep from then on; config.yaml
stays as it was made. With others it is a new run, whose lineage.json names its parent and the step,
and which begins with the parent's newest whole checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from launcher import freeze
from launcher.environment import code_digest
from launcher.failures import Terminated, terminable
from launcher.own_packages import HOME
from launcher.problems import ConfigProblems, Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.runs.names import add_run, label, named
from launcher.runs.recorded import Words, changed, with_changes, words_of
from launcher.runs.view import view_of
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Goes on with a run that stopped, failed or was killed. NAME=VALUE of launcher, "
        "resilience, logging or cluster holds for the same run from then on. Any other begins a "
        "new run with the settings of the old one but for those, at its newest whole checkpoint; "
        "the old one stays as it is. Changes with which the checkpoint cannot be used are refused, "
        "all at once. Ends with the exit code of the run."
    )
    add_run(parser)
    parser.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="as for dsv41-train")
    parser.add_argument(
        "--config-dir", metavar="DIR", help="a folder of your own groups (default: that of then)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, all else to stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code of the run."""
    try:
        with terminable(), _standard_output(args.json) as out:
            folder, outcome = _resume(args, out)
            if args.json:
                ended = {**view_of(folder).to_dict(), "exit_code": int(outcome.code)}
                os.write(out, (json.dumps(ended) + "\n").encode())
            return outcome.code
    except Stop as stop:
        message, code = stop.message, stop.code
    except Terminated:
        message, code = "asked to stop; nothing was started.", ExitCode.AGAIN
    except KeyboardInterrupt:
        message, code = "interrupted; nothing was started.", ExitCode.INTERRUPTED
    print(f"dsv41 resume: {message}", file=sys.stderr)
    return code


def _resume(args: argparse.Namespace, out: int) -> tuple[RunFolder, Outcome]:
    from launcher.resume import NOT_COMPARED, as_last, given_now, moved
    from launcher.submit import go_on

    folder = RunFolder(named(args.run, args.runs_dir).path.absolute())
    own = config = as_last(folder)
    old = words_of(folder)
    if args.config_dir is not None:
        old = replace(old, config_dir=os.path.abspath(args.config_dir))
    new = with_changes(old, args.overrides)
    if args.overrides:
        config = changed(own, old, new, named=args.overrides)
    changes = freeze.differences(own, config, skip=NOT_COMPARED)
    if changes:
        return _begin(folder, own, config, new, [*changes, *moved(folder, config)])
    if args.overrides and config == own:
        print(f"{' '.join(args.overrides)} changes nothing.", flush=True)
    _require(config, [])
    if config.launcher.kind == "local" and code_digest(folder.code) != code_digest(HOME):
        print(f"The code has changed since; the run goes on with {folder.code}.", flush=True)
        _as_the_snapshot(folder, args, out)
    if changes := moved(folder, config):
        print("The same run goes on with:", *changes, sep="\n  ", flush=True)
    return folder, go_on(folder, given_now(config, frozen=freeze.load(folder.config_file)))


def _begin(
    parent: RunFolder, own: RunConfig, config: RunConfig, words: Words, changes: Sequence[str]
) -> tuple[RunFolder, Outcome]:
    """A new run at the parent's newest whole checkpoint."""
    from launcher.runs.fitting import misfits
    from launcher.submit import begin_at

    checkpoint = _newest(parent)
    _require(config, misfits(own, config, checkpoint))
    # Beside its parent, wherever that lies now, unless told otherwise.
    home = parent.path.parent.parent
    config = replace(
        config,
        id=config.id if config.id != own.id else None,
        resume="never",
        runs_dir=str(home) if config.runs_dir == own.runs_dir else config.runs_dir,
    )
    print(f"A new run begins with {checkpoint}:", *changes, sep="\n  ", flush=True)
    return begin_at(config, checkpoint, overrides=words.overrides, flags=words.flags)


def _as_the_snapshot(folder: RunFolder, args: argparse.Namespace, out: int) -> NoReturn:
    """This command once more, by the run's own code: a local rank trains in this process."""
    words = [str(folder.path), *args.overrides]
    words += ["--json"] if args.json else []
    words += ["--config-dir", args.config_dir] if args.config_dir else []
    os.dup2(out, 1)
    program = [sys.executable, "-P", "-m", "launcher.tools", "resume", *words]
    os.execve(sys.executable, program, {**os.environ, "PYTHONPATH": str(folder.code)})


def _require(config: RunConfig, against: Sequence[str]) -> None:
    """ConfigProblems with everything that is against a run of `config`, besides what is given."""
    from launcher.validate import broken

    if found := [*against, *(p for p in broken(config) if p not in against)]:
        raise ConfigProblems(found)


def _newest(parent: RunFolder) -> Path:
    from trainer.checkpoint.errors import DamagedCheckpointsError
    from trainer.checkpoint.folders import newest_whole

    try:
        found = newest_whole(parent.path / "checkpoints")
    except DamagedCheckpointsError as error:
        raise Stop(ExitCode.IO_ERROR, str(error)) from error
    if found is None:
        raise Stop(
            ExitCode.CONFIG,
            f"{label(parent)} has no checkpoint to begin with; without changes dsv41 resume starts "
            "it from the beginning, with them dsv41-train does",
        )
    return found


@contextmanager
def _standard_output(kept: bool) -> Iterator[int]:
    """A handle to standard output; while entered, if `kept`, what this process and those that it
    starts print there goes to standard error instead."""
    sys.stdout.flush()
    handle = os.dup(1)
    try:
        if kept:
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr) if kept else nullcontext():
            yield handle
    finally:
        sys.stdout.flush()
        os.dup2(handle, 1)
        os.close(handle)
