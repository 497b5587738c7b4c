"""A validated run -> its folder, an attempt in this process, and the closing lines."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from data.cache.prepare import PreparedSource
from launcher.data_tools.prepare import prepared
from launcher.environment import code_digest
from launcher.messages import closing
from launcher.own_packages import HOME
from launcher.problems import Stop
from launcher.resume import continued, open_run
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, NewRun, RunFolder
from launcher.worker import run_here
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

# Ends that, when a new run has done nothing yet, leave nothing worth keeping.
COULD_NOT_BEGIN = (
    ExitCode.BAD_DATA,
    ExitCode.CANNOT_CREATE,
    ExitCode.IO_ERROR,
    ExitCode.CONFIG,
)


def submit(config: RunConfig, *, overrides: Sequence[str], flags: Sequence[str] = ()) -> Outcome:
    """Run `config` to its end, in its folder, telling a person where everything is.

    overrides: what was given at the command line, kept in the run's folder. flags: options of the
    command that belong to them (--config-dir). Returns the outcome, also of a refusal.
    """
    command = [*command_words(sys.argv[0]), *flags, *overrides]
    try:
        sources = prepared(config)  # before there is a run, and before any process group
        with ExitStack() as held:
            run = open_run(config, overrides=overrides, held=held, say=_say)
            if isinstance(run, NewRun):
                return _attempt(run.folder, run.config, sources, command, new=run)
            return _attempt(run, continued(run, config), sources, command)
    except Stop as stop:
        print(f"dsv41-train: {stop.message}", file=sys.stderr, flush=True)
        return Outcome(code=stop.code, reason="not started", step=0, message=stop.message)


def _attempt(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    command: Sequence[str],
    *,
    new: NewRun | None = None,
) -> Outcome:
    attempt = _begin(folder, config, sources)
    outcome = run_here(config, folder, attempt)
    if new is not None and outcome.code in COULD_NOT_BEGIN and folder.is_bare():
        new.discard()
        print(f"dsv41-train: {outcome.message}", file=sys.stderr, flush=True)
        return outcome
    attempt.event("end", **outcome.to_dict())
    text = closing(
        outcome, config, folder=folder, attempt=attempt, plot=_plot(folder), command=command
    )
    print(text, file=sys.stdout if outcome.code == ExitCode.DONE else sys.stderr, flush=True)
    return outcome


def _begin(folder: RunFolder, config: RunConfig, sources: Sequence[PreparedSource]) -> Attempt:
    """A new attempt, and this process ready to run it."""
    here = code_digest(HOME)
    try:
        attempt = folder.new_attempt()
        attempt.write_sources(sources)
        attempt.event(
            "start",
            backend=config.launcher.kind,
            ranks=config.launcher.ranks,
            host=socket.gethostname(),
            pid=os.getpid(),
            code_sha256=here,
        )
    except OSError as error:
        raise Stop(
            ExitCode.CANNOT_CREATE,
            f"Cannot begin an attempt in {folder.attempts}: {error.strerror}.\n"
            "Make room there, or make it writable.",
        ) from error
    if code_digest(folder.code) != here:
        _say(f"The code has changed since the run was made; this attempt runs {HOME}.")
    # For all processes that this one starts: a user's own data/ must not shadow ours in them.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = str(folder.code)
    return attempt


def _plot(folder: RunFolder) -> Path | None:
    """The picture of the run's metrics, drawn now; None when there is nothing to draw."""
    from trainer.plot import draw, load_curves

    picture = folder.plots / "metrics.png"
    try:
        draw([load_curves(folder.path)], picture)
    except (ValueError, OSError, KeyboardInterrupt):  # no step yet, a full disk, an impatient user
        return None
    return picture


def command_words(program: str) -> list[str]:
    """How to start this command again from here, `program` being sys.argv[0]."""
    path = Path(program).absolute()
    if path.suffix == ".py":  # python -m
        return [sys.executable, "-m", "launcher.cli"]
    on_path = shutil.which(path.name)
    if on_path is not None and Path(on_path).resolve() == path.resolve():
        return [path.name]
    here = Path.cwd()
    return [str(path.relative_to(here) if path.is_relative_to(here) else path)]


def _say(text: str) -> None:
    print(text, flush=True)
