"""A validated run -> its folder, attempts here or under a supervisor, and the closing lines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from data.cache.prepare import PreparedSource
from launcher import freeze
from launcher.backends.ray import attach
from launcher.backends.slurm import queue
from launcher.data_tools.prepare import prepared
from launcher.environment import code_digest
from launcher.lineage import inherit
from launcher.messages import closing
from launcher.own_packages import HOME
from launcher.problems import Stop
from launcher.resume import continued, given_now, named_again, open_run
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, NewRun, RunFolder, create
from launcher.supervisor import begin_attempt, supervise
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
    slurm = config.launcher.kind == "slurm"
    try:
        if slurm and config.launcher.slurm.dry_run:
            _say(queue.preview(config))
            return Outcome(ExitCode.DONE, "shown", 0)
        if slurm:
            queue.check(config)
        if (old := named_again(config)) is not None:
            wanted = continued(old, given_now(config, frozen=freeze.load(old.config_file)))
            if (outcome := _followed(old, wanted, command)) is not None:
                return outcome
        sources = prepared(config)  # before there is a run, and before any process group
        with ExitStack() as held:
            run = open_run(config, overrides=overrides, flags=flags, held=held, say=_say)
            if isinstance(run, NewRun):
                now = given_now(config, frozen=config)
                return _train(run.folder, run.config, sources, command, now=now, held=held, new=run)
            now = given_now(config, frozen=freeze.load(run.config_file))
            return _train(run, continued(run, now), sources, command, now=now, held=held)
    except Stop as stop:
        print(f"dsv41-train: {stop.message}", file=sys.stderr, flush=True)
        return Outcome(code=stop.code, reason="not started", step=0, message=stop.message)


def go_on(folder: RunFolder, now: Mapping[str, object]) -> Outcome:
    """Go on with a run as it is, or follow it where a Ray cluster keeps it. now: what `given_now`
    says of this attempt.

    Stop 78 when it is finished or another process works on it.
    """
    config = continued(folder, now)
    if folder.finished():
        raise Stop(
            ExitCode.CONFIG,
            f"{folder.path} is finished: all {config.train.steps:,} steps are done. To train "
            f"further, give more: train.steps={2 * config.train.steps}",
        )
    if (outcome := _followed(folder, config, resume_words(folder))) is not None:
        return outcome
    queue.refuse_second(folder)
    sources = prepared(config)
    with ExitStack() as held:
        if not held.enter_context(folder.held()):
            raise Stop(ExitCode.CONFIG, f"another process is working on {folder.path}")
        _say(f"Continuing {folder.path}, attempt {folder.last_attempt() + 1}.")
        return _train(folder, config, sources, resume_words(folder), now=now, held=held)


def begin_at(
    config: RunConfig, checkpoint: Path, *, overrides: Sequence[str], flags: Sequence[str]
) -> tuple[RunFolder, Outcome]:
    """A new run of `config` that begins with a checkpoint of another one, which it names."""
    sources = prepared(config)
    new = create(
        config,
        overrides=overrides,
        flags=flags,
        begin=lambda folder: inherit(checkpoint, folder),
    )
    with ExitStack() as held:
        ours = held.enter_context(new.folder.held())
        assert ours, "a folder that was just made is held by another process"
        now, command = given_now(config, frozen=config), resume_words(new.folder)
        return new.folder, _train(
            new.folder, new.config, sources, command, now=now, held=held, new=new
        )


def resume_words(folder: RunFolder) -> list[str]:
    """The command that goes on with a run."""
    return ["dsv41", "resume", str(folder.path)]


def _train(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    command: Sequence[str],
    *,
    now: Mapping[str, object],
    held: ExitStack,
    new: NewRun | None = None,
) -> Outcome:
    """held: what holds the run for this process."""
    if config.launcher.kind == "slurm":
        return _queue(folder, config, sources, now=now, new=new)
    try:
        if config.launcher.kind == "local":
            attempt = _begin_here(folder, config, sources, now)
            outcome = run_here(config, folder, attempt)
            attempt.event("end", **outcome.to_dict())
        elif attach.stays(config):
            outcome, attempt = attach.hand_over(
                folder, config, sources, given=now, held=held, say=_say
            )
        else:
            outcome, attempt = supervise(folder, config, sources, given=now, say=_say)
    except Stop:
        if new is not None and (not folder.last_attempt() or folder.is_bare()):
            new.discard()
        raise
    if new is not None and outcome.code in COULD_NOT_BEGIN and folder.is_bare():
        new.discard()
        print(f"dsv41-train: {outcome.message}", file=sys.stderr, flush=True)
        return outcome
    return _closed(outcome, config, folder, attempt, command)


def _followed(folder: RunFolder, config: RunConfig, command: Sequence[str]) -> Outcome | None:
    """The end of a run that a Ray cluster keeps, which is followed until then; None when none
    does."""
    link = attach.living(folder, config)
    if link is None:
        return None
    outcome, attempt = attach.come_back(folder, config, link, say=_say)
    return _closed(outcome, config, folder, attempt, command)


def _closed(
    outcome: Outcome,
    config: RunConfig,
    folder: RunFolder,
    attempt: Attempt,
    command: Sequence[str],
) -> Outcome:
    """`outcome`, once its closing lines are shown."""
    text = closing(
        outcome, config, folder=folder, attempt=attempt, plot=_plot(folder), command=command
    )
    print(text, file=sys.stdout if outcome.code == ExitCode.DONE else sys.stderr, flush=True)
    return outcome


def _queue(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    *,
    now: Mapping[str, object],
    new: NewRun | None,
) -> Outcome:
    try:
        job = queue.queue(folder, config, sources, given=now)
    except BaseException:
        if new is not None:
            new.discard()
        raise
    _say(queue.follow_up(folder, job))
    return Outcome(ExitCode.DONE, "submitted", 0, f"Submitted as job {job}.")


def _begin_here(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    now: Mapping[str, object],
) -> Attempt:
    """A new attempt, and this process ready to run it."""
    here = code_digest(HOME)
    attempt = begin_attempt(folder, config, sources, now, code=here)
    if code_digest(folder.code) != here:
        _say(f"The code has changed since the run was made; this attempt runs {HOME}.")
    # For all processes that this one starts: a user's own data/ must not shadow ours in them.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = str(folder.code)
    return attempt


def _plot(folder: RunFolder) -> Path | None:
    """The picture of the run's metrics, drawn now; None when there is nothing to draw, or no way:
    how the run ended must be told in any case, also after its code was edited."""
    picture = folder.plots / "metrics.png"
    try:
        from trainer.plot import draw, load_curves

        draw([load_curves(folder.path)], picture)
    except (Exception, KeyboardInterrupt):
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
